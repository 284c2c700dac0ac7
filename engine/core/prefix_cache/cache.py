"""Which snapshot serves which prompt, how much memory all of them may take, and who has to leave. Pure.

Snapshots form trees: each holds the keys and values of the stretch behind its parent, and the recurrent state at its
own end. One that leaves gives its state back at once; its stretch stays, and counts, while a descendant needs it.
"""

import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.config import BoundaryKind
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import CacheMiss, PromptOrigin

MAX_GHOSTS = 1024
MAX_RECENT_MISSES = 32


class Snapshot(Protocol):
    """The state behind a prefix: opaque here, immutable, and alive for as long as someone holds it."""

    @property
    def stretch(self) -> Any:
        """Keys and values behind the parent snapshot, and the parent's stretch: what a snapshot behind it needs."""
        ...

    @property
    def stretch_bytes(self) -> int:
        """Of its own stretch, without the parent's."""
        ...

    @property
    def state_bytes(self) -> int:
        """All the rest, which no descendant needs."""
        ...


@dataclass(slots=True, eq=False)
class Held:
    """A snapshot's bytes. num_dependents: snapshots behind it, and prompts that were restored from it.

    snapshot: None when it has left the store and only its stretch is still needed.
    """

    snapshot: Snapshot | None
    stretch: Any
    parent: "Held | None"
    stretch_bytes: int
    state_bytes: int
    num_dependents: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A boundary of some prompt. held: None if its snapshot is on disk alone. parent: digest of the one in front, as it
    is in memory, else on disk."""

    digest: str
    key: PromptKey
    kind: BoundaryKind
    parent: str | None
    origin: PromptOrigin
    pinned: bool
    created_s: float
    used_s: float
    held: Held | None = None
    num_hits: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.key)


@dataclass(slots=True, eq=False)
class Ghost:
    """What is remembered of a snapshot that has left."""

    kind: BoundaryKind
    num_tokens: int
    reason: Literal["evicted", "cleared"]


@dataclass(slots=True)
class Counters:
    """num_hits, num_misses: prompts that were served some tokens, or none; misses: the latter by reason.

    num_unusable: snapshots that were there and could not be restored, or not be read back, or not in time.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_cached_tokens: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_rejected: int = 0
    num_unusable: int = 0
    num_integrity_errors: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class PrefixCache:
    """`clock` gives monotonic seconds. num_bytes: of everything held, what outlives its entry included.

    room: what the engine's memory has for the snapshots now, at most max_bytes of which are used.
    file_parent: whether a snapshot can be read from disk: None if not, else the digest of the one in front of it there,
    '' for none.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic):
        self.max_bytes = max_bytes
        self.room: Callable[[], int] = lambda: sys.maxsize
        self.file_parent: Callable[[str], str | None] = lambda digest: None
        self.num_bytes = 0
        self.counters = Counters()
        self.recent_misses: deque[CacheMiss] = deque(maxlen=MAX_RECENT_MISSES)
        self._clock = clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # by digest, least recently used first
        self._victims: OrderedDict[str, Entry] = OrderedDict()  # those in memory that are not pinned, in the same order
        self._pinned: dict[str, Entry] = {}
        self._lengths: dict[str, Counter[int]] = {}  # tenant -> lengths of its entries
        self._ghosts: OrderedDict[str, Ghost] = OrderedDict()
        self._ghost_lengths: Counter[int] = Counter()
        self._loose: set[Held] = set()  # held, but no entry's any more

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
        lengths = sorted(length for length in self._ghost_lengths if min_tokens <= length < len(key))
        found = [self._ghosts[digest] for _, digest in key.digests(lengths) if digest in self._ghosts]
        return found[-1] if found else None

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
        entry.num_hits += 1
        self.touch(entry)
        return self.hold(entry)

    def hold(self, entry: Entry) -> Held:
        """Keeps the stretch of an entry, whatever becomes of it, until `release`."""
        assert entry.held is not None
        entry.held.num_dependents += 1
        return entry.held

    def pin(self, entry: Entry) -> None:
        if not entry.pinned and entry.held is not None:
            entry.pinned = True
            self._pinned[entry.digest] = self._victims.pop(entry.digest)

    def release(self, held: Held) -> None:
        held.num_dependents -= 1
        self._drop_if_unneeded(held)

    def touch(self, entry: Entry) -> None:
        """What is in front of a used snapshot is used, too: it leaves after it."""
        now = self._clock()
        for one in self.path(entry):
            one.used_s = now
            self._entries.move_to_end(one.digest)
            if one.digest in self._victims:
                self._victims.move_to_end(one.digest)

    def add(self, entry: Entry) -> None:
        """An entry without a snapshot in memory: one that was found on disk."""
        assert entry.held is None and entry.digest not in self._entries
        self._insert(entry)

    def store(self, entry: Entry, snapshot: Snapshot, parent: Held | None) -> bool:
        """Puts a snapshot in, where others have to make room for it; False when it does not fit.

        entry: new, or one that was on disk alone. parent: whose stretch is in front of the snapshot's own.
        """
        assert entry.held is None and self._entries.get(entry.digest, entry) is entry
        need = snapshot.stretch_bytes + snapshot.state_bytes
        if parent is not None:
            parent.num_dependents += 1  # it shall not leave to make room
        if not self.make_way(need, parent):
            if parent is not None:
                self.release(parent)
            return False
        entry.held = Held(snapshot, snapshot.stretch, parent, snapshot.stretch_bytes, snapshot.state_bytes)
        self.num_bytes += need
        self.counters.num_stored += 1
        if entry.digest not in self._entries:
            self._insert(entry)
        (self._pinned if entry.pinned else self._victims)[entry.digest] = entry
        self.touch(entry)
        return True

    def make_way(self, num_bytes: int, parent: Held | None) -> bool:
        """For a snapshot that needs so many; False, and nobody leaves, where they cannot be had."""
        limit = min(self.max_bytes, self.room())
        if self._num_bytes_that_stay(parent) + num_bytes > limit:
            self.counters.num_rejected += 1
            return False
        while self.num_bytes > limit - num_bytes and self.evict():
            pass
        return self.num_bytes <= limit - num_bytes  # a prompt that is being taken in may need the rest

    def evict(self) -> bool:
        """The one that was used longest ago leaves; False if nobody can."""
        if not self._victims:
            return False
        self.counters.num_evicted += 1
        self._evict(next(iter(self._victims.values())))
        return True

    @property
    def pinned_bytes(self) -> int:
        """With the stretches in front of what is pinned."""
        return self._num_bytes_that_stay(None)

    def forget(self, entry: Entry) -> None:
        """Out of the store, for a reason that is no ghost's: it must not serve again."""
        self._remove(entry)

    def prune(self) -> None:
        """Forgets what was on disk alone and is there no more."""
        for entry in [e for e in self._entries.values() if e.held is None and self.file_parent(e.digest) is None]:
            self._remember(entry, "evicted")
            self._remove(entry)

    def clear(self) -> tuple[int, int]:
        """Everything but what is pinned, and what stands in front of it. Returns entries and bytes freed."""
        kept = {one.digest for entry in self._pinned.values() for one in self.path(entry) if one.held is not None}
        gone = [entry for entry in self._entries.values() if entry.digest not in kept]
        before = self.num_bytes
        for entry in gone:
            self._remember(entry, "cleared")
            self._remove(entry)
        return len(gone), before - self.num_bytes

    def reset(self) -> None:
        """Lets go of everything, whatever the books say."""
        self.num_bytes = 0
        for books in (self._entries, self._victims, self._pinned, self._lengths, self._loose):
            books.clear()
        self._ghosts.clear()
        self._ghost_lengths.clear()

    def integrity_error(self) -> str | None:
        """What is wrong with the books while no prompt is being taken in, or None."""
        held = [entry.held for entry in self._entries.values() if entry.held is not None] + list(self._loose)
        num_bytes = sum(h.stretch_bytes + (h.state_bytes if h.snapshot is not None else 0) for h in held)
        if num_bytes != self.num_bytes:
            return f"{num_bytes} bytes are held, {self.num_bytes} are booked"
        dependents = Counter(id(h.parent) for h in held if h.parent is not None)
        if any(h.num_dependents != dependents[id(h)] for h in held):
            return "a snapshot has other dependents than it counts"
        if any(h.snapshot is not None or not h.num_dependents for h in self._loose):
            return "a snapshot outlives its entry without need"
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
        if (ghost := self._ghosts.pop(entry.digest, None)) is not None:
            self._uncount(ghost)

    def _num_bytes_that_stay(self, parent: Held | None) -> int:
        """However many leave: the pinned, and the stretches in front of them and of what is about to come."""
        stays = {id(entry.held): entry.held.state_bytes for entry in self._pinned.values() if entry.held is not None}
        num_bytes, seen = sum(stays.values()), set[int]()
        for held in (*(entry.held for entry in self._pinned.values()), parent):
            while held is not None and id(held) not in seen:
                seen.add(id(held))
                num_bytes += held.stretch_bytes
                held = held.parent
        return num_bytes

    def _evict(self, entry: Entry) -> None:
        parent = self.file_parent(entry.digest)
        if parent is not None:
            self.let_go(entry)
            entry.parent = parent or None
            return
        self._remember(entry, "evicted")
        self._remove(entry)

    def _remember(self, entry: Entry, reason: Literal["evicted", "cleared"]) -> None:
        self._ghosts[entry.digest] = Ghost(entry.kind, entry.num_tokens, reason)
        self._ghost_lengths[entry.num_tokens] += 1
        if len(self._ghosts) > MAX_GHOSTS:
            self._uncount(self._ghosts.popitem(last=False)[1])

    def _uncount(self, ghost: Ghost) -> None:
        self._ghost_lengths[ghost.num_tokens] -= 1
        if not self._ghost_lengths[ghost.num_tokens]:
            del self._ghost_lengths[ghost.num_tokens]

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
        held.snapshot = None
        self.num_bytes -= held.state_bytes
        self._loose.add(held)
        self._drop_if_unneeded(held)

    def _drop_if_unneeded(self, held: Held | None) -> None:
        while held is not None and held in self._loose and not held.num_dependents:
            self._loose.remove(held)
            self.num_bytes -= held.stretch_bytes
            held = held.parent
            if held is not None:
                held.num_dependents -= 1
