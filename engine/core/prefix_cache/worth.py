"""SnapshotWorth: the seconds that a snapshot saves at an engine that has nothing of it, per byte. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.memory.costs import MemoryCosts
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.reuse_forecast import odds_key_of
from engine.core.prefix_cache.store import SnapshotStore


@dataclass(frozen=True, slots=True)
class SnapshotWorth:
    """The worth of a snapshot, in memory or on disk."""

    node: SnapshotNode
    path: tuple[SnapshotNode, ...]
    """The snapshot and its ancestors, nearest first."""
    num_bytes: int
    """Estimated bytes of all of them."""
    rate: float
    """Expected uses per second."""
    probability: float
    """Probability that it is used again at all."""
    density: float
    """Seconds of computing per second and byte that it saves with all of its ancestors, where none of them is."""
    own_density: float
    """The same of the snapshot alone, where its ancestors are."""


def worths(store: SnapshotStore, seconds: Callable[[int, int], float], costs: MemoryCosts) -> Iterator[SnapshotWorth]:
    """Yield the worth of each snapshot, as eviction.py computes that of those in memory.

    A snapshot that no other one continues counts as the last of its conversation, also if it is only on disk.

    Args:
        store: The stored snapshots.
        seconds: Predicts the seconds of computing the tokens from start to end of a prompt.
        costs: Bytes of tokens and states.
    """
    nodes = list(store.nodes())
    continued = {node.parent_digest for node in nodes}
    for node in nodes:
        yield worth_of(node, node.digest not in continued, store, seconds, costs)


def worth_of(
    node: SnapshotNode,
    is_last: bool,
    store: SnapshotStore,
    seconds: Callable[[int, int], float],
    costs: MemoryCosts,
) -> SnapshotWorth:
    """Return the worth of a snapshot.

    Args:
        node: The snapshot.
        is_last: Whether no other snapshot continues it.
        store: See worths.
        seconds: See worths.
        costs: See worths.
    """
    path, lineage, forecast, now = store.path(node), node.lineage, store.lineages.forecast, store.clock()
    start = path[1].num_tokens if len(path) > 1 else 0
    in_memory = lineage.nodes[-1] if lineage.nodes else None
    odds_key = odds_key_of(node, node if is_last else in_memory)
    rate = forecast.rate(lineage, odds_key, now)
    num_bytes = node.num_tokens * costs.token_bytes + len(path) * costs.fixed()
    own_bytes = (node.num_tokens - start) * costs.token_bytes + costs.fixed()
    return SnapshotWorth(
        node,
        tuple(path),
        num_bytes,
        rate,
        forecast.probability(lineage, odds_key, now),
        seconds(0, node.num_tokens) * rate / max(num_bytes, 1),
        seconds(start, node.num_tokens) * rate / max(own_bytes, 1),
    )
