"""The prefix cache of a simple node: system parts and conversations, the least recently used one out first."""

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.core.memory.costs import MemoryCosts
from engine.core.quoting.quoter import NUM_STATES
from tests.benchmarks.simple_nodes.loads import Turn


@dataclass(slots=True, eq=False)
class Boundary:
    """A cached boundary, as KnownPrefixes reads a SnapshotNode."""

    digest: str
    num_tokens: int
    snapshot: bool = True
    """It is in memory."""


@dataclass(slots=True, eq=False)
class Part:
    """A system part, or what a conversation has after its own."""

    num_bytes: int
    system: "Part | None" = None
    num_children: int = 0
    """Conversations that need a system part."""
    is_lent: bool = False
    """Whether a row has its keys and values: its bytes count as the row's."""
    digests: list[str] = field(default_factory=list)


class SimpleCache:
    """Holds the keys and values of prefixes.

    Args:
        costs: Bytes of tokens and states.

    Attributes:
        num_bytes: Bytes of all parts that are not lent to rows.
    """

    def __init__(self, costs: MemoryCosts):
        self.num_bytes = 0
        self._costs = costs
        self._parts: OrderedDict[int, Part] = OrderedDict()  # least recently used first
        self._boundaries: dict[str, Boundary] = {}

    def find(self, digest: str | None) -> Boundary | None:
        """Return the boundary with a digest; None if it is not cached."""
        return None if digest is None else self._boundaries.get(digest)

    def lend(self, turn: Turn) -> None:
        """Count the conversation's bytes as its row's, until `store`."""
        part = self._parts.get(turn.keys.conversation)
        if part is not None and not part.is_lent:
            part.is_lent = True
            self.num_bytes -= part.num_bytes
        self._touch(turn)

    def computed(self, turn: Turn) -> None:
        """Note that a prompt is computed: its boundaries are in its row."""
        system, conversation = self._system(turn), self._parts.get(turn.keys.conversation)
        if conversation is None:
            conversation = self._parts[turn.keys.conversation] = Part(0, system, is_lent=True)
            if system is not None:
                system.num_children += 1
        conversation.is_lent = True
        self._forget(conversation)
        self._add(conversation, turn_digest(turn), turn.num_tokens)
        self._touch(turn)

    def store(self, turn: Turn) -> Boundary:
        """Keep a conversation after its answer."""
        part = self._parts[turn.keys.conversation]
        own_tokens = turn.num_tokens - turn.conversation.system_tokens
        part.num_bytes = own_tokens * self._costs.token_bytes + NUM_STATES * self._costs.fixed()
        part.is_lent = False
        self.num_bytes += part.num_bytes
        self._touch(turn)
        return self._add(part, f"{turn_digest(turn)} answer", turn.num_tokens)

    def shrink(self, max_bytes: float) -> None:
        """Evict the least recently used parts until the cache has at most so many bytes, or all are in use."""
        if self.num_bytes <= max_bytes:
            return
        for key, part in list(self._parts.items()):
            if self.num_bytes <= max_bytes:
                break
            if not part.is_lent and not part.num_children:
                self._evict(key, part)

    def clear(self) -> None:
        """Forget everything."""
        self._parts.clear()
        self._boundaries.clear()
        self.num_bytes = 0

    def _evict(self, key: int, part: Part) -> None:
        del self._parts[key]
        self.num_bytes -= part.num_bytes
        self._forget(part)
        if part.system is not None:
            part.system.num_children -= 1

    def _system(self, turn: Turn) -> Part | None:
        """Return the part of the turn's system part, which has just been computed if it was not there."""
        num_tokens, key = turn.conversation.system_tokens, turn.keys.system
        if not num_tokens:
            return None
        if key not in self._parts:
            part = self._parts[key] = Part(num_tokens * self._costs.token_bytes + self._costs.fixed())
            self.num_bytes += part.num_bytes
            self._add(part, system_digest(turn), num_tokens)
        return self._parts[key]

    def _touch(self, turn: Turn) -> None:
        for key in (turn.keys.conversation, turn.keys.system):
            if key in self._parts:
                self._parts.move_to_end(key)

    def _add(self, part: Part, digest: str, num_tokens: int) -> Boundary:
        part.digests.append(digest)
        boundary = self._boundaries[digest] = Boundary(digest, num_tokens)
        return boundary

    def _forget(self, part: Part) -> None:
        for digest in part.digests:
            self._boundaries.pop(digest, None)
        part.digests.clear()


def system_digest(turn: Turn) -> str:
    return f"system {turn.keys.system}"


def turn_digest(turn: Turn) -> str:
    return f"turn {turn.keys.turns[0]}"
