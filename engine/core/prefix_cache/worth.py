"""EntryWorth: the seconds that an entry is expected to save at a node that has nothing of it, per byte. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.memory.costs import MemoryCosts
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.node import CacheEntry
from engine.core.prefix_cache.reuse_forecast import odds_key_of


@dataclass(frozen=True, slots=True)
class EntryWorth:
    """An entry, in memory or on disk, and what depends on it."""

    entry: CacheEntry
    path: tuple[CacheEntry, ...]
    """The entry and its ancestors, nearest first."""
    num_bytes: int
    """Estimated bytes of all of them."""
    rate: float
    """Expected uses per second."""
    probability: float
    """Probability that it is used again at all."""
    density: float
    """Seconds of computing per second and byte that it saves with all of its ancestors, where none of them is."""
    own_density: float
    """The same of the entry alone, where its ancestors are."""


def worths(cache: PrefixCache, seconds: Callable[[int, int], float], costs: MemoryCosts) -> Iterator[EntryWorth]:
    """Yield the worth of each entry, as eviction.py computes that of snapshots in memory.

    An entry that no other one continues counts as the last of its conversation, also if it is only on disk.

    Args:
        cache: The stored snapshots.
        seconds: Predicts the seconds of computing the tokens from start to end of a prompt.
        costs: Bytes of tokens and states.
    """
    entries = list(cache.index.entries())
    continued = {entry.parent for entry in entries}
    for entry in entries:
        yield worth_of(entry, entry.digest not in continued, cache, seconds, costs)


def worth_of(
    entry: CacheEntry,
    is_last: bool,
    cache: PrefixCache,
    seconds: Callable[[int, int], float],
    costs: MemoryCosts,
) -> EntryWorth:
    """Return the worth of an entry.

    Args:
        entry: The entry.
        is_last: Whether no other entry continues it.
        cache: See worths.
        seconds: See worths.
        costs: See worths.
    """
    path, lineage, forecast, now = cache.index.path(entry), entry.lineage, cache.lineages.forecast, cache.clock()
    start = path[1].num_tokens if len(path) > 1 else 0
    in_memory = lineage.entries[-1] if lineage.entries else None
    odds_key = odds_key_of(entry, entry if is_last else in_memory)
    rate = forecast.rate(lineage, odds_key, now)
    num_bytes = entry.num_tokens * costs.token_bytes + len(path) * costs.fixed()
    own_bytes = (entry.num_tokens - start) * costs.token_bytes + costs.fixed()
    return EntryWorth(
        entry,
        tuple(path),
        num_bytes,
        rate,
        forecast.probability(lineage, odds_key, now),
        seconds(0, entry.num_tokens) * rate / max(num_bytes, 1),
        seconds(start, entry.num_tokens) * rate / max(own_bytes, 1),
    )
