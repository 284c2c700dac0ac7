"""The loads of the simple simulation: conversations of agents, one-shot chats, and questions on long documents."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, repeat

from engine.placement import ConversationKeys
from tests.benchmarks.agents_sim import ANSWER_TOKENS, NEW_TOKENS, OPEN_TOKENS, SYSTEM_TOKENS

MAX_TURN_KEYS = 15
KEY_BITS = 64
NO_SYSTEM = 1
"""Key of the system part of all prompts without one."""

NUM_APPS = 20
"""Applications whose one-shot chats have a system part each; the n-th has 1 / n times the chats of the first."""


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation of one client, of one turn or more."""

    kind: str
    keys: ConversationKeys
    num_turns: int
    new_tokens: int
    """Tokens that the client adds in each later turn."""
    answer_tokens: int
    think_s: float
    system_tokens: int
    last_node: str = ""
    """Node of the last turn; '' before the first."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request: one turn of a conversation, over all nodes that work on it."""

    request_id: str
    conversation: Conversation
    index: int
    keys: ConversationKeys
    num_tokens: int
    """Tokens of the prompt; with those of the answer so far, once it has moved to another node."""
    num_new: int
    """Tokens of the prompt that no request had before it."""
    answer_left: int
    """Tokens of the answer that are missing."""
    num_before: int
    """Tokens that were computed for the turn before, with its answer."""
    arrived_s: float = 0.0
    first_s: float | None = None
    """When its first token came."""
    num_messages: int = 0
    """Questions and bookings."""
    refusals: int = 0
    """How often every node refused it."""
    ingress: str = ""
    is_ended: bool = False
    could: int = 0
    """Tokens of the prompt that some node had computed before, and had not lost with its death."""
    cached: int = 0
    """Of these, the tokens that were cached where it was computed."""


@dataclass(frozen=True)
class Load:
    """Conversations per node.

    Args:
        agents: Agents that begin one after the other.
        chats_per_s: One-shot chats.
        documents_per_s: Documents.
        seconds: How long chats and documents arrive.
        turns: Turns of each agent.
    """

    agents: float = 0.0
    chats_per_s: float = 0.0
    documents_per_s: float = 0.0
    seconds: float = 0.0
    turns: int = 12


LOADS = {
    "agents": Load(agents=3),
    "full": Load(agents=4),
    "chats": Load(chats_per_s=0.1, seconds=600.0),
    "documents": Load(documents_per_s=1 / 450, seconds=3600.0),
    "mix": Load(agents=2, chats_per_s=0.02, documents_per_s=1 / 1800, seconds=1800.0),
}


@dataclass
class Clients:
    """Draws the conversations of a load.

    Args:
        load: The load.
        capacity: Nodes, each weighed by its pace, relative to the machine that the load is meant for.
        open_s: Seconds in which one node of capacity 1 computes an agent's first prompt.
        rng: Source of everything random.
    """

    load: Load
    capacity: float
    open_s: float
    rng: random.Random
    _system: int = field(init=False)
    _apps: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._system = self.key()
        self._apps = [(self.key(), self.rng.randrange(500, 4000)) for _ in range(NUM_APPS)]
        self._app_weights = list(accumulate(1 / (i + 1) for i in range(NUM_APPS)))

    def key(self) -> int:
        """Return a key that no other prompt has."""
        return self.rng.getrandbits(KEY_BITS)

    def begins(self) -> Iterator[tuple[float, Turn]]:
        """Yield the first turn of each conversation and when it is sent."""
        load, at_s = self.load, 0.0
        for _ in range(round(load.agents * self.capacity)):
            yield at_s, self._agent()
            at_s += 1.1 * self.open_s / self.capacity * self.rng.uniform(0.5, 1.5)
        for per_s, make in ((load.chats_per_s, self._chat), (load.documents_per_s, self._document)):
            yield from zip(self._arrivals(per_s * self.capacity), (make() for _ in repeat(None)), strict=False)

    def next(self, turn: Turn) -> Turn | None:
        """Return the turn after one that has its answer; None after the last."""
        conversation, before = turn.conversation, turn.num_tokens
        if turn.index + 1 >= conversation.num_turns:
            return None
        key = self.key()
        keys = ConversationKeys(turn.keys.system, turn.keys.conversation, (key, *turn.keys.turns)[:MAX_TURN_KEYS])
        num_tokens, new = before + conversation.new_tokens, conversation.new_tokens
        answer = conversation.answer_tokens
        return Turn(f"r{key}", conversation, turn.index + 1, keys, num_tokens, new, answer, before)

    def _arrivals(self, per_s: float) -> Iterator[float]:
        at_s = 0.0
        while per_s and (at_s := at_s + self.rng.expovariate(per_s)) < self.load.seconds:
            yield at_s

    def _agent(self) -> Turn:
        return self._first(
            "agent", self._system, SYSTEM_TOKENS, OPEN_TOKENS, self.load.turns, NEW_TOKENS, ANSWER_TOKENS
        )

    def _chat(self) -> Turn:
        (system,) = self.rng.choices(self._apps, cum_weights=self._app_weights)
        own, answer = self.rng.randrange(50, 600), self.rng.randrange(50, 600)
        return self._first("chat", system[0], system[1], system[1] + own, 1, 0, answer)

    def _document(self) -> Turn:
        num_tokens, turns = self.rng.randrange(30_000, 100_000), self.rng.randrange(1, 6)
        return self._first("document", NO_SYSTEM, 0, num_tokens, turns, 200, 400)

    def _first(
        self, kind: str, system: int, system_tokens: int, num_tokens: int, turns: int, new: int, answer: int
    ) -> Turn:
        key = self.key()
        keys = ConversationKeys(system, self.key(), (key,))
        think_s = 2.0 if kind == "agent" else 30.0
        conversation = Conversation(kind, keys, turns, new, answer, think_s, system_tokens)
        return Turn(f"r{key}", conversation, 0, keys, num_tokens, num_tokens - system_tokens, answer, 0)
