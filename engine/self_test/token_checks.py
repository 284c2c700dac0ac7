"""Checks of the tokens: alone and in a batch, with drafts, from snapshots, sparse, with images."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.core.spec_prefill.plan import fingerprint
from engine.protocol import EngineRequest, SparsePlan
from engine.self_test.agreement import SAFETY, Answer, agree
from engine.self_test.bench import CACHING, DRAFTS, Bench, changed
from engine.self_test.core_run import CoreRun
from engine.self_test.outcome import NotApplicable, Outcome, Status, graded
from engine.snapshot_store.files import SnapshotFiles

DISK_GB = 1.0
DISK_CLOSE_S = 30.0

KNOWN_ANSWERS = {"question 1": "12 + 30 = 42", "question 6": "A spider has eight legs.", "image": "blue circle"}
"""What the demo model's answers contain in any precision."""


def rounding(bench: Bench) -> Outcome:
    """Compute the same positions by decoding and by prefill in two chunk sizes."""
    found = bench.rounding
    precise = f"{found.dtype}, unit roundoff {found.unit:.1e}, logits of size {found.size:.1f}"
    usual = found.most if found.is_exact else found.most / SAFETY
    value = f"logprobs of the same position differ by {found.measured:.1e} ({precise})"
    limit = f"{usual:.1e}; broken beyond {found.most:.1e}"
    good, tolerable = found.measured <= usual, found.measured <= found.most
    return graded("decode against prefill", value, limit, good=good, tolerable=tolerable)


def known_answers(bench: Bench) -> Outcome:
    """Compare answers of the demo model with what it was trained to say."""
    if bench.config.model != "demo":
        raise NotApplicable("only the demo model's answers are known")
    answers = bench.alone(*bench.questions, bench.image_request)
    said = {name: bench.prompts.text_of(answers[name].token_ids) for name in KNOWN_ANSWERS}
    wrong = [f"{name}: {said[name]!r}" for name, text in KNOWN_ANSWERS.items() if text not in said[name]]
    value = "; ".join(wrong) or f"{len(said)} of {len(said)} answers known"
    return graded("known answers", value, "the answers of its training", good=not wrong)


def batch(bench: Bench) -> Outcome:
    """Run requests that join and leave each other's batch, one of them aborted, against each alone."""
    name, asked = "alone = batch", bench.questions
    leaver = replace(asked[1], request_id="leaver")
    run = bench.core_run(prefill_chunk_tokens_busy=64)
    arrivals = {0: asked[:1], 2: (leaver, *asked[1:3]), 5: asked[3:4], 9: asked[4:]}
    answers = run.run(arrivals, {7: leaver.request_id})
    answers.pop(leaver.request_id, None)
    return agree(bench.alone(*asked), answers).outcome(name, bench.rounding)


def sampled(bench: Bench) -> Outcome:
    """Run sampled requests with seeds in a batch, against each alone."""
    name, asked = "alone = batch, sampled", bench.sampled
    alone, together = bench.alone(*asked), bench.together([*bench.questions[2:4], *asked])
    found = agree(alone, {one: together[one] for one in alone})
    if bench.rounding.is_exact:
        return found.outcome(name, bench.rounding)
    # the noise of the samples is not known here, so that other tokens have no gap that could be judged
    good, tolerable = not found.errors and found.num_equal == found.num_answers, found.shift <= bench.rounding.limit
    limit = f"equal tokens, logprobs within {bench.rounding.limit:.1e}"
    return graded(name, found.value, limit, good=good, tolerable=tolerable and not found.errors)


def drafts(bench: Bench) -> Outcome:
    """Run requests one by one and in a batch with drafts, against plain decoding."""
    name, asked = "drafts on = off", bench.questions
    found = with_drafts(bench, asked)
    accepted = sum(answer.num_accepted for answer in found.values())
    outcome = agree({**bench.alone(*asked), **one_row(bench.alone(*asked))}, found).outcome(name, bench.rounding)
    return replace(outcome, value=f"{outcome.value}; {accepted} drafts accepted")


def with_drafts(bench: Bench, requests: tuple[EngineRequest, ...], **changes: Any) -> dict[str, Answer]:
    """Return answers with drafts, in a batch and one by one (under names of their own). Needs an MTP head."""
    require_head(bench)
    found = bench.together(requests, mtp=DRAFTS, **changes)
    for one in requests:
        found |= one_row(bench.together([one], mtp=DRAFTS, **changes))
    return found


def require_head(bench: Bench) -> None:
    """Raise NotApplicable if the model has no MTP head."""
    if (reason := bench.runner.no_drafts.get("mtp")) is not None:
        raise NotApplicable(f"no MTP head: {reason}")


def one_row(answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """Return answers under the names that they have with one row at a time."""
    return {f"{name}, one row": answer for name, answer in answers.items()}


def prompt_lookup(bench: Bench) -> Outcome:
    """Run requests in a batch with drafts from their own tokens, against plain decoding."""
    name, asked = "prompt lookup on = off", bench.questions
    if (reason := bench.runner.no_drafts.get("prompt_lookup")) is not None:
        raise NotApplicable(reason)
    found = bench.together(asked, prompt_lookup=DRAFTS)
    accepted = sum(answer.num_accepted for answer in found.values())
    outcome = agree(bench.alone(*asked), found).outcome(name, bench.rounding)
    return replace(outcome, value=f"{outcome.value}; {accepted} drafts accepted")


def snapshot_in_memory(bench: Bench) -> Outcome:
    """Continue a conversation from the prefix cache, against computing all of it."""
    bench.require_prefixes()
    run = bench.core_run(prefix_cache=CACHING)
    second = bench.second_turn(run.run({0: [bench.first_turn]})["first turn"])
    return _hit("snapshot hit = miss, memory", bench, second, run.run({0: [second]})["second turn"])


def snapshot_on_disk(bench: Bench) -> Outcome:
    """Continue a conversation from files that another engine has written, against computing all of it."""
    bench.require_prefixes()
    with tempfile.TemporaryDirectory(prefix="orchard-self-test-") as directory:
        caching = CACHING | {"disk": {"path": directory, "max_gb": DISK_GB}}
        config = changed(bench.config, mtp="off", prompt_lookup="off", prefix_cache=caching)
        writer = _with_files(config, bench)
        second = bench.second_turn(writer.run({0: [bench.first_turn]})["first turn"])
        writer.core.prefixes.close(DISK_CLOSE_S)
        reader = _with_files(config, bench)
        try:
            return _hit("snapshot hit = miss, disk", bench, second, reader.run({0: [second]})["second turn"])
        finally:
            reader.core.prefixes.close(DISK_CLOSE_S)


def _with_files(config: Any, bench: Bench) -> CoreRun:
    disk = config.prefix_cache.disk
    return CoreRun(config, bench.runner, SnapshotFiles(disk, bench.runner.fingerprint))


def _hit(name: str, bench: Bench, second: EngineRequest, answer: Answer) -> Outcome:
    """Compare a second turn with its answer without a cache; it must have used the cache."""
    found = agree({"second turn": bench.together([second])["second turn"]}, {"second turn": answer})
    outcome = found.outcome(name, bench.rounding)
    value = f"{outcome.value}; {answer.num_cached} of {len(second.token_ids)} prompt tokens cached"
    if not answer.num_cached:
        return Outcome(name, Status.FAIL, value, "a cached prefix")
    return replace(outcome, value=value)


def sparse(bench: Bench) -> Outcome:
    """Prefill by plans that keep every token, against dense prefill."""
    name, asked = "sparse, keep 1 = dense", bench.questions
    if bench.runner.no_sparse is not None:
        raise NotApplicable(bench.runner.no_sparse)
    planned = [replace(one, sparse=_keep_all(one.token_ids)) for one in asked]
    return agree(bench.alone(*asked), bench.together(planned)).outcome(name, bench.rounding)


def _keep_all(token_ids: np.ndarray) -> SparsePlan:
    positions = np.arange(len(token_ids), dtype=np.int32)
    return SparsePlan(positions, 0, fingerprint(token_ids, positions, 0))


def image(bench: Bench) -> Outcome:
    """Ask about an image in a batch with text, and again with cached features, against alone."""
    name = "image, alone = batch"
    if "image" not in bench.runner.capabilities["media"]:
        raise NotApplicable("the model sees no images")
    asked = bench.image_request
    bench.runner.free_caches()
    alone, run = bench.alone(asked), bench.core_run()
    answers = run.run({0: bench.questions[:1], 2: [asked], 4: [replace(asked, request_id="cached")]})
    reference = {"image": alone["image"], "cached": alone["image"]}
    return agree(reference, answers).outcome(name, bench.rounding)


TOKEN_CHECKS = {
    "decode against prefill": rounding,
    "known answers": known_answers,
    "alone = batch": batch,
    "alone = batch, sampled": sampled,
    "drafts on = off": drafts,
    "prompt lookup on = off": prompt_lookup,
    "snapshot hit = miss, memory": snapshot_in_memory,
    "snapshot hit = miss, disk": snapshot_on_disk,
    "sparse, keep 1 = dense": sparse,
    "image, alone = batch": image,
}
