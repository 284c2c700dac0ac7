"""Explains why a prompt got fewer cached tokens than it could have."""

from itertools import islice

import numpy as np

from engine.cache_miss import CacheMiss, CacheMissReason
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.store import SnapshotStore
from engine.protocol import PromptOrigin

MAX_COMPARED = 256
"""How many of the most recently used snapshots are compared, so that explaining a miss stays cheap."""

NUM_TOKENS_SHOWN = 8


def explain(
    store: SnapshotStore, request_id: str, key: PromptKey, origin: PromptOrigin, num_cached: int, min_tokens: int
) -> CacheMiss | None:
    """Explain why a prompt was served only `num_cached` tokens from the cache.

    Args:
        store: The stored snapshots.
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
    if (ghost := store.lineages.ghost(key, needed, len(key) - 1)) is not None:
        num_tokens = ghost.num_tokens
        return CacheMiss(
            **served, reason=ghost.reason, num_common=num_tokens, boundary=ghost.kind, boundary_tokens=num_tokens
        )
    best: tuple[int, SnapshotNode] | None = None
    ahead = slice(num_cached, needed)
    for node in islice(store.nodes(), MAX_COMPARED):
        if num_cached and not np.array_equal(key.token_ids[ahead], node.key.token_ids[ahead]):
            continue  # a cheap check first: most served prompts share no further tokens with other snapshots
        num_common = key.num_common(node.key)
        if num_common == len(key):  # the snapshot extends this prompt: nothing differs
            continue
        if node.key.tenant != key.tenant:
            num_common = num_common if num_common == node.num_tokens else 0  # of other tenants, whole snapshots only
        if num_common > num_cached and (best is None or num_common > best[0]):
            best = num_common, node
    if best is None:
        return None if num_cached else CacheMiss(**served, reason="cold")
    num_common, node = best
    reason = _reason(key, node, origin, num_common)
    if reason == "text" and num_common < needed:  # an ordinary new question
        return None
    return CacheMiss(
        **served,
        reason=reason,
        num_common=num_common,
        boundary=node.kind,
        boundary_tokens=node.num_tokens,
        prompt_token_ids=_tokens_at(key, num_common) if reason == "text" else (),
        stored_token_ids=_tokens_at(node.key, num_common) if reason == "text" else (),
    )


def _reason(key: PromptKey, node: SnapshotNode, origin: PromptOrigin, num_common: int) -> CacheMissReason:
    if node.key.tenant != key.tenant:
        return "tenant"
    if any(media.start == num_common for media in (*key.media, *node.key.media)):
        return "image"
    if node.origin.tools != origin.tools:
        return "tools"
    if node.origin.template_kwargs != origin.template_kwargs:
        return "template_kwargs"
    return "text"


def _tokens_at(key: PromptKey, start: int) -> tuple[int, ...]:
    return tuple(key.token_ids[start : start + NUM_TOKENS_SHOWN].tolist())
