"""Checks of the memory budget: the bytes that it predicts against those that MLX holds."""

from dataclasses import replace

from engine.core.row import Row
from engine.host_memory import HostMemory
from engine.self_test.bench import CACHING, DRAFTS, Bench
from engine.self_test.outcome import Outcome, Status, graded
from engine.worker import device_facts

SLACK_BYTES = 2**20
"""Small arrays, and buffers that are a little larger than their arrays."""
ROW_SLACK_BYTES = 2**14
PREFILL_CHUNK_TOKENS = 256
"""Tokens of the chunks of a long prompt."""
SHARE = 0.02
"""Share of predicted bytes by which held ones may exceed them."""
NUM_ROWS = 4


def weights(bench: Bench, before_bytes: int) -> Outcome:
    """Compare the bytes of the weights with what is held since they were loaded.

    Args:
        bench: The loaded model.
        before_bytes: Bytes held before it was loaded.
    """
    predicted, held = bench.runner.memory()["weights_bytes"], device_facts.held_bytes() - before_bytes
    return _compared("weights", predicted, held)


def idle(bench: Bench) -> Outcome:
    """Compare what the budget takes for allocated without any request with what is held now."""
    return _compared("without requests", bench.runner.costs.base_bytes, device_facts.held_bytes())


def rows(bench: Bench) -> Outcome:
    """Compare the predicted cache of a row after a long prompt with the held one."""
    row = Row(bench.questions[-1])
    try:
        while bench.runner.prefill([row], PREFILL_CHUNK_TOKENS).first is None:
            pass
        held = bench.runner.memory()["decode_cache_bytes"]
    finally:
        bench.runner.drop([row.id])
    return _compared("a row", bench.runner.costs.prompt(row.num_tokens), held, ROW_SLACK_BYTES)


def peak(bench: Bench) -> Outcome:
    """Compare the bytes that the budget accounts for at the most with the most that are held within any step."""
    changes = {} if "mtp" in bench.runner.no_drafts else {"mtp": DRAFTS}
    bench.runner.free_caches()
    device_facts.begin_peak()
    run = bench.core_run(**changes)
    answers = run.run({0: bench.questions[:NUM_ROWS], 3: bench.questions[NUM_ROWS:]})
    if errors := [answer.error for answer in answers.values() if answer.error is not None]:
        return Outcome("peak of a batch", Status.FAIL, errors[0])
    held, reserved = device_facts.peak_bytes(), run.reserved_bytes
    headroom = bench.runner.memory_limit_bytes - run.core.budget.needs.limit_bytes
    value = f"{held} bytes held, {reserved} accounted for"
    good, tolerable = held <= reserved * (1 + SHARE) + SLACK_BYTES, held <= reserved + headroom
    limit = f"accounts + {SHARE:.0%}; broken beyond the headroom of {headroom} bytes"
    return graded("peak of a batch", value, limit, good=good, tolerable=tolerable)


def snapshots(bench: Bench) -> Outcome:
    """Compare the bytes of the prefix cache with those that are freed by clearing it."""
    bench.require_prefixes()
    run = bench.core_run(prefix_cache=CACHING)
    long = replace(bench.questions[-1], boundaries=bench.first_turn.boundaries)
    run.run({0: [bench.first_turn, long]})
    predicted, before = run.core.prefixes.store.num_bytes, device_facts.held_bytes()
    run.core.prefixes.clear()
    return _compared("prefix cache", predicted, before - device_facts.held_bytes())


def left_behind(bench: Bench) -> Outcome:
    """See that nothing is held by requests that have ended."""
    bench.runner.free_caches()
    figures = bench.runner.memory()
    caches = figures["decode_cache_bytes"] + figures["prefill_cache_bytes"]
    more = max(0, device_facts.held_bytes() - bench.runner.costs.base_bytes)
    value = f"{caches} bytes in rows' caches, {more} more held than without requests"
    good = not caches and more <= SLACK_BYTES
    return graded("left after requests", value, f"0 bytes, at most {SLACK_BYTES} more", good=good, tolerable=not caches)


def available(bench: Bench) -> Outcome:
    """See whether the machine has enough memory left for the engine to accept requests."""
    config = bench.config.memory.min_available_gb
    host = HostMemory(None if config is None else int(config * 2**30))
    shortage = host.shortage()
    value = shortage or f"{host.available() / 2**30:.1f} GiB available"
    return graded("memory of the machine", value, "enough for new requests", good=shortage is None, tolerable=True)


def _compared(name: str, predicted: int, held: int, slack_bytes: int = SLACK_BYTES) -> Outcome:
    """Return PASS for held bytes about as predicted, WARN for far fewer, FAIL for more."""
    value = f"{held} bytes held, {predicted} predicted"
    most = predicted * (1 + SHARE) + slack_bytes
    good = predicted / 2 - slack_bytes <= held <= most
    return graded(name, value, f"at most {int(most)}", good=good, tolerable=held <= most)


MEMORY_CHECKS = {
    "memory of the machine": available,
    "without requests": idle,
    "a row": rows,
    "peak of a batch": peak,
    "prefix cache": snapshots,
    "left after requests": left_behind,
}
