"""Why a prompt was not served from the prefix cache as far as it could have been."""

from itertools import islice

import numpy as np

from engine.core.prefix_cache.cache import Entry, PrefixCache
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import CacheMiss, CacheMissReason, PromptOrigin

MAX_COMPARED = 256
"""Entries looked at, the most recently used ones: a miss shall not cost more than it has to."""

NUM_TOKENS_SHOWN = 8


def explain(
    cache: PrefixCache, request_id: str, key: PromptKey, origin: PromptOrigin, num_cached: int, min_tokens: int
) -> CacheMiss | None:
    """None if nothing tells that the prompt could have been served at least min_tokens more than `num_cached`."""
    needed = num_cached + (min_tokens if num_cached else 1)
    served = {"request_id": request_id, "num_prompt_tokens": len(key), "num_cached": num_cached}
    if (ghost := cache.ghost(key, needed)) is not None:
        num_tokens = ghost.num_tokens
        return CacheMiss(
            **served, reason=ghost.reason, num_common=num_tokens, boundary=ghost.kind, boundary_tokens=num_tokens
        )
    best: tuple[int, Entry] | None = None
    ahead = slice(num_cached, needed)
    for entry in islice(cache.entries(), MAX_COMPARED):
        if num_cached and not np.array_equal(key.token_ids[ahead], entry.key.token_ids[ahead]):
            continue  # what is soon over: most prompts that were served have nothing more in common with others
        num_common = key.num_common(entry.key)
        if num_common == len(key):  # it goes on where this prompt ends: nothing differs
            continue
        if entry.key.tenant != key.tenant:
            num_common = num_common if num_common == entry.num_tokens else 0  # all or nothing of what is not ours
        if num_common > num_cached and (best is None or num_common > best[0]):
            best = num_common, entry
    if best is None:
        return None if num_cached else CacheMiss(**served, reason="cold")
    num_common, entry = best
    reason = _reason(key, entry, origin, num_common)
    if reason == "text" and num_common < needed:  # another question: nothing to wonder about
        return None
    return CacheMiss(
        **served,
        reason=reason,
        num_common=num_common,
        boundary=entry.kind,
        boundary_tokens=entry.num_tokens,
        prompt_token_ids=_tokens_at(key, num_common) if reason == "text" else (),
        stored_token_ids=_tokens_at(entry.key, num_common) if reason == "text" else (),
    )


def _reason(key: PromptKey, entry: Entry, origin: PromptOrigin, num_common: int) -> CacheMissReason:
    if entry.key.tenant != key.tenant:
        return "tenant"
    if any(media.start == num_common for media in (*key.media, *entry.key.media)):
        return "image"
    if entry.origin.tools != origin.tools:
        return "tools"
    if entry.origin.template_kwargs != origin.template_kwargs:
        return "template_kwargs"
    return "text"


def _tokens_at(key: PromptKey, start: int) -> tuple[int, ...]:
    return tuple(key.token_ids[start : start + NUM_TOKENS_SHOWN].tolist())
