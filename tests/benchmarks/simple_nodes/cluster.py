"""Simple nodes in one virtual time, an ingress at each of them, and clients that choose an ingress at random.

An ingress does what Placer does, with the Placement of deployments/placement: it asks, books, and sends.
"""

import random
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from deployments.placement.place import Placement
from engine.placement import Question, Quote
from tests.benchmarks.agents_sim import OPEN_TOKENS
from tests.benchmarks.sim_runner import Machine
from tests.benchmarks.simple_nodes.device import Device, prompt_seconds
from tests.benchmarks.simple_nodes.loads import Clients, Load, Turn
from tests.support.clock import Clock

ESTIMATE_ERROR = 0.05
"""By how much the ingress' estimate of a prompt's tokens may be wrong."""

QUOTE_TIMEOUT_S = 0.25
MAX_BOOKINGS = 3
"""See Placer."""

NOTICE_S, SILENT_S = 1.0, 9.0
"""Seconds until an answer's ingress notices that its node died, and until all know that the node is no more."""

DRAINING_S = 60.0
"""Seconds in which a draining node refuses, before it leaves."""

RETRY_S, MAX_REFUSALS = 5.0, 60
"""Seconds after which a client sends a request again that every node has refused, and how often it does."""

WARM_UP = 0.5
"""Nodes join, die and are drained after this part of the seconds in which conversations begin, and 600 s."""

Steps = Generator[float, None, None]
"""Yields the seconds until it goes on."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong."""

    delay_s: float = 0.001
    """Mean seconds between a quote or booking and what the ingress does with it."""
    loss: float = 0.0
    """Share of questions and bookings that are lost, with their answers or without."""
    joins: float = 0.0
    """Share of the nodes that join while the others work."""
    dies: float = 0.0
    drains: float = 0.0


FAULTS = {
    "": Faults(),
    "stale": Faults(delay_s=1.0),
    "lost": Faults(loss=0.05),
    "joins": Faults(joins=0.1),
    "dies": Faults(dies=0.1),
    "drains": Faults(drains=0.1),
}


class Cluster:
    """Runs a load on nodes.

    Args:
        machines: One per node.
        load: What is asked, per node of the first machine's pace.
        faults: What goes wrong.
        seed: Of everything random.

    Attributes:
        nodes: All nodes by name, those that have left included.
        turns: All requests.
        num_moved: Turns that were sent to another node than the turn before.
    """

    def __init__(self, machines: Sequence[Machine], load: Load, faults: Faults, seed: int):
        self.clock = Clock(0.0)
        self.rng = random.Random(seed)
        self.nodes: dict[str, Device] = {}
        self.turns: list[Turn] = []
        self.num_moved = self.num_unanswered = 0
        self._faults = faults
        self._living: dict[str, Device] = {}
        self._ingresses: dict[str, Placement] = {}
        self._systems: set[int] = set()  # that have been computed
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        num_late = round(faults.joins * len(machines))
        for machine in machines[num_late:]:
            self._join(machine)
        self._know(self._living)
        open_s = prompt_seconds(machines[0], 0, OPEN_TOKENS)
        capacity = sum(open_s / prompt_seconds(machine, 0, OPEN_TOKENS) for machine in machines)
        self._clients = Clients(load, capacity, open_s, self.rng)
        begins = list(self._clients.begins())
        for at_s, turn in begins:
            self._at(at_s, lambda turn=turn: self._send(turn))
        self._schedule_faults(machines, num_late, 600.0 + WARM_UP * max((at_s for at_s, _ in begins), default=0.0))

    def run(self) -> None:
        """Until no request is open and none will come."""
        while self._events:
            at_s, _, action = heappop(self._events)
            self.clock.now_s = at_s
            action()

    # Nodes

    def _schedule_faults(self, machines: Sequence[Machine], num_late: int, at_s: float) -> None:
        leaving = self.rng.sample(list(self.nodes), round((self._faults.dies + self._faults.drains) * len(machines)))
        for i in range(num_late):
            self._at(at_s, lambda machine=machines[i]: self._know(self._join(machine)))
        for name in leaving:
            self._at(at_s, lambda name=name: self._die(name) if self._faults.dies else self._drain(name))

    def _join(self, machine: Machine) -> dict[str, Device]:
        name = f"node{len(self.nodes)}"
        self.nodes[name] = self._living[name] = Device(name, machine, self.clock, self._ended)
        self._ingresses[name] = Placement()
        return self._living

    def _know(self, nodes: dict[str, Device]) -> None:
        """Let all ingresses know which nodes there are."""
        facts = [node.facts for node in nodes.values()]
        for ingress in self._ingresses.values():
            ingress.update(facts)

    def _die(self, name: str) -> None:
        node = self._living.pop(name)
        for turn in node.stop():
            self._after(NOTICE_S, lambda turn=turn: self._start(self._place(turn, [name])))
        self._after(SILENT_S, lambda: self._know(self._living))

    def _drain(self, name: str) -> None:
        node = self._living[name]
        node.is_draining = True
        for turn in node.stop():
            self._start(self._place(turn, [name]))
        self._after(DRAINING_S, lambda: self._know(self._living))
        self._after(DRAINING_S, lambda: self._living.pop(name) and self._know(self._living))

    # Requests

    def _send(self, turn: Turn) -> None:
        turn.arrived_s = self.clock.now_s
        turn.ingress = self.rng.choice(list(self._living))
        self.turns.append(turn)
        conversation = turn.conversation
        last = self.nodes.get(conversation.last_node)
        if last is not None and last.ended_s is None:
            turn.could = turn.num_before
        elif turn.keys.system in self._systems:
            turn.could = conversation.system_tokens
        self._start(self._place(turn))

    def _place(self, turn: Turn, without: Collection[str] = ()) -> Steps:
        """Find a node for a turn, and send it there."""
        if turn.ingress not in self._living:
            turn.ingress = self.rng.choice(list(self._living))
        placement = self._ingresses[turn.ingress]
        estimated = max(1, int(turn.num_tokens * self.rng.uniform(1 - ESTIMATE_ERROR, 1 + ESTIMATE_ERROR)))
        question = Question(turn.request_id, turn.keys, estimated, max_tokens=turn.answer_left)
        quotes: dict[str, Quote | None] = {}
        yield from self._ask(turn, question, placement.candidates(question, without), quotes)
        if more := placement.more(question, quotes, without):
            yield from self._ask(turn, question, more, quotes)
        name = yield from self._book(turn, question, placement, quotes)
        if name is None:
            yield from self._refused(turn)
        elif name in self._living and not self._living[name].is_draining:
            placement.placed(question, name)
            self._take(turn, name)
        else:
            yield NOTICE_S
            self._start(self._place(turn, {*without, name}))

    def _ask(self, turn: Turn, question: Question, names: Iterable[str], quotes: dict[str, Quote | None]) -> Steps:
        asked = list(names)
        for name in asked:
            node, is_lost = self._living.get(name), self.rng.random() < self._faults.loss
            quotes[name] = None if node is None or is_lost else node.quote(question)
        turn.num_messages += len(asked)
        yield self._delay() + (QUOTE_TIMEOUT_S if any(quotes[name] is None for name in asked) else 0.0)

    def _book(
        self, turn: Turn, question: Question, placement: Placement, quotes: dict[str, Quote | None]
    ) -> Generator[float, None, str | None]:
        for _ in range(MAX_BOOKINGS):
            name = placement.choose(question, quotes)
            if name is None or quotes[name] is None:
                return name
            turn.num_messages += 1
            luck, node = self.rng.random() / max(self._faults.loss, 1e-9), self._living.get(name)
            if node is None or luck < 0.5:
                quotes[name] = None
            else:
                refused = node.book(question)
                if refused is None and luck >= 1.0:
                    yield self._delay()
                    return name
                quotes[name] = refused  # None: the node has booked it, and its answer is lost
            yield self._delay() + (QUOTE_TIMEOUT_S if quotes[name] is None else 0.0)
        return placement.choose(question, quotes)

    def _refused(self, turn: Turn) -> Steps:
        turn.refusals += 1
        if turn.refusals > MAX_REFUSALS:
            self.num_unanswered += 1
            return
        yield RETRY_S
        self._start(self._place(turn))

    def _take(self, turn: Turn, name: str) -> None:
        conversation = turn.conversation
        self.num_moved += conversation.last_node not in ("", name)
        conversation.last_node = name
        self._systems.add(turn.keys.system)
        self.nodes[name].take(turn)
        self._follow(self.nodes[name])

    def _ended(self, turn: Turn) -> None:
        turn.is_ended = True
        if (following := self._clients.next(turn)) is not None:
            self._after(turn.conversation.think_s, lambda: self._send(following))

    # Time

    def _delay(self) -> float:
        return self._faults.delay_s * self.rng.uniform(0.5, 1.5)

    def _follow(self, node: Device) -> None:
        """Come back to a node when something happens there."""
        at_s = node.next_s

        def step() -> None:
            if node.next_s == at_s:  # else it has changed since
                node.step()
                self._follow(node)

        if at_s < float("inf"):
            self._at(at_s, step)

    def _start(self, steps: Steps) -> None:
        if (seconds := next(steps, None)) is not None:
            self._after(seconds, lambda: self._start(steps))

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        self._at(self.clock.now_s + seconds, action)

    def _at(self, at_s: float, action: Callable[[], object]) -> None:
        heappush(self._events, (at_s, next(self._serial), action))
