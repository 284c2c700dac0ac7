"""Speeds of the device: decode steps by batch size, and prefill."""

import time
from collections.abc import Sequence
from dataclasses import replace

from engine.errors import EngineFailed
from engine.protocol import EngineRequest, SamplingParams
from engine.self_test.bench import DRAFTS, Bench
from engine.self_test.core_run import CoreRun
from engine.self_test.outcome import NotApplicable, Outcome, Status
from engine.self_test.token_checks import require_head

BATCHES = (1, 4, 8)


def decode(bench: Bench, batch: int) -> Outcome:
    """Time decode steps without drafts."""
    name = f"decode, {batch} row{'s' if batch > 1 else ''}"
    seconds, num_steps, num_tokens = _decode(bench.core_run(), _endless(bench, batch), bench.scale.speed_tokens)
    value = f"{num_steps / seconds:.1f} steps/s, {num_tokens / seconds:.1f} tokens/s"
    return Outcome(name, Status.PASS, value)


def draft(bench: Bench) -> Outcome:
    """Time decode steps of one row with drafts."""
    require_head(bench)
    run = bench.core_run(mtp=DRAFTS)
    seconds, num_steps, num_tokens = _decode(run, _endless(bench, 1), bench.scale.speed_tokens)
    value = f"{num_steps / seconds:.1f} steps/s, {num_tokens / seconds:.1f} tokens/s"
    return Outcome("decode, 1 row with drafts", Status.PASS, value)


def prefill(bench: Bench) -> Outcome:
    """Time the prefill of a long prompt, the second time that its chunks are computed."""
    limit = bench.runner.max_context_tokens - 1
    num_tokens = min(bench.scale.prefill_tokens, limit)
    ids = bench.prompts.long(num_tokens)
    request = EngineRequest("prefill", ids, SamplingParams(1, temperature=0.0), ())
    _, seconds = (_seconds(bench, request) for _ in range(2))
    return Outcome("prefill", Status.PASS, f"{num_tokens / seconds:.1f} tokens/s, {num_tokens} tokens")


def _seconds(bench: Bench, request: EngineRequest) -> float:
    """Return the seconds of a request alone."""
    began_s = time.perf_counter()
    (answer,) = bench.together([request]).values()
    if answer.error is not None:
        raise EngineFailed(answer.error)
    return time.perf_counter() - began_s


def _endless(bench: Bench, batch: int) -> list[EngineRequest]:
    """Return requests that do not end before the last timed step."""
    sampling = SamplingParams(4 * bench.scale.speed_tokens + 64, temperature=0.0)
    first = replace(bench.questions[1], sampling=sampling, stop_token_ids=())
    return [replace(first, request_id=f"row {i}") for i in range(batch)]


def _decode(run: CoreRun, requests: Sequence[EngineRequest], num_steps: int) -> tuple[float, int, int]:
    """Return the seconds of `num_steps` steps in which all rows decode, the steps, and the tokens of all rows.

    A quarter of as many steps before them are not timed: they compile kernels.
    """
    core = run.core
    for request in requests:
        core.add_request(request)
    while core.scheduler.num_decoding < len(requests):
        if not core.has_work:
            raise NotApplicable(f"memory for {len(requests)} rows at once is missing")
        _step(run)
    for _ in range(num_steps // 4):
        _step(run)
    before, began_s = _num_tokens(run, requests), time.perf_counter()
    for _ in range(num_steps):
        _step(run)
    seconds, num_tokens = time.perf_counter() - began_s, _num_tokens(run, requests) - before
    for request in requests:
        core.abort(request.request_id)
    while core.has_work:
        core.step()
    return seconds, num_steps, num_tokens


def _step(run: CoreRun) -> None:
    run.core.step()
    if errors := [answer.error for answer in run.answers().values() if answer.error is not None]:
        raise EngineFailed(errors[0])


def _num_tokens(run: CoreRun, requests: Sequence[EngineRequest]) -> int:
    return sum(run.num_tokens(request.request_id) for request in requests)


SPEED_CHECKS = {
    **{f"decode, {batch} rows": lambda bench, batch=batch: decode(bench, batch) for batch in BATCHES},
    "decode, 1 row with drafts": draft,
    "prefill": prefill,
}
