"""MovableSnapshots: which snapshots another node should take over, and what becomes of those that have arrived here."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.cost_model import CostModel
from engine.core.memory.costs import MemoryCosts
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.reuse_forecast import odds_key_of
from engine.core.quoting.load import LoadRecorder
from engine.placement import KnownPrefix, MovableSnapshot

MIN_PROBABILITY = 0.05
"""Snapshots that are less likely to be used again stay where they are: those after which a conversation has gone on,
or that it has left."""

MAX_KNOWN = 32
"""Keys of prompts that move with a snapshot: two turns' worth of the longest question."""


@dataclass(frozen=True, slots=True)
class SnapshotWorth:
    """The seconds that a snapshot, in memory or on disk, saves at an engine that has nothing of it."""

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


class MovableSnapshots:
    """Runs on the engine's thread, between two pieces of work.

    Args:
        prefix: The prefix cache.
        loads: Knows the keys of prompts, and the conversations that live here.
        memory_costs: Bytes of tokens and states.
        costs: Predicts seconds.
    """

    def __init__(self, prefix: PrefixCache, loads: LoadRecorder, memory_costs: MemoryCosts, costs: CostModel):
        self._prefix = prefix
        self._loads = loads
        self._memory_costs = memory_costs
        self._costs = costs

    def offered(self, max_snapshots: int, shared_only: bool = False) -> list[MovableSnapshot]:
        """Return the snapshots that save the most seconds per byte, the best first.

        An ancestor of a snapshot is not listed after it, as it moves with it. Pinned ones are prefilled by each node.

        Args:
            max_snapshots: The most to return.
            shared_only: Whether to return only those that several conversations continue, such as system parts.
        """
        known, chosen, covered = self._loads.prefixes.by_digest(), list[MovableSnapshot](), set[str]()
        for worth in sorted(self._worths(), key=lambda one: -one.density):
            node = worth.node
            is_wanted = node.lineage.is_shared or not shared_only
            if not is_wanted or node.pinned or node.digest in covered or worth.probability < MIN_PROBABILITY:
                continue
            if len(chosen) == max_snapshots:
                break
            covered |= {one.digest for one in worth.path}
            chosen.append(self._movable(worth, known))
        return chosen

    def of_conversation(self, conversation: int) -> MovableSnapshot | None:
        """Return the snapshot after the last turn of a conversation that lives here; None if none is stored."""
        if (residence := self._loads.residents.residence_of(conversation)) is None:
            return None
        keys = residence.keys
        if (node := self._loads.prefixes.last_of(keys)) is None:
            return None
        return self._movable(
            self._worth(node, is_last=True), self._loads.prefixes.by_digest((*keys.turns, keys.system))
        )

    def densities(self) -> dict[str, float]:
        """Return by how many seconds per second and byte each snapshot here is worth its file, by digest."""
        return {worth.node.digest: worth.own_density for worth in self._worths()}

    def density(self, snapshot: MovableSnapshot) -> float:
        """Return the same of a snapshot that is offered, by the pace of this engine."""
        return self._costs.prompt_s(0, snapshot.num_tokens) * snapshot.rate / max(snapshot.num_bytes, 1)

    def arrived(self, snapshot: MovableSnapshot, last: str) -> bool:
        """Add what has arrived of a snapshot to the cache, with the keys by which prompts find it.

        Args:
            snapshot: The snapshot.
            last: Digest of the longest part that has a file now: its own, or that of an ancestor.

        Returns:
            Whether all of it is here.
        """
        self._prefix.adopt(last)
        for key, known in reversed(snapshot.known):
            self._loads.prefixes.take_over(key, known)
        is_here = self._prefix.store.get(snapshot.digest) is not None
        if is_here and snapshot.residence is not None:
            self._loads.residents.moved_here(snapshot.residence)
        return is_here

    def _worths(self) -> list[SnapshotWorth]:
        """Return the worth of each snapshot, as eviction.py computes that of those in memory.

        A snapshot that no other one continues counts as the last of its conversation, also if it is only on disk.
        """
        nodes = list(self._prefix.store.nodes())
        continued = {node.parent_digest for node in nodes}
        return [self._worth(node, node.digest not in continued) for node in nodes]

    def _worth(self, node: SnapshotNode, is_last: bool) -> SnapshotWorth:
        """Return the worth of a snapshot. is_last: whether no other snapshot continues it."""
        store, seconds, costs = self._prefix.store, self._costs.prompt_s, self._memory_costs
        path, lineage, forecast, now = store.path(node), node.lineage, store.lineages.forecast, store.clock()
        start = path[1].num_tokens if len(path) > 1 else 0
        in_memory = lineage.nodes[-1] if lineage.nodes else None
        odds_key = odds_key_of(node, node if is_last else in_memory)
        rate = forecast.rate(lineage, odds_key, now)
        num_bytes = node.num_tokens * costs.token_bytes + len(path) * costs.fixed()
        own_bytes = costs.snapshot(node.num_tokens - start)
        return SnapshotWorth(
            node,
            tuple(path),
            num_bytes,
            rate,
            forecast.probability(lineage, odds_key, now),
            seconds(0, node.num_tokens) * rate / max(num_bytes, 1),
            seconds(start, node.num_tokens) * rate / max(own_bytes, 1),
        )

    def _movable(self, worth: SnapshotWorth, known: Mapping[str, list[tuple[int, KnownPrefix]]]) -> MovableSnapshot:
        node, store = worth.node, self._prefix.store
        here = dict(one for each in worth.path for one in known.get(each.digest, ()))  # nearest first
        own = [key for key, each in here.items() if each.conversation is None and each.digest == node.digest]
        conversations = [each.conversation for each in here.values() if each.conversation is not None]
        conversation = conversations[0] if conversations and not node.lineage.is_shared else None
        key = own[0] if own else conversation
        return MovableSnapshot(
            digest=node.digest,
            num_tokens=node.num_tokens,
            num_bytes=worth.num_bytes,
            rate=worth.rate,
            idle_s=max(0.0, store.clock() - node.used_s),
            is_shared=node.lineage.is_shared,
            has_images=bool(node.key.media),
            key=int(node.digest[:16], 16) if key is None else key,
            known=tuple(here.items())[:MAX_KNOWN],
            residence=self._loads.residents.residence_of(conversation),
        )
