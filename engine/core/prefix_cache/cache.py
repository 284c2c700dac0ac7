"""Which snapshot serves which prompt, how much memory all of them may take, and which is evicted. Pure.

Snapshots form trees: each holds the keys and values of the stretch behind its parent, and the recurrent state at its
own end. One that is evicted gives its state back at once; its stretch stays, and counts, while a descendant needs it.

Memory goes to the snapshots that save most seconds of computing per second and byte: `seconds` to compute one again
behind the nearest in front of it that is in memory, times the rate at which its conversation has come back so far
(reuse_forecast.py), over the bytes that its eviction frees (eviction.py). That is GDSF (Cherkasova, 1998) with a
forecast in place of a count of uses. A snapshot that is worth less than what it would push out is not stored, as in
TinyLFU (Einziger et al., 2017), but its conversation is remembered: when that comes back, it is worth more.
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
from engine.core.prefix_cache.node import Entry, Held, Lineage, Snapshot
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import CacheMiss

MAX_RECENT_MISSES = 32

MARGIN = 1.5
"""How much more a new snapshot must be worth than those that are evicted for it."""

READ_BYTES_PER_SECOND = 1e9
"""Assumed pace of reading a snapshot back from disk; it is not measured."""


@dataclass(slots=True)
class Counters:
    """num_hits, num_misses: prompts that were served some tokens, or none; misses: the latter by reason.

    num_unusable: snapshots that were there and could not be restored, or not be read back, or not in time.
    num_outvalued: of the rejected, those that are worth less than what would have had to be evicted for them.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_cached_tokens: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_rejected: int = 0
    num_outvalued: int = 0
    num_unusable: int = 0
    num_integrity_errors: int = 0
    misses: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class NewBoundary:
    """A snapshot that is about to be stored if it is worth more than others."""

    key: PromptKey
    kind: SnapshotKind
    lineage: Lineage
    prompt: str
    """Which prompt it is of; '' if that is not known."""


class PrefixCache:
    """`clock` gives monotonic seconds. num_bytes: of everything held, what outlives its entry included.

    room: what the engine's memory has for the snapshots now, at most max_bytes of which are used.
    file_parent: whether a snapshot can be read from disk: None if not, else the digest of the one in front of it there,
    '' for none.
    seconds: to compute the tokens from start to end of a prompt. read_seconds: to read so many bytes back from disk.
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
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # by digest, least recently used first
        self._victims: OrderedDict[str, Entry] = OrderedDict()  # those in memory that are not pinned, in the same order
        self._pinned: dict[str, Entry] = {}
        self._lengths: dict[str, Counter[int]] = {}  # tenant -> lengths of its entries
        self._lineages = Lineages()
        self._loose: set[Held] = set()  # held, but no entry's any more
        self._in_use: Counter[Held] = Counter()  # by prompts that were restored from them

    def entries(self) -> Iterator[Entry]:
        """The most recently used first."""
        return reversed(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_in_memory(self) -> int:
        return len(self._victims) + len(self._pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def get(self, digest: str | None) -> Entry | None:
        return None if digest is None else self._entries.get(digest)

    def match(self, key: PromptKey, max_tokens: int, in_memory: bool = False) -> Entry | None:
        """The longest stored prefix of at most so many tokens. Tokens and pictures are compared, not only digests.

        in_memory: no entry that is on disk alone.
        """
        lengths = sorted(length for length in self._lengths.get(key.tenant, ()) if length <= max_tokens)
        found = [self._entries[digest] for _, digest in key.digests(lengths) if digest in self._entries]
        for entry in reversed(found):
            is_there = entry.held is not None or not in_memory
            if is_there and entry.key.tenant == key.tenant and key.starts_with(entry.key):
                return entry
        return None

    def ghost(self, key: PromptKey, min_tokens: int) -> Ghost | None:
        """The longest prefix of at least so many tokens that has been here and has left; not all of the prompt."""
        return self._lineages.ghost(key, min_tokens, len(key) - 1)

    def path(self, entry: Entry) -> list[Entry]:
        """The entry, then what is stored in front of it, up to the first that has left."""
        path = []
        at: Entry | None = entry
        while at is not None:
            path.append(at)
            at = self.get(at.parent)
        return path

    def use(self, entry: Entry) -> Held:
        """The snapshot for a prompt that goes on from it; `release` it when the prompt has been taken in."""
        self._lineages.used(entry, self._clock())
        entry.num_hits += 1
        entry.is_awaited = False
        self.touch(entry)
        return self.hold(entry)

    def hold(self, entry: Entry) -> Held:
        """Keeps the stretch of an entry, whatever becomes of it, until `release`."""
        assert entry.held is not None
        entry.held.num_dependents += 1
        self._in_use[entry.held] += 1
        return entry.held

    def release(self, held: Held) -> None:
        self._in_use[held] -= 1
        if self._in_use[held] <= 0:
            del self._in_use[held]
        self._release(held)

    # Lending, see loans.py

    def chain(self, entry: Entry) -> list[Held]:
        """All whose stretches an entry needs, from the first token on."""
        chain, held = [], entry.held
        while held is not None:
            chain.append(held)
            held = held.parent
        return chain[::-1]

    def lendable(self, held: Held | None, also_system: bool = False) -> Iterator[Held]:
        """Those at the end of a chain whose stretches nothing else needs, the last first.

        System parts, which other prompts will need, are left where they are unless also_system.
        """
        num_dependents = 0
        while held is not None and held.num_dependents == num_dependents and held.lent_to is None:
            if held.entry.pinned or (held.entry.kind == "system" and not also_system):
                return
            yield held
            held, num_dependents = held.parent, 1

    def lend(self, held: Held, row_id: str, num_bytes: int) -> None:
        """Count a stretch, which takes so many bytes, as the row's."""
        self.num_bytes -= held.stretch_bytes
        held.lent_to, held.lent_bytes, held.stretch_bytes = row_id, num_bytes, 0

    def take_back(self, held: Held) -> None:
        """Count a stretch as the cache's: what it has, or what it will probably have soon."""
        num_bytes = held.lent_bytes if held.stretch.is_lent else held.stretch.num_bytes
        self.num_bytes += num_bytes - held.stretch_bytes
        held.lent_to, held.stretch_bytes = None, num_bytes

    def is_stored(self, held: Held) -> bool:
        """Whether an entry or a snapshot behind it still needs its stretch."""
        return held in self._loose or (held.entry.held is held and self.get(held.entry.digest) is held.entry)

    def make_way_back(self, lent: Sequence[Held]) -> bool:
        """Evict what is worth less than the snapshots that need these stretches of one chain, the first one first.

        False, and nothing is evicted, if that is not enough.
        """
        behind = self._entries_behind(lent[0])
        if not behind:
            return False
        last = max(behind, key=lambda entry: entry.num_tokens)
        is_needed = any(entry.pinned or entry.is_awaited for entry in behind)
        new = None if is_needed else NewBoundary(last.key, last.kind, last.lineage, "")
        return self._make_way(sum(held.lent_bytes for held in lent), lent[0].parent, new, behind)

    def evict_behind(self, held: Held) -> None:
        """Evict all that needs a stretch, which is not there any more."""
        for entry in sorted(self._entries_behind(held), key=lambda entry: -entry.num_tokens):
            self._evict(entry)

    def _entries_behind(self, held: Held) -> set[Entry]:
        """Those in memory that need a stretch; its own entry is one of them."""
        needs, behind = {held: True}, set[Entry]()
        for entry in (*self._victims.values(), *self._pinned.values()):
            seen, at = list[Held](), entry.held
            while at is not None and at not in needs:
                seen.append(at)
                at = at.parent
            is_behind = at is not None and needs[at]
            needs.update(dict.fromkeys(seen, is_behind))
            if is_behind:
                behind.add(entry)
        return behind

    def fit(self, spared: Collection[Entry] = ()) -> None:
        """Evict the least valuable but the spared while more is counted than there is room for."""
        if self.missing_bytes > 0:
            for victim in self._plan(self.missing_bytes, spared=spared)[0]:
                self._evict(victim.entry)

    @property
    def missing_bytes(self) -> int:
        """How much more is counted than there is room for; negative while there is some."""
        return self.num_bytes - min(self.max_bytes, self.room())

    # What is stored

    def pin(self, entry: Entry) -> None:
        if not entry.pinned and entry.held is not None:
            entry.pinned = True
            self._pinned[entry.digest] = self._victims.pop(entry.digest)

    def touch(self, entry: Entry) -> None:
        """What is in front of a used snapshot is used, too: it leaves after it."""
        now = self._clock()
        for one in self.path(entry):
            one.used_s = one.lineage.seen_s = now
            self._entries.move_to_end(one.digest)
            if one.digest in self._victims:
                self._victims.move_to_end(one.digest)

    def add(self, entry: Entry) -> None:
        """An entry without a snapshot in memory: one that was found on disk."""
        assert entry.held is None and entry.digest not in self._entries
        entry.lineage = self._lineages.started(entry.kind, entry.used_s)
        self._insert(entry)

    def store(
        self, entry: Entry, snapshot: Snapshot, parent: Held | None, prompt: str = "", is_for_row: bool = False
    ) -> bool:
        """Stores a snapshot, and evicts others for it where they are worth less; False when it is rejected.

        Args:
            entry: New, or one that was on disk alone, which is not rejected for its worth: a prompt waits for it.
            parent: Whose stretch is in front of the snapshot's own.
            prompt: See `make_way`.
            is_for_row: The snapshot moves to a row that is about to continue it: the stretch counts as the row's
                memory, to which it is lent next, and the state is stored even if there is no room for it.
        """
        assert entry.held is None and self._entries.get(entry.digest, entry) is entry
        stretch_bytes, state_bytes = 0 if is_for_row else snapshot.stretch_bytes, snapshot.state_bytes
        need, is_new = stretch_bytes + state_bytes, entry.digest not in self._entries
        if parent is not None:
            parent.num_dependents += 1  # it shall not leave to make room
        if is_new:
            in_front = parent.entry if parent is not None else None
            entry.lineage = self._lineages.of_new(entry.key, entry.kind, in_front, prompt, self._clock())
        boundary = NewBoundary(entry.key, entry.kind, entry.lineage, prompt) if is_new and not entry.pinned else None
        if not self._make_way(need, parent, boundary) and not is_for_row:
            if parent is not None:
                self._release(parent)
            return False
        entry.held = Held(snapshot, snapshot.stretch, parent, stretch_bytes, state_bytes, entry)
        insort(entry.lineage.entries, entry, key=lambda one: one.num_tokens)
        self.num_bytes += need
        self.counters.num_stored += 1
        if is_new:
            self._insert(entry)
        (self._pinned if entry.pinned else self._victims)[entry.digest] = entry
        self.touch(entry)
        return True

    def make_way(
        self,
        num_bytes: int,
        parent: Held | None,
        key: PromptKey | None = None,
        kind: SnapshotKind = "turn",
        prompt: str = "",
    ) -> bool:
        """Evicts what is worth less than a snapshot that is about to be taken; False, and nothing is evicted, if that
        is not enough.

        Args:
            num_bytes: Of the snapshot.
            parent: Whose stretch is in front of its own.
            key: What it is found by; None: it is worth more than anything.
            kind: Of its boundary.
            prompt: Which prompt it is of: what is rejected and then asked for by the same prompt is no other use.
        """
        if key is None:
            return self._make_way(num_bytes, parent, None)
        in_front = parent.entry if parent is not None else None
        lineage = self._lineages.of_new(key, kind, in_front, prompt, self._clock())
        return self._make_way(num_bytes, parent, NewBoundary(key, kind, lineage, prompt))

    def can_hold(self, num_bytes: int) -> bool:
        """Whether there would be room for so many bytes more if all were evicted that can be."""
        return self.unevictable_bytes + num_bytes <= min(self.max_bytes, self.room())

    def evict(self, num_bytes: int = 1, overhead_bytes: int = 0) -> bool:
        """Evicts the least valuable until so many bytes are free; False if nothing can be evicted.

        One call orders a thousand entries in 7 ms and evicts all of them in 20 ms more, on one core of a server.

        Args:
            overhead_bytes: What each snapshot takes beside its own bytes.
        """
        victims, _ = self._plan(num_bytes, overhead_bytes)
        for victim in victims:
            self._evict(victim.entry)
        return bool(victims)

    def price(self, num_bytes: int, overhead_bytes: int = 0) -> float:
        """Return the seconds of computing that `evict` is expected to cost; inf if so many bytes cannot be freed.

        Each snapshot counts with the probability that it is used again.
        """
        victims, freed_bytes = self._plan(num_bytes, overhead_bytes)
        return sum(victim.lost_s * victim.probability for victim in victims) if freed_bytes >= num_bytes else inf

    @property
    def pinned_bytes(self) -> int:
        """With the stretches in front of what is pinned."""
        return self._num_bytes_that_stay(())

    @property
    def unevictable_bytes(self) -> int:
        """Those that are pinned, and the stretches that prompts are being computed behind."""
        return self._num_bytes_that_stay(self._in_use)

    def forget(self, entry: Entry) -> None:
        """Out of the store, for a reason that is no ghost's: it must not serve again."""
        self._remove(entry)

    def prune(self) -> None:
        """Forgets what was on disk alone and is there no more."""
        for entry in [e for e in self._entries.values() if e.held is None and self.file_parent(e.digest) is None]:
            self._lineages.remember(entry, "evicted")
            self._remove(entry)

    def clear(self) -> tuple[int, int]:
        """Everything but what is pinned, and what stands in front of it. Returns entries and bytes freed."""
        kept = {one.digest for entry in self._pinned.values() for one in self.path(entry) if one.held is not None}
        gone = [entry for entry in self._entries.values() if entry.digest not in kept]
        before = self.num_bytes
        for entry in gone:
            self._lineages.remember(entry, "cleared")
            self._remove(entry)
        return len(gone), before - self.num_bytes

    def reset(self) -> None:
        """Lets go of everything, whatever the books say."""
        self.num_bytes = 0
        for books in (self._entries, self._victims, self._pinned, self._lengths, self._loose, self._in_use):
            books.clear()
        self._lineages.clear()

    def integrity_error(self) -> str | None:
        """What is wrong with the books while no prompt is being taken in, or None."""
        held = [entry.held for entry in self._entries.values() if entry.held is not None] + list(self._loose)
        num_bytes = sum(h.stretch_bytes + (h.state_bytes if h.snapshot is not None else 0) for h in held)
        if num_bytes != self.num_bytes:
            return f"{num_bytes} bytes are held, {self.num_bytes} are booked"
        if any(held.lent_to is not None or held.stretch.is_lent for held in held):
            return "a snapshot is lent to a row"
        dependents = Counter(id(h.parent) for h in held if h.parent is not None)
        if any(h.num_dependents != dependents[id(h)] for h in held):
            return "a snapshot has other dependents than it counts"
        if any(h.snapshot is not None or not h.num_dependents for h in self._loose):
            return "a snapshot outlives its entry without need"
        if self._in_use:
            return "a prompt holds a snapshot"
        in_lineages = sum(len(lineage.entries) for lineage in {entry.lineage for entry in self._entries.values()})
        if in_lineages != self.num_in_memory:
            return "a lineage has other snapshots than are in memory"
        booked = {**self._victims, **self._pinned}
        if booked != {digest: entry for digest, entry in self._entries.items() if entry.held is not None}:
            return "the list of those that may leave is wrong"
        lengths = {tenant: Counter[int]() for tenant in self._lengths}
        for entry in self._entries.values():
            lengths[entry.key.tenant][entry.num_tokens] += 1
        return None if lengths == self._lengths else "the index by length is wrong"

    def _insert(self, entry: Entry) -> None:
        self._entries[entry.digest] = entry
        self._lengths.setdefault(entry.key.tenant, Counter())[entry.num_tokens] += 1
        self._lineages.stored(entry.digest)

    def _num_bytes_that_stay(self, in_use: Iterable[Held]) -> int:
        """However many are evicted: the pinned, and the stretches in front of them and of what is in use."""
        stays = {id(entry.held): entry.held.state_bytes for entry in self._pinned.values() if entry.held is not None}
        num_bytes, seen = sum(stays.values()), set[int]()
        for held in (*(entry.held for entry in self._pinned.values()), *in_use):
            while held is not None and id(held) not in seen:
                seen.add(id(held))
                num_bytes += held.stretch_bytes
                held = held.parent
        return num_bytes

    def _make_way(
        self, num_bytes: int, parent: Held | None, new: NewBoundary | None, behind: Collection[Entry] = ()
    ) -> bool:
        """behind: entries in memory that are of no use without the new bytes."""
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

    def _value(self, new: NewBoundary, in_front: Entry | None) -> float:
        """Seconds of computing that a new snapshot is expected to save, per second."""
        start = in_front.num_tokens if in_front is not None else 0
        return self.seconds(start, len(new.key)) * self._lineages.rate_of_new(new.lineage, new.kind, self._clock())

    def _plan(
        self,
        num_bytes: int,
        overhead_bytes: int = 0,
        passed: Lineage | None = None,
        spared: Collection[Entry] = (),
    ) -> tuple[list[Victim], int]:
        """The least valuable but the spared that have so many bytes together, or all; and how many those are."""
        candidates = [entry for entry in self._victims.values() if entry not in spared]
        order = iter(EvictionOrder(candidates, self._lineages.forecast, self._cost, self._clock(), passed))
        victims, freed_bytes = list[Victim](), 0
        while freed_bytes < num_bytes and (victim := next(order, None)) is not None:
            victims.append(victim)
            freed_bytes += victim.freed_bytes + overhead_bytes
        return victims, freed_bytes

    def _cost(self, entry: Entry, start: int) -> float:
        """Seconds to have the snapshot of an entry again behind one of so many tokens."""
        computed_s = self.seconds(start, entry.num_tokens)
        if entry.held is None or self.file_parent(entry.digest) is None:
            return computed_s
        return min(computed_s, self.read_seconds(entry.held.stretch_bytes + entry.held.state_bytes))

    def _evict(self, entry: Entry) -> None:
        self.counters.num_evicted += 1
        self._lineages.evicted(entry)
        parent = self.file_parent(entry.digest)
        if parent is not None:
            self.let_go(entry)
            entry.parent = parent or None
            return
        self._lineages.remember(entry, "evicted")
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.digest]
        lengths = self._lengths[entry.key.tenant]
        lengths[entry.num_tokens] -= 1
        if not lengths[entry.num_tokens]:
            del lengths[entry.num_tokens]
        if not lengths:
            del self._lengths[entry.key.tenant]
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """Of the snapshot in memory; its file may still be there."""
        self._victims.pop(entry.digest, None)
        self._pinned.pop(entry.digest, None)
        held, entry.held = entry.held, None
        if held is None:
            return
        entry.lineage.entries.remove(entry)
        held.snapshot = None
        self.num_bytes -= held.state_bytes
        self._loose.add(held)
        self._drop_if_unneeded(held)

    def _release(self, held: Held) -> None:
        held.num_dependents -= 1
        self._drop_if_unneeded(held)

    def _drop_if_unneeded(self, held: Held | None) -> None:
        while held is not None and held in self._loose and not held.num_dependents:
            self._loose.remove(held)
            self.num_bytes -= held.stretch_bytes
            held = held.parent
            if held is not None:
                held.num_dependents -= 1


def _in_memory(held: Held | None) -> Entry | None:
    """The nearest entry in memory, from a snapshot on towards the front."""
    while held is not None and held.snapshot is None:
        held = held.parent
    return held.entry if held is not None else None
