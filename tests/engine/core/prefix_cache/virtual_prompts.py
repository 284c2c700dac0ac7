"""Workloads of conversations on a real SnapshotStore over a virtual clock, without a model."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.store import SnapshotStore
from engine.protocol import Boundary, PromptOrigin
from tests.support.clock import Clock

TOKEN_BYTES = 68 * 100
"""KiB of keys and values per 100 tokens of a 27B model; a token here stands for 100."""
STATE_BYTES = 147 * 1024
"""KiB of recurrent state."""
SECONDS_PER_TOKEN = 0.4

EMPTY = np.empty(0, np.int32)


def seconds(start: int, end: int) -> float:
    """Linear in tokens, and attention over what is in front of them: half as much again at 60,000."""
    return SECONDS_PER_TOKEN * (end - start) + (end * end - start * start) * SECONDS_PER_TOKEN / 2400


@dataclass(frozen=True)
class VirtualSnapshot:
    """A core.Snapshot; it is its own segment."""

    num_own: int
    is_lent = False

    @property
    def num_bytes(self) -> int:
        return self.segment_bytes

    @property
    def segment(self) -> "VirtualSnapshot":
        return self

    @property
    def segment_bytes(self) -> int:
        return TOKEN_BYTES * self.num_own

    @property
    def state_bytes(self) -> int:
        return STATE_BYTES


@dataclass
class Conversation:
    """token_ids: of its prompts so far. system: tokens of its system part."""

    token_ids: np.ndarray
    system: int = 0

    def prompt(self, generation: int = 0) -> tuple[PromptKey, list[Boundary]]:
        """The next prompt; generation: tokens behind its turn, which the one after it does not have."""
        turn = len(self.token_ids)
        tail = np.full(generation + 1, -1, np.int32)
        boundaries = [Boundary("system", self.system)] if self.system else []
        boundaries.append(Boundary("turn", turn))
        if generation:
            boundaries.append(Boundary("prompt", turn + generation))
        return PromptKey("model", "", np.concatenate([self.token_ids, tail])), boundaries


@dataclass
class VirtualEngine:
    """Takes prompts in one after the other, as PrefixCache does. num_computed, computed_s: of all prompts."""

    memory: SnapshotMemory
    clock: Clock
    num_prompts: int = 0
    num_computed: int = 0
    computed_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def cache(self) -> SnapshotStore:
        return self.memory.store

    def new_tokens(self, num_tokens: int) -> np.ndarray:
        return np.array([self.rng.randrange(2**31 - 1) for _ in range(num_tokens)], np.int32)

    def conversation(self, num_tokens: int, system: np.ndarray = EMPTY) -> Conversation:
        ids = np.concatenate([system, self.new_tokens(num_tokens - len(system))])
        return Conversation(ids, len(system))

    def turn(self, conversation: Conversation, num_new: int, generation: int = 0) -> int:
        """The next prompt of a conversation; returns the tokens that are computed for it."""
        conversation.token_ids = np.concatenate([conversation.token_ids, self.new_tokens(num_new)])
        return self.take_in(*conversation.prompt(generation))

    def take_in(self, key: PromptKey, boundaries: list[Boundary]) -> int:
        self.num_prompts += 1
        entry = self.cache.match(key, len(key) - 1)
        base, start = entry, 0 if entry is None else entry.num_tokens
        if entry is not None:
            self.cache.use(entry)
        num_computed, done = len(key) - start, start
        for boundary in boundaries:
            if boundary.num_tokens <= start:
                continue
            self._compute(done, boundary.num_tokens)
            done = boundary.num_tokens
            base = self._take(key, boundary, base)
        self._compute(done, len(key))
        if base is not None:
            self.cache.release(base)
        if self.num_prompts % 20 == 0:
            assert (error := self.cache.integrity_error()) is None, error
        assert self.cache.num_bytes <= self.memory.max_bytes
        return num_computed

    def _compute(self, start: int, end: int) -> None:
        self.num_computed += end - start
        self.computed_s += seconds(start, end)
        self.clock.advance(seconds(start, end))

    def _take(self, key: PromptKey, boundary: Boundary, base: SnapshotNode | None) -> SnapshotNode | None:
        parent = None if base is None else self.cache.get(base.digest)
        num_own = boundary.num_tokens - (parent.num_tokens if parent is not None else 0)
        snapshot, prefix = VirtualSnapshot(num_own), key.prefix(boundary.num_tokens)
        num_bytes, prompt = snapshot.segment_bytes + snapshot.state_bytes, str(self.num_prompts)
        digest, now = None if base is None else base.digest, self.clock()
        node = SnapshotNode(prefix.digest(), prefix, boundary.kind, digest, PromptOrigin(), False, now, now)
        if not self.memory.evict_for(num_bytes, base, node, prompt):
            return base
        if self.memory.add(node, snapshot, base, prompt) is None:
            return base
        if base is not None:
            self.cache.release(base)
        self.cache.hold(node)
        return node


def room(num_conversations: float, num_tokens: int, system: int = 0) -> int:
    """Bytes of so many conversations with a system part in common."""
    return int(num_conversations * ((num_tokens - system) * TOKEN_BYTES + STATE_BYTES)) + (
        system * TOKEN_BYTES + STATE_BYTES if system else 0
    )


Load = Callable[[VirtualEngine], None]


def circle(
    num_agents: int = 4, growth: int = 1, num_rounds: int = 20, generation: int = 0, jitter: float = 0.2
) -> Load:
    """Agents with 60,000 tokens, 20,000 of them in common, that take turns."""

    def load(engine: VirtualEngine) -> None:
        system = engine.new_tokens(200)
        agents = [engine.conversation(600, system) for _ in range(num_agents)]
        for _ in range(num_rounds):
            for agent in agents:
                engine.turn(agent, growth, generation)
                engine.clock.advance(20 * engine.rng.uniform(1 - jitter, 1 + jitter))

    return load


def scan(engine: VirtualEngine) -> None:
    """Two conversations go on, between any two turns comes a prompt that is never seen again."""
    live = [engine.conversation(600) for _ in range(2)]
    for i in range(60):
        engine.turn(live[i % 2], 5)
        engine.clock.advance(20)
        engine.turn(engine.conversation(400), 0)
        engine.clock.advance(5)


def succession(engine: VirtualEngine) -> None:
    """Three conversations at a time, in room for three; every thirty turns one ends and another begins."""
    live = [engine.conversation(600) for _ in range(3)]
    for i in range(240):
        if i % 30 == 29:
            live[(i // 30) % 3] = engine.conversation(600)
        engine.turn(live[i % 3], 1)
        engine.clock.advance(20 * engine.rng.uniform(0.5, 1.5))


def shared_system(engine: VirtualEngine) -> None:
    """Two hundred conversations of one to four turns behind one system part, eight at a time."""
    system, live = engine.new_tokens(200), list[tuple[Conversation, int]]()
    for _ in range(500):
        if len(live) < 8:
            live.append((engine.conversation(220, system), engine.rng.randint(1, 4)))
        conversation, turns = live.pop(engine.rng.randrange(len(live)))
        engine.turn(conversation, 10)
        if turns > 1:
            live.append((conversation, turns - 1))
        engine.clock.advance(5)


def zipf(engine: VirtualEngine, exponent: float = 1.0, num_turns: int = 1000) -> None:
    """Three hundred conversations of 5,000 tokens, the i-th of which is gone on with in proportion to 1/i."""
    conversations = [engine.conversation(50) for _ in range(300)]
    weights = [1 / (i + 1) ** exponent for i in range(300)]
    for conversation in engine.rng.choices(conversations, weights, k=num_turns):
        engine.turn(conversation, 1 if len(conversation.token_ids) < 100 else 0)
        engine.clock.advance(engine.rng.expovariate(1 / 3))


def people(engine: VirtualEngine) -> None:
    """Forty people with conversations of 1 to 20 turns and pauses of seconds to an hour; each has several."""
    system, events = engine.new_tokens(50), list[tuple[float, int]]()
    talks: dict[int, list[Any]] = {}
    for person in range(40):
        events.append((engine.rng.uniform(0, 600), person))
    for _ in range(800):
        events.sort()
        at, person = events.pop(0)
        engine.clock.now_s = max(engine.clock.now_s, at)
        if person not in talks or talks[person][1] == 0:
            talks[person] = [engine.conversation(engine.rng.randint(60, 300), system), engine.rng.randint(1, 20)]
        engine.turn(talks[person][0], engine.rng.randint(2, 20), 3)
        talks[person][1] -= 1
        pause = engine.rng.lognormvariate(4, 1.2) * (20 if talks[person][1] == 0 else 1)
        events.append((engine.clock.now_s + pause, person))


LOADS: dict[str, tuple[int, Load]] = {
    "circle, 3.7 of 4": (room(3.7, 600, 200), circle()),
    "circle, 3.7 of 4, prompt boundaries": (room(3.7, 600, 200), circle(generation=3)),
    "circle, growing": (room(3.7, 600, 200), circle(growth=25, num_rounds=12)),
    "circle, 4.2 of 8": (room(4.2, 600, 200), circle(num_agents=8)),
    "circle, 4.2 of 8, growing": (room(4.2, 600, 200), circle(num_agents=8, growth=25, num_rounds=12)),
    "circle, irregular": (room(3.7, 600, 200), circle(jitter=1.0, num_rounds=40)),
    "circle, all fit": (room(5, 650, 200), circle()),
    "one-shot prompts beside two": (room(2.5, 900), scan),
    "conversations end": (room(3.2, 700), succession),
    "one system part": (room(6, 40, 0) + room(1, 200), shared_system),
    "zipf 1.0": (room(40, 80), zipf),
    "zipf 0.6": (room(40, 80), lambda engine: zipf(engine, 0.6)),
    "zipf 1.4": (room(40, 80), lambda engine: zipf(engine, 1.4)),
    "people, tight": (room(8, 250), people),
    "people, roomy": (room(20, 250), people),
}
