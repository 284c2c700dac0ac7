"""Timelines for clients and the log: the response header, the line per request, and the page of one request."""

from typing import Any

from deployments.engine_ids import node_of
from deployments.http.cache import explanation
from deployments.http.timeline import RequestTimeline, Stretch, sum_by_name
from engine.cache_miss import CacheMiss
from engine.timeline import Decoded, EncodedImage, Prefilled, Queued

TIMING_HEADER = "X-Orchard-Timing"
"""Response header of whole answers, with the milliseconds of each stretch in the syntax of Server-Timing."""

SHOWN_FROM_S = 0.001
"""Shorter stretches are left out of the log."""


def server_timing(timeline: RequestTimeline) -> str:
    """Return the seconds so far by name, such as `body;dur=1.2, prefill;dur=190.0`, in milliseconds."""
    return ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in _sums(timeline).items())


def told(timeline: RequestTimeline) -> str:
    """Return the line of a finished request for the log."""
    usage, sums = timeline.usage, _sums(timeline)
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in sums.items() if seconds >= SHOWN_FROM_S)
    tokens = (
        f"{usage['num_prompt_tokens']} prompt tokens ({usage['num_cached_tokens']} cached), "
        f"{usage['num_tokens']} generated"
        if usage
        else ""
    )
    error = f" ({timeline.error})" if timeline.error else ""
    return f"request {timeline.request_id}: {timeline.outcome} {timeline.status}{error} in {timeline.seconds:.3f} s" + (
        "".join(f"; {what}" for what in (tokens, parts, timeline.note) if what)
    )


def summary(timeline: RequestTimeline) -> dict[str, Any]:
    """Return the item of a list of requests."""
    return {
        "id": timeline.answer_id or timeline.request_id,
        "request_id": timeline.request_id,
        "path": timeline.path,
        "key": timeline.key_name,
        "created": round(timeline.created, 3),
        "outcome": timeline.outcome,
        "status": timeline.status,
        "error": timeline.error or None,
        "note": timeline.note or None,
        "seconds": _rounded(timeline.seconds),
        "first_token_s": _rounded(timeline.first_token_s),
        "node_id": node_of(timeline.node_id),
        "engine_id": timeline.node_id,
        "usage": timeline.usage,
        "why": why(timeline),
    }


def page(timeline: RequestTimeline) -> dict[str, Any]:
    """Return the body of `GET /v1/requests/{id}`."""
    return summary(timeline) | {
        "phases": [_phase(one) for one in timeline.stretches()],
        "choices": [
            {
                "index": row.index,
                "seconds": _rounded(row.seconds),
                "num_tokens": row.num_tokens,
                "finish_reason": row.finish_reason,
                "num_preemptions": row.num_preemptions,
            }
            for row in sorted(timeline.rows, key=lambda row: row.index)
        ],
    }


def why(timeline: RequestTimeline) -> str:
    """Explain in a sentence where most of the time went."""
    stretches = timeline.stretches()
    if not stretches:
        return "nothing was done"
    longest = max(stretches, key=lambda one: one.seconds)
    return f"{longest.seconds:.2f} of {timeline.seconds:.2f} s: {_reason(longest)}"


def _reason(longest: Stretch) -> str:
    match phase := longest.phase:
        case Queued():
            return _waited(phase)
        case Prefilled():
            return _prefilled(phase)
        case Decoded():
            stalled = f", {phase.stalled_s:.2f} s of them waiting for prompts of others" if phase.stalled_s else ""
            drafts = f", {phase.num_accepted} of {phase.num_drafted} draft tokens accepted" if phase.num_drafted else ""
            return f"{phase.num_tokens} tokens were generated in {phase.num_steps} steps{stalled}{drafts}"
    facts = longest.facts
    match longest.name:
        case "grammar":
            return "the grammar of the answer was compiled"
        case "body":
            return f"the body of {facts.get('num_bytes', 0)} bytes arrived"
        case "plan" if facts.get("images_s", 0.0) >= longest.seconds / 2:
            return f"{facts['num_images']} images were read"
        case "plan" if facts.get("sparse_s", 0.0) >= longest.seconds / 2:
            return f"a draft model scored {facts.get('num_scored', 0)} tokens of the prompt"
        case "plan":
            return f"a prompt of {facts.get('num_tokens', 0)} tokens was prepared"
        case "send":
            return "the answer was sent, or the client read it"
        case "engine":
            return "the engine worked, or held the request in its queue"
    return longest.name


def _waited(phase: Queued) -> str:
    lost = {
        "growth": "it was preempted because the answers outgrew the memory; ",
        "priority": "it was preempted for a more urgent request; ",
        "fairness": "it was preempted for a client below its share; ",
        None: "",
    }[phase.preempted_by]
    behind = {
        "rows": f"{phase.num_decoding} answers were running, as many as may (max_running)",
        "memory": f"the memory beside {phase.num_decoding} running answers did not suffice",
        "prompts": f"{phase.num_prompt_tokens} tokens of other prompts were being computed",
        None: f"{phase.num_ahead} requests were queued before it, {phase.num_decoding} answers were running, and "
        f"{phase.num_prompt_tokens} tokens of other prompts were being computed",
    }[phase.obstacle]
    return f"{lost}it waited in the queue: {behind}"


def _prefilled(phase: Prefilled) -> str:
    images_s = sum(image.seconds for image in phase.images)
    if images_s >= phase.seconds / 2:
        return f"{len(phase.images)} images were encoded"
    if phase.others_s >= phase.seconds / 2:
        return (
            f"the device worked for others between the {phase.num_chunks} chunks of its prompt, which took "
            f"{phase.chunks_s:.2f} s"
        )
    computed = f"{phase.num_tokens} tokens of the prompt were computed, {phase.num_cached} were cached"
    return f"{computed}; {explanation(phase.miss)}" if phase.miss is not None else computed


def _phase(one: Stretch) -> dict[str, Any]:
    return {"name": one.name, "seconds": _rounded(one.seconds)} | {
        name: _told(fact) for name, fact in one.facts.items()
    }


def _told(fact: Any) -> Any:
    match fact:
        case float():
            return _rounded(fact)
        case CacheMiss():
            return explanation(fact)
        case EncodedImage():
            return {"num_patches": fact.num_patches, "seconds": _rounded(fact.seconds)}
        case list():
            return [_told(one) for one in fact]
    return fact


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _sums(timeline: RequestTimeline) -> dict[str, float]:
    return sum_by_name(timeline.stretches())
