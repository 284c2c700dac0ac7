"""Which node a request may fetch its prefix from, and what that would save. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from engine.placement import CachedSnapshot, PrefixHolder, Quote

MIN_TOKENS = 64
"""A prefix is fetched only if it saves at least so many tokens."""


def holder_of(
    node_id: str, quotes: Mapping[str, Quote | None], addresses: Mapping[str, str]
) -> tuple[str, CachedSnapshot] | None:
    """Return the node that has the longest prefix of a prompt, and the prefix, if another node may fetch it.

    Args:
        node_id: The node that would fetch.
        quotes: Quotes by node, also of nodes that refuse the request; None for a node that did not answer.
        addresses: Addresses of the nodes' servers of snapshots by node; '' for a node without one.

    Returns:
        None if one of the two shares no snapshots, or none has MIN_TOKENS more than the node itself.
    """
    quote = quotes.get(node_id)
    if quote is None or not addresses.get(node_id):
        return None
    held = {
        other: each.snapshot
        for other, each in quotes.items()
        if each is not None and each.snapshot is not None and other != node_id and addresses.get(other)
    }
    longest = max(held, key=lambda other: held[other].num_tokens, default=None)
    if longest is None or held[longest].num_tokens < quote.cached_tokens + MIN_TOKENS:
        return None
    return longest, held[longest]


def prefix_holder(
    node_id: str, quotes: Mapping[str, Quote | None], addresses: Mapping[str, str]
) -> PrefixHolder | None:
    """Return from where a node may fetch a prefix; None if it may not. See `holder_of`."""
    if (found := holder_of(node_id, quotes, addresses)) is None:
        return None
    other, snapshot = found
    return PrefixHolder(addresses[other], snapshot.digest, snapshot.num_tokens)


def with_fetches(
    quotes: Mapping[str, Quote | None], addresses: Mapping[str, str], num_tokens: int
) -> dict[str, Quote | None]:
    """Lower the seconds of nodes that would fetch a prefix instead of computing it.

    What is left to compute counts as if all of prefill were attention, which is its largest possible share.

    Args:
        quotes: See `holder_of`.
        addresses: See `holder_of`.
        num_tokens: Estimated tokens of the prompt.
    """
    found = dict(quotes)
    for node_id, quote in quotes.items():
        if quote is None or quote.refusal is not None or quote.fetch_bytes_per_s <= 0:
            continue
        if (held := holder_of(node_id, quotes, addresses)) is None:
            continue
        snapshot, start = held[1], quote.cached_tokens
        end, total = min(snapshot.num_tokens, num_tokens), max(num_tokens, start + 1)
        share_left = (total**2 - end**2) / (total**2 - start**2)
        fetch_s = snapshot.num_bytes * (1 - start / snapshot.num_tokens) / quote.fetch_bytes_per_s
        found[node_id] = replace(quote, prefill_s=min(quote.prefill_s, fetch_s + share_left * quote.prefill_s))
    return found
