"""The bodies of `/v1/cache`: counters of all engines, and explanations of recent cache misses."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, get_args

from deployments.engine_ids import node_of
from deployments.requests import EngineAnswer, SilentEngine
from engine.cache_miss import CacheMiss, CacheMissReason
from engine.status import CacheCleared, CacheStatus

Spell = Callable[[int], bytes]
"""Token id to its bytes."""

MAX_QUOTED_TOKENS = 8
MAX_QUOTED_CHARS = 80

MISS_REASONS: tuple[str, ...] = get_args(CacheMissReason)


def cache_body(
    answers: Sequence[EngineAnswer[CacheStatus]], missing: Iterable[SilentEngine], spell: Spell
) -> dict[str, Any]:
    """Return the body of `GET /v1/cache`: totals, each engine that answered, and those without an answer."""
    return {
        "totals": _totals([answer.answer for answer in answers]),
        "engines": [
            {
                **_place(answer),
                "replica_id": answer.replica_id,
                "off": answer.answer.off_reason,
                "totals": _totals([answer.answer]),
                "entries": [asdict(entry) for entry in answer.answer.entries],
                "recent_misses": [
                    {**asdict(miss), "explanation": explanation(miss, spell)} for miss in answer.answer.recent_misses
                ],
                "disk": answer.answer.disk,
                "fetch": None if answer.answer.fetch is None else asdict(answer.answer.fetch),
            }
            for answer in answers
        ],
        "missing": [{**_place(engine), "reason": engine.reason} for engine in missing],
    }


def cleared_body(answers: Sequence[EngineAnswer[CacheCleared]], missing: Iterable[SilentEngine]) -> dict[str, Any]:
    """Return the body of `DELETE /v1/cache`. An engine under `missing` may have cleared its cache all the same."""
    figures = [
        {"entries": answer.answer.num_entries, "bytes": answer.answer.num_bytes, "files": answer.answer.num_files}
        for answer in answers
    ]
    return {
        "cleared": {name: sum(figure[name] for figure in figures) for name in ("entries", "bytes", "files")},
        "engines": [
            {**_place(answer), "replica_id": answer.replica_id, **figure}
            for answer, figure in zip(answers, figures, strict=True)
        ],
        "missing": [{**_place(engine), "reason": engine.reason} for engine in missing],
    }


def _place(engine: EngineAnswer[Any] | SilentEngine) -> dict[str, str]:
    return {"node_id": node_of(engine.engine_id), "engine_id": engine.engine_id}


def _totals(statuses: Iterable[CacheStatus]) -> dict[str, Any]:
    """Sum the counters; zeros without an engine."""
    by_reason = Counter(dict.fromkeys(MISS_REASONS, 0))
    figures = Counter(_figures(CacheStatus()))
    for status in statuses:
        by_reason.update(status.misses)
        figures.update(_figures(status))
    return {**figures, "misses_by_reason": dict(by_reason)}


def _figures(status: CacheStatus) -> dict[str, int]:
    return {
        "bytes": status.num_bytes,
        "max_bytes": status.max_bytes,
        "entries": status.num_entries,
        "pinned": status.num_pinned,
        "hits": status.num_hits,
        "misses": status.num_misses,
        "cached_tokens": status.num_cached_tokens,
        "stored": status.num_stored,
        "evicted": status.num_evicted,
        "rejected": status.num_rejected,
        "unusable": status.num_unusable,
        "integrity_errors": status.num_integrity_errors,
    }


def explanation(miss: CacheMiss, spell: Spell | None = None) -> str:
    """Explain in a sentence why no more of the prompt was cached.

    Args:
        miss: The facts.
        spell: Spells tokens, which are then quoted with control characters escaped; None to quote nothing.
    """
    served = f"{miss.num_cached} of {miss.num_prompt_tokens} tokens were cached; " if miss.num_cached else ""
    return served + _unserved(miss, spell)


def _unserved(miss: CacheMiss, spell: Spell | None) -> str:
    snapshot = f"a snapshot at {'an' if miss.boundary == 'answer' else 'a'} {miss.boundary or 'prompt'} boundary"
    lost = f"{snapshot} covered {miss.boundary_tokens} of {miss.num_prompt_tokens} tokens, but"
    common = (
        f"the first {miss.num_common} of {miss.num_prompt_tokens} tokens match {snapshot} "
        f"({miss.boundary_tokens} tokens);"
    )
    match miss.reason:
        case "cold":
            return f"no snapshot matches the start of this prompt of {miss.num_prompt_tokens} tokens"
        case "evicted":
            return f"{lost} it was evicted to free memory"
        case "cleared":
            return f"{lost} it was cleared"
        case "tenant":
            return f"{lost} it belongs to another tenant (cache_salt or API key)"
        case "image":
            return f"{common} the images differ at token {miss.num_common}"
        case "tools":
            return f"{common} the tools differ"
        case "template_kwargs":
            return f"{common} the chat_template_kwargs differ"
        case "text":
            return f"{common} {_difference(miss, spell)}"


def _difference(miss: CacheMiss, spell: Spell | None) -> str:
    if spell is None:
        at = f"the text differs at token {miss.num_common}"
        return at if miss.prompt_token_ids else "the prompt ends there, and the snapshot continues"
    ours, theirs = quoted(miss.prompt_token_ids, spell), quoted(miss.stored_token_ids, spell)
    if miss.prompt_token_ids:
        return f"the text differs at token {miss.num_common}: {ours} instead of {theirs}"
    return f"the prompt ends there, and the snapshot continues with {theirs}"


def quoted(token_ids: Sequence[int], spell: Spell) -> str:
    """Return the text of the first tokens as a short Python literal, with � for incomplete characters."""
    text = b"".join(spell(token_id) for token_id in token_ids[:MAX_QUOTED_TOKENS]).decode(errors="replace")
    return repr(text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…")
