"""Which snapshot serves which prompt, how much memory all snapshots may take, and which is evicted. Pure.

Snapshots form trees: each holds the KV segment after its parent and the recurrent state at its own end. Evicting one
frees its state at once; its KV segment stays, and counts, while a descendant needs it.

Memory goes to the snapshots that save the most seconds of computing per second and byte: the seconds to recompute one
after the nearest snapshot in memory before it, times the predicted rate of its reuse (reuse_forecast.py), divided by
the bytes that its eviction frees (eviction.py). This is GDSF (Cherkasova, 1998) with a forecast in place of a use
count. A snapshot worth less than those it would evict is not stored, as in TinyLFU (Einziger et al., 2017), but its
conversation is remembered and gains value when it comes back.
"""

import sys
import time
from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from engine.config import SnapshotKind
from engine.core.prefix_cache.eviction import EvictionOrder, Victim
from engine.core.prefix_cache.ghosts import Ghost
from engine.core.prefix_cache.lineages import Lineages
from engine.core.prefix_cache.node import CacheEntry, Lineage, Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import CacheMiss

MAX_RECENT_MISSES = 32

MARGIN = 1.5
"""Factor by which a new snapshot must be worth more than those evicted for it."""

READ_BYTES_PER_SECOND = 1e9
"""Assumed rate of reading from disk until `PrefixCache.read_seconds` is set."""


@dataclass(slots=True)
class Counters:
    """Counters since the start."""

    num_hits: int = 0  # Prompts with a cached prefix.
    num_misses: int = 0  # Prompts without one.
    num_cached_tokens: int = 0  # Prompt tokens that were cached.
    num_stored: int = 0  # Snapshots stored.
    num_evicted: int = 0  # Snapshots evicted.
    num_rejected: int = 0  # Snapshots that did not fit, were not finite, or could not be taken.
    num_outvalued: int = 0  # Rejected snapshots that were worth less than those they would have evicted.
    num_unusable: int = 0  # Stored snapshots that could not be restored, or not be read from disk in time.
    num_integrity_errors: int = 0  # Failed integrity checks, each of which emptied the cache.
    misses: Counter[str] = field(default_factory=Counter)  # Misses by reason.


@dataclass(frozen=True, slots=True)
class NewBoundary:
    """A snapshot that is about to be stored if it is worth more than others."""

    key: PromptKey
    kind: SnapshotKind
    lineage: Lineage
    prompt: str
    """Id of the row whose prompt it belongs to; '' if unknown."""


class PrefixCache:
    """Stores snapshots by prompt prefix, and evicts the least valuable ones.

    Args:
        max_bytes: Upper bound of its memory.
        clock: Returns monotonic seconds.
        seconds: Predicts the seconds of computing the tokens from start to end of a prompt.

    Attributes:
        num_bytes: Bytes of all snapshots, including KV segments that outlive their entries.
        room: Returns the bytes that the engine has for snapshots now, at most max_bytes of which are used.
        file_parent: Returns None if a snapshot cannot be read from disk, else the digest of its parent there ('' for
            none).
        read_seconds: Predicts the seconds of reading a number of bytes from disk.
    """

    def __init__(
        self,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        seconds: Callable[[int, int], float] = lambda start, end: float(end - start),
    ):
        self.max_bytes = max_bytes
        self.room: Callable[[], int] = lambda: sys.maxsize
        self.file_parent: Callable[[str], str | None] = lambda digest: None
        self.seconds = seconds
        self.read_seconds: Callable[[int], float] = lambda num_bytes: num_bytes / READ_BYTES_PER_SECOND
        self.num_bytes = 0
        self.counters = Counters()
        self.recent_misses: deque[CacheMiss] = deque(maxlen=MAX_RECENT_MISSES)
        self._clock = clock
        self._entries: OrderedDict[str, CacheEntry] = OrderedDict()  # by digest, least recently used first
        self._victims: OrderedDict[str, CacheEntry] = OrderedDict()  # unpinned entries in memory, in the same order
        self._pinned: dict[str, CacheEntry] = {}
        self._lengths: dict[str, Counter[int]] = {}  # tenant -> lengths of its entries
        self._lineages = Lineages()
        self._loose: set[SnapshotNode] = set()  # nodes that have outlived their entries
        self._in_use: Counter[SnapshotNode] = Counter()  # nodes referenced by prompts in progress

    def entries(self) -> Iterator[CacheEntry]:
        """Return all entries, the most recently used first."""
        return reversed(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_in_memory(self) -> int:
        return len(self._victims) + len(self._pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def get(self, digest: str | None) -> CacheEntry | None:
        return None if digest is None else self._entries.get(digest)

    def match(self, key: PromptKey, max_tokens: int, in_memory: bool = False) -> CacheEntry | None:
        """Return the longest stored prefix of at most `max_tokens` tokens; None without one.

        Tokens, images and tenant are compared, not only digests.

        Args:
            key: The prompt.
            max_tokens: Largest number of tokens of the prefix.
            in_memory: Whether to ignore entries that are only on disk.
        """
        lengths = sorted(length for length in self._lengths.get(key.tenant, ()) if length <= max_tokens)
        found = [self._entries[digest] for _, digest in key.digests(lengths) if digest in self._entries]
        for entry in reversed(found):
            is_there = entry.node is not None or not in_memory
            if is_there and entry.key.tenant == key.tenant and key.starts_with(entry.key):
                return entry
        return None

    def ghost(self, key: PromptKey, min_tokens: int) -> Ghost | None:
        """Return the longest proper prefix of at least `min_tokens` tokens that was evicted, cleared or rejected."""
        return self._lineages.ghost(key, min_tokens, len(key) - 1)

    def path(self, entry: CacheEntry) -> list[CacheEntry]:
        """Return the entry and its stored ancestors, nearest first, up to the first that is missing."""
        path = []
        at: CacheEntry | None = entry
        while at is not None:
            path.append(at)
            at = self.get(at.parent)
        return path

    def use(self, entry: CacheEntry) -> SnapshotNode:
        """Record a use by a prompt that continues the entry, and return its node; `release` it after the prefill."""
        self._lineages.used(entry, self._clock())
        entry.num_hits += 1
        entry.is_resume_point = False
        self.touch(entry)
        return self.hold(entry)

    def hold(self, entry: CacheEntry) -> SnapshotNode:
        """Keep the KV segment of an entry, even if it is evicted, until `release`."""
        assert entry.node is not None
        entry.node.num_dependents += 1
        self._in_use[entry.node] += 1
        return entry.node

    def release(self, node: SnapshotNode) -> None:
        """Undo `hold`."""
        self._in_use[node] -= 1
        if self._in_use[node] <= 0:
            del self._in_use[node]
        self._release(node)

    # Loans, see loans.py

    def chain(self, entry: CacheEntry) -> list[SnapshotNode]:
        """Return all nodes whose KV segments an entry needs, from the first token on."""
        chain, node = [], entry.node
        while node is not None:
            chain.append(node)
            node = node.parent
        return chain[::-1]

    def lendable(self, node: SnapshotNode | None, also_system: bool = False) -> Iterator[SnapshotNode]:
        """Yield the nodes at the end of a chain whose KV segments nothing else needs, the last first.

        Args:
            node: The last node of the chain.
            also_system: Whether to include system prompts, which other prompts are likely to need.
        """
        num_dependents = 0
        while node is not None and node.num_dependents == num_dependents and node.lent_to is None:
            if node.entry.pinned or (node.entry.kind == "system" and not also_system):
                return
            yield node
            node, num_dependents = node.parent, 1

    def lend(self, node: SnapshotNode, row_id: str, num_bytes: int) -> None:
        """Count a KV segment of `num_bytes` as the row's memory."""
        self.num_bytes -= node.segment_bytes
        node.lent_to, node.lent_bytes, node.segment_bytes = row_id, num_bytes, 0

    def take_back(self, node: SnapshotNode) -> None:
        """Count a KV segment as the cache's memory again.

        Its bytes are the actual ones or, while it is lent, those expected once it is copied back.
        """
        num_bytes = node.lent_bytes if node.segment.is_lent else node.segment.num_bytes
        self.num_bytes += num_bytes - node.segment_bytes
        node.lent_to, node.segment_bytes = None, num_bytes

    def is_stored(self, node: SnapshotNode) -> bool:
        """Return whether an entry or a descendant still needs the node's KV segment."""
        return node in self._loose or (node.entry.node is node and self.get(node.entry.digest) is node.entry)

    def evict_for_return(self, lent: Sequence[SnapshotNode]) -> bool:
        """Evict snapshots to copy lent KV segments of one chain back, if the snapshots that need them are worth more.

        Args:
            lent: Nodes of one chain, the first one first.

        Returns:
            False, with nothing evicted, if their memory cannot be freed or is not worth it.
        """
        behind = self._entries_behind(lent[0])
        if not behind:
            return False
        last = max(behind, key=lambda entry: entry.num_tokens)
        is_needed = any(entry.pinned or entry.is_resume_point for entry in behind)
        new = None if is_needed else NewBoundary(last.key, last.kind, last.lineage, "")
        return self._evict_for(sum(node.lent_bytes for node in lent), lent[0].parent, new, behind)

    def evict_behind(self, node: SnapshotNode) -> None:
        """Evict all entries that need the node's KV segment, which is lost."""
        for entry in sorted(self._entries_behind(node), key=lambda entry: -entry.num_tokens):
            self._evict(entry)

    def _entries_behind(self, node: SnapshotNode) -> set[CacheEntry]:
        """Return the entries in memory that need a node's KV segment, its own included."""
        needs, behind = {node: True}, set[CacheEntry]()
        for entry in (*self._victims.values(), *self._pinned.values()):
            seen, at = list[SnapshotNode](), entry.node
            while at is not None and at not in needs:
                seen.append(at)
                at = at.parent
            is_behind = at is not None and needs[at]
            needs.update(dict.fromkeys(seen, is_behind))
            if is_behind:
                behind.add(entry)
        return behind

    def fit(self, spared: Collection[CacheEntry] = ()) -> None:
        """Evict the least valuable entries, except `spared`, until the cache fits into its memory."""
        if self.missing_bytes > 0:
            for victim in self._plan(self.missing_bytes, spared=spared)[0]:
                self._evict(victim.entry)

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the cache exceeds its memory; negative if it fits."""
        return self.num_bytes - min(self.max_bytes, self.room())

    # Storing and evicting

    def pin(self, entry: CacheEntry) -> None:
        """Never evict an entry from now on."""
        if not entry.pinned and entry.node is not None:
            entry.pinned = True
            self._pinned[entry.digest] = self._victims.pop(entry.digest)

    def touch(self, entry: CacheEntry) -> None:
        """Mark an entry and its ancestors as used now."""
        now = self._clock()
        for one in self.path(entry):
            one.used_s = one.lineage.seen_s = now
            self._entries.move_to_end(one.digest)
            if one.digest in self._victims:
                self._victims.move_to_end(one.digest)

    def add(self, entry: CacheEntry) -> None:
        """Add an entry whose snapshot is only on disk."""
        assert entry.node is None and entry.digest not in self._entries
        entry.lineage = self._lineages.started(entry.kind, entry.used_s)
        self._insert(entry)

    def store(
        self,
        entry: CacheEntry,
        snapshot: Snapshot,
        parent: SnapshotNode | None,
        prompt: str = "",
        is_for_row: bool = False,
    ) -> bool:
        """Store a snapshot, evicting less valuable ones; return False if it is rejected.

        Args:
            entry: A new entry, or one that was only on disk; the latter is never rejected for its value.
            snapshot: The snapshot.
            parent: The node before the snapshot's own KV segment.
            prompt: See `evict_for`.
            is_for_row: Whether the snapshot moves to a row that is about to continue it: the KV segment counts as the
                row's memory, to which it is lent next, and the state is stored even if it does not fit.
        """
        assert entry.node is None and self._entries.get(entry.digest, entry) is entry
        segment_bytes, state_bytes = 0 if is_for_row else snapshot.segment_bytes, snapshot.state_bytes
        need, is_new = segment_bytes + state_bytes, entry.digest not in self._entries
        if parent is not None:
            parent.num_dependents += 1  # the parent must not be evicted for its child
        if is_new:
            in_front = parent.entry if parent is not None else None
            entry.lineage = self._lineages.of_new(entry.key, entry.kind, in_front, prompt, self._clock())
        boundary = NewBoundary(entry.key, entry.kind, entry.lineage, prompt) if is_new and not entry.pinned else None
        if not self._evict_for(need, parent, boundary) and not is_for_row:
            if parent is not None:
                self._release(parent)
            return False
        entry.node = SnapshotNode(snapshot, snapshot.segment, parent, segment_bytes, state_bytes, entry)
        insort(entry.lineage.entries, entry, key=lambda one: one.num_tokens)
        self.num_bytes += need
        self.counters.num_stored += 1
        if is_new:
            self._insert(entry)
        (self._pinned if entry.pinned else self._victims)[entry.digest] = entry
        self.touch(entry)
        return True

    def evict_for(
        self,
        num_bytes: int,
        parent: SnapshotNode | None,
        key: PromptKey | None = None,
        kind: SnapshotKind = "turn",
        prompt: str = "",
    ) -> bool:
        """Evict what is worth less than a snapshot that is about to be taken.

        Args:
            num_bytes: Bytes of the snapshot.
            parent: The node before its KV segment.
            key: The tokens before its boundary; None if it is worth more than anything.
            kind: Kind of its boundary.
            prompt: Id of the row whose prompt it belongs to. A rejected snapshot that the same prompt asks for again
                does not count as reuse.

        Returns:
            False, with nothing evicted, if its memory cannot be freed or is not worth it.
        """
        if key is None:
            return self._evict_for(num_bytes, parent, None)
        in_front = parent.entry if parent is not None else None
        lineage = self._lineages.of_new(key, kind, in_front, prompt, self._clock())
        return self._evict_for(num_bytes, parent, NewBoundary(key, kind, lineage, prompt))

    def can_hold(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more would fit if everything evictable were evicted."""
        return self.unevictable_bytes + num_bytes <= min(self.max_bytes, self.room())

    def evict(self, num_bytes: int = 1, overhead_bytes: int = 0) -> bool:
        """Evict the least valuable entries until `num_bytes` are free; return False if nothing can be evicted.

        Ordering a thousand entries takes 7 ms, and evicting all of them 20 ms more, on one core of a server.

        Args:
            num_bytes: Bytes to free.
            overhead_bytes: Bytes that each snapshot takes beside its own.
        """
        victims, _ = self._plan(num_bytes, overhead_bytes)
        for victim in victims:
            self._evict(victim.entry)
        return bool(victims)

    def price(self, num_bytes: int, overhead_bytes: int = 0) -> float:
        """Return the expected seconds of recomputation that `evict` would cause; inf if `num_bytes` cannot be freed.

        Each snapshot counts with its probability of reuse.
        """
        victims, freed_bytes = self._plan(num_bytes, overhead_bytes)
        return sum(victim.lost_s * victim.probability for victim in victims) if freed_bytes >= num_bytes else inf

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned snapshots and the KV segments before them."""
        return self._num_bytes_that_stay(())

    @property
    def unevictable_bytes(self) -> int:
        """Bytes of pinned snapshots, and of the KV segments that prompts in progress depend on."""
        return self._num_bytes_that_stay(self._in_use)

    def forget(self, entry: CacheEntry) -> None:
        """Remove an entry that must not be reused; it is not remembered as a ghost."""
        self._remove(entry)

    def prune(self) -> None:
        """Remove entries that were only on disk and whose files have been removed."""
        for entry in [e for e in self._entries.values() if e.node is None and self.file_parent(e.digest) is None]:
            self._lineages.remember(entry, "evicted")
            self._remove(entry)

    def clear(self) -> tuple[int, int]:
        """Remove everything but pinned entries and their ancestors. Return the entries and bytes freed."""
        kept = {one.digest for entry in self._pinned.values() for one in self.path(entry) if one.node is not None}
        removed = [entry for entry in self._entries.values() if entry.digest not in kept]
        before = self.num_bytes
        for entry in removed:
            self._lineages.remember(entry, "cleared")
            self._remove(entry)
        return len(removed), before - self.num_bytes

    def reset(self) -> None:
        """Drop everything, including state that an integrity error has made inconsistent."""
        self.num_bytes = 0
        for index in (self._entries, self._victims, self._pinned, self._lengths, self._loose, self._in_use):
            index.clear()
        self._lineages.clear()

    def integrity_error(self) -> str | None:
        """Return the first inconsistency found while no prompt is being prefilled; None without one."""
        node = [entry.node for entry in self._entries.values() if entry.node is not None] + list(self._loose)
        num_bytes = sum(h.segment_bytes + (h.state_bytes if h.snapshot is not None else 0) for h in node)
        if num_bytes != self.num_bytes:
            return f"the snapshots take {num_bytes} bytes, but {self.num_bytes} are accounted for"
        if any(node.lent_to is not None or node.segment.is_lent for node in node):
            return "a snapshot is still lent to a row"
        dependents = Counter(id(h.parent) for h in node if h.parent is not None)
        if any(h.num_dependents != dependents[id(h)] for h in node):
            return "the number of dependents of a snapshot is wrong"
        if any(h.snapshot is not None or not h.num_dependents for h in self._loose):
            return "a removed entry has a snapshot or no dependents"
        if self._in_use:
            return "a snapshot is still used by a prompt"
        in_lineages = sum(len(lineage.entries) for lineage in {entry.lineage for entry in self._entries.values()})
        if in_lineages != self.num_in_memory:
            return f"the lineages have {in_lineages} snapshots, but {self.num_in_memory} are in memory"
        listed = {**self._victims, **self._pinned}
        if listed != {digest: entry for digest, entry in self._entries.items() if entry.node is not None}:
            return "the evictable and pinned snapshots are not those in memory"
        lengths = {tenant: Counter[int]() for tenant in self._lengths}
        for entry in self._entries.values():
            lengths[entry.key.tenant][entry.num_tokens] += 1
        return None if lengths == self._lengths else "the index by length does not match the entries"

    def _insert(self, entry: CacheEntry) -> None:
        self._entries[entry.digest] = entry
        self._lengths.setdefault(entry.key.tenant, Counter())[entry.num_tokens] += 1
        self._lineages.stored(entry.digest)

    def _num_bytes_that_stay(self, in_use: Iterable[SnapshotNode]) -> int:
        """Return the bytes that no eviction frees.

        They are pinned snapshots, and the KV segments of pinned snapshots, of nodes in use, and of all their ancestors.
        """
        stays = {id(entry.node): entry.node.state_bytes for entry in self._pinned.values() if entry.node is not None}
        num_bytes, seen = sum(stays.values()), set[int]()
        for node in (*(entry.node for entry in self._pinned.values()), *in_use):
            while node is not None and id(node) not in seen:
                seen.add(id(node))
                num_bytes += node.segment_bytes
                node = node.parent
        return num_bytes

    def _evict_for(
        self, num_bytes: int, parent: SnapshotNode | None, new: NewBoundary | None, behind: Collection[CacheEntry] = ()
    ) -> bool:
        """Implement `evict_for`.

        Args:
            num_bytes: Bytes to free.
            parent: The node before the new KV segment.
            new: The snapshot whose value is compared; None if it is worth more than anything.
            behind: Entries in memory that are of no use without the new bytes.
        """
        limit = min(self.max_bytes, self.room())
        in_use = self._in_use if parent is None else (parent, *self._in_use)
        if self._num_bytes_that_stay(in_use) + num_bytes > limit:
            self.counters.num_rejected += 1
            return False
        missing = self.num_bytes + num_bytes - limit
        if missing <= 0:
            return True
        in_front = _in_memory(parent)
        passed = new.lineage if new is not None and not behind else None
        victims, freed_bytes = self._plan(missing, passed=passed, spared=behind)
        if behind and freed_bytes < missing:
            self.counters.num_rejected += 1
            return False
        worth = sum(victim.lost_s * victim.rate for victim in victims)
        if new is not None and MARGIN * worth > self._value(new, in_front):
            self.counters.num_rejected += 1
            self.counters.num_outvalued += 1
            self._lineages.rejected(new.key, new.kind, new.lineage, new.prompt)
            return False
        for victim in victims:
            self._evict(victim.entry)
        return True

    def _value(self, new: NewBoundary, in_front: CacheEntry | None) -> float:
        """Return the seconds of computing per second that a new snapshot is expected to save."""
        start = in_front.num_tokens if in_front is not None else 0
        return self.seconds(start, len(new.key)) * self._lineages.rate_of_new(new.lineage, new.kind, self._clock())

    def _plan(
        self,
        num_bytes: int,
        overhead_bytes: int = 0,
        passed: Lineage | None = None,
        spared: Collection[CacheEntry] = (),
    ) -> tuple[list[Victim], int]:
        """Return the least valuable entries, except `spared`, that free `num_bytes`, and the bytes freed.

        All entries except `spared` are returned if together they free fewer bytes.
        """
        candidates = [entry for entry in self._victims.values() if entry not in spared]
        order = iter(EvictionOrder(candidates, self._lineages.forecast, self._cost, self._clock(), passed))
        victims, freed_bytes = list[Victim](), 0
        while freed_bytes < num_bytes and (victim := next(order, None)) is not None:
            victims.append(victim)
            freed_bytes += victim.freed_bytes + overhead_bytes
        return victims, freed_bytes

    def _cost(self, entry: CacheEntry, start: int) -> float:
        """Return the seconds to recompute or read back an entry's snapshot after one of `start` tokens."""
        computed_s = self.seconds(start, entry.num_tokens)
        if entry.node is None or self.file_parent(entry.digest) is None:
            return computed_s
        return min(computed_s, self.read_seconds(entry.node.segment_bytes + entry.node.state_bytes))

    def _evict(self, entry: CacheEntry) -> None:
        self.counters.num_evicted += 1
        self._lineages.evicted(entry)
        parent = self.file_parent(entry.digest)
        if parent is not None:
            self.forget_memory(entry)
            entry.parent = parent or None
            return
        self._lineages.remember(entry, "evicted")
        self._remove(entry)

    def _remove(self, entry: CacheEntry) -> None:
        del self._entries[entry.digest]
        lengths = self._lengths[entry.key.tenant]
        lengths[entry.num_tokens] -= 1
        if not lengths[entry.num_tokens]:
            del lengths[entry.num_tokens]
        if not lengths:
            del self._lengths[entry.key.tenant]
        self.forget_memory(entry)

    def forget_memory(self, entry: CacheEntry) -> None:
        """Drop the snapshot of an entry from memory; its file may remain."""
        self._victims.pop(entry.digest, None)
        self._pinned.pop(entry.digest, None)
        node, entry.node = entry.node, None
        if node is None:
            return
        entry.lineage.entries.remove(entry)
        node.snapshot = None
        self.num_bytes -= node.state_bytes
        self._loose.add(node)
        self._drop_if_unneeded(node)

    def _release(self, node: SnapshotNode) -> None:
        node.num_dependents -= 1
        self._drop_if_unneeded(node)

    def _drop_if_unneeded(self, node: SnapshotNode | None) -> None:
        while node is not None and node in self._loose and not node.num_dependents:
            self._loose.remove(node)
            self.num_bytes -= node.segment_bytes
            node = node.parent
            if node is not None:
                node.num_dependents -= 1


def _in_memory(node: SnapshotNode | None) -> CacheEntry | None:
    """Return the nearest entry with a snapshot in memory, from a node towards the first token."""
    while node is not None and node.snapshot is None:
        node = node.parent
    return node.entry if node is not None else None
