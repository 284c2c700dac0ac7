"""Explains why a prompt got fewer cached tokens than it could have."""

from itertools import islice

import numpy as np

from engine.cache_miss import CacheMiss, CacheMissReason
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.node import CacheEntry
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import PromptOrigin

MAX_COMPARED = 256
"""How many of the most recently used entries are compared, so that explaining a miss stays cheap."""

NUM_TOKENS_SHOWN = 8


def explain(
    cache: PrefixCache, request_id: str, key: PromptKey, origin: PromptOrigin, num_cached: int, min_tokens: int
) -> CacheMiss | None:
    """Explain why a prompt was served only `num_cached` tokens from the cache.

    Args:
        cache: The prefix cache.
        request_id: Id of the prompt's request.
        key: The prompt.
        origin: How the prompt was rendered.
        num_cached: Tokens that were served.
        min_tokens: Fewer additional tokens are not worth an explanation.

    Returns:
        None if no sign was found that at least min_tokens more could have been served.
    """
    needed = num_cached + (min_tokens if num_cached else 1)
    served = {"request_id": request_id, "num_prompt_tokens": len(key), "num_cached": num_cached}
    if (ghost := cache.lineages.ghost(key, needed, len(key) - 1)) is not None:
        num_tokens = ghost.num_tokens
        return CacheMiss(
            **served, reason=ghost.reason, num_common=num_tokens, boundary=ghost.kind, boundary_tokens=num_tokens
        )
    best: tuple[int, CacheEntry] | None = None
    ahead = slice(num_cached, needed)
    for entry in islice(cache.index.entries(), MAX_COMPARED):
        if num_cached and not np.array_equal(key.token_ids[ahead], entry.key.token_ids[ahead]):
            continue  # a cheap check first: most served prompts share no further tokens with other entries
        num_common = key.num_common(entry.key)
        if num_common == len(key):  # the entry extends this prompt: nothing differs
            continue
        if entry.key.tenant != key.tenant:
            num_common = num_common if num_common == entry.num_tokens else 0  # of other tenants, whole entries only
        if num_common > num_cached and (best is None or num_common > best[0]):
            best = num_common, entry
    if best is None:
        return None if num_cached else CacheMiss(**served, reason="cold")
    num_common, entry = best
    reason = _reason(key, entry, origin, num_common)
    if reason == "text" and num_common < needed:  # an ordinary new question
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


def _reason(key: PromptKey, entry: CacheEntry, origin: PromptOrigin, num_common: int) -> CacheMissReason:
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
