"""Placer: asks a few engines what a request would cost there, and books it at the best one."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ray.serve.handle import DeploymentHandle

from deployments.calls.population import among
from deployments.calls.replica_calls import call_within
from deployments.calls.replica_choice import pin_to
from deployments.engine_ids import node_of
from deployments.placement.conversation_keys import BYTES_PER_TOKEN
from deployments.placement.holders import prefix_holder, with_fetches
from deployments.placement.place import NodeFacts, Placement
from deployments.ray_internals import RunningNode, running_nodes, running_replicas
from deployments.requests import ChatRequest, Route
from engine.placement import MovableSnapshot, PrefixHolder, Question, Quote

log = logging.getLogger("ray.serve")

QUOTE_TIMEOUT_S, BEHIND_FIRST_S = 0.25, 0.05
"""Longest wait for the first quote, and for the others after it. An engine answers between two events of its loop, also
while its device is busy."""

LIKELY_TIMEOUT_S = 1.0
"""Longest wait for the quote of the node where a conversation belongs: elsewhere its prefix may take minutes."""

LATE_ANSWER_S = 10.0
"""How long a late answer is waited for, in the background: it shows that the node is there again."""

MAX_BOOKINGS = 3
"""How often a request tries to be booked; after that it goes to the best node without a booking."""

SIZE_WEIGHT = 0.05
"""Weight of a prompt in the moving average of bytes per token."""


FACTS = "placement"
"""Key of the engine's `NodeFacts`, as a dictionary, in the metadata of its replica."""


MAX_OWN = 256
"""Bookings of this ingress that are remembered, of which those of the last milliseconds count."""


@dataclass(frozen=True, slots=True)
class Place:
    """The node of a request."""

    node_id: str
    quote: Quote | None
    """The quote of its engine; None if it did not answer in time."""
    num_asked: int
    """Nodes that were asked."""
    holder: PrefixHolder | None = None
    """From where its engine may fetch more of the prompt than it has; None: from nowhere."""


class OwnBooking(NamedTuple):
    """A booking of this ingress, from the moment of its choice on."""

    at_s: float
    node_id: str
    next_s: float
    """See Quote."""


class Placer:
    """Places the requests of one ingress. Belongs to its event loop.

    A cluster with a single engine is asked nothing. A node that did not answer its last question in time is asked
    again, but not waited for, and gets no request before it has answered, unless no other node takes the request.

    Args:
        engines: Handle of the engines.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        engines: DeploymentHandle,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engines = engines
        self._placement = Placement()
        self._clock = clock
        self._silent: set[str] = set()
        self._unanswered: Counter[str] = Counter()  # questions under way by node
        self._replicas: Mapping[Any, Any] | None = None  # of the last look, with their number
        self._num_replicas = 0
        self._own: deque[OwnBooking] = deque(maxlen=MAX_OWN)
        self._bytes_per_token = BYTES_PER_TOKEN

    async def place(
        self, request: ChatRequest, route: Route, without: Collection[str] = (), holders: Collection[str] = ()
    ) -> Place | None:
        """Choose the node of a request, and book it there.

        Args:
            request: The request.
            route: Its planner.
            without: Nodes to leave out: those that the request has tried.
            holders: Nodes among these that are asked nevertheless, for what the others may fetch from them.

        Returns:
            None if there are fewer than two nodes to choose from and no holders, or if each of them refuses.
        """
        if request.sketch is None or not self._follow_nodes():
            return None
        num_tried = sum(node_id in self._placement.node_ids for node_id in set(without))
        if len(self._placement.node_ids) - num_tried < (1 if holders else 2):
            return None
        question, asked_s = self._question(request, route), self._clock()
        candidates = self._placement.candidates(question, without)
        last = self._placement.last(question)
        asked = [*candidates, *(one for one in holders if one in self._placement.node_ids and one not in self._silent)]
        held = await self._quotes(asked, question, last if last in candidates else candidates[0])
        quotes = {node_id: held[node_id] for node_id in candidates}
        if more := self._placement.more(question, quotes, without):
            quotes |= await self._quotes(more, question)
        if (node_id := await self._book(question, quotes, asked_s)) is None:
            return None
        self._placement.placed(question, node_id)
        holder = prefix_holder(node_id, held | quotes, self._placement.addresses)
        return Place(node_id, quotes[node_id], len(quotes), holder)

    def address_of(self, node_id: str) -> str:
        """Return where other nodes fetch the snapshots of a node; '' if it is unknown or shares none."""
        self._follow_nodes()
        return self._placement.addresses.get(node_id, "")

    def successors(
        self, snapshots: Iterable[MovableSnapshot], without: Collection[str]
    ) -> dict[str, list[MovableSnapshot]]:
        """Divide the snapshots of a node that leaves among those that are asked for them next, in their order.

        Args:
            snapshots: The snapshots.
            without: Nodes to leave out, their own among them.
        """
        found: dict[str, list[MovableSnapshot]] = {}
        for snapshot in snapshots:
            if (successor := self._placement.successor(snapshot, {*without, *self._silent})) is not None:
                found.setdefault(successor, []).append(snapshot)
        return found

    def lost_with(self, engine_id: str) -> frozenset[str]:
        """Return the engines of an engine's node; only itself where no other node shares snapshots."""
        self._follow_nodes()
        own, sharing = node_of(engine_id), self._placement.addresses
        if all(node_of(one) == own for one, address in sharing.items() if address):
            return frozenset({engine_id})
        return frozenset(one for one in self._placement.node_ids if node_of(one) == own) | {engine_id}

    def neighbours(self, node_id: str, num_nodes: int) -> list[str]:
        """Return nodes that share snapshots with a node that has joined; [] if it shares none itself."""
        return self._placement.neighbours(node_id, num_nodes) if self.address_of(node_id) else []

    @property
    def silent(self) -> frozenset[str]:
        """The nodes that did not answer their last question in time."""
        return frozenset(self._silent)

    def _follow_nodes(self) -> bool:
        """Take over the nodes that have an engine now. Returns False if they are unknown."""
        replicas = running_replicas(self._engines)
        if replicas is None:
            return False
        if replicas is not self._replicas or len(replicas) != self._num_replicas:
            self._replicas, self._num_replicas = replicas, len(replicas)
            self._placement.update(map(facts_of, among(running_nodes(self._engines) or [])))
        return True

    def planned(self, request: ChatRequest, num_tokens: int) -> None:
        """Learn the size of tokens from a request's plan."""
        if request.sketch is not None and num_tokens:
            measured = request.sketch.num_bytes / num_tokens
            self._bytes_per_token += SIZE_WEIGHT * (measured - self._bytes_per_token)

    def _question(self, request: ChatRequest, route: Route) -> Question:
        assert request.sketch is not None and request.keys is not None
        return Question(
            request.request_id,
            request.keys,
            max(1, int(request.sketch.num_bytes / max(self._bytes_per_token, 0.1))),
            request.num_choices,
            request.max_tokens,
            route is Route.MLLM,
            request.priority,
        )

    async def _quotes(self, node_ids: Iterable[str], question: Question, likely: str = "") -> dict[str, Quote | None]:
        """Ask nodes for their quotes; None for those that do not answer in time. likely: where the request belongs."""
        asked = list(node_ids)
        heard = await self._hear(asked, "quote", question, likely=likely)
        return {node_id: heard.get(node_id) for node_id in asked}

    async def _book(self, question: Question, quotes: dict[str, Quote | None], asked_s: float) -> str | None:
        """Book a request at the best node.

        An engine that has got other requests since its quote says what it would cost now, and the nodes are compared
        again.

        Args:
            question: The request.
            quotes: The quotes of all nodes that were asked; updated.
            asked_s: When they were asked for.

        Returns:
            The node of the request; None if every node refuses it.
        """
        asked_at = dict.fromkeys(quotes, asked_s)
        for _ in range(MAX_BOOKINGS):
            node_id = self._placement.choose(question, self._with_own(quotes, asked_at, question.num_tokens))
            if node_id is None or (quote := quotes[node_id]) is None:
                return node_id
            now = self._clock()
            booking = OwnBooking(now, node_id, quote.next_s)
            self._own.append(booking)
            likely = node_id if quote.cached_tokens else ""  # elsewhere its prefix may take minutes
            heard = await self._hear([node_id], "book", question, likely=likely)
            if node_id in heard and heard[node_id] is None:
                return node_id
            if booking in self._own:
                self._own.remove(booking)
            quotes[node_id], asked_at[node_id] = heard.get(node_id), now
        return self._placement.choose(question, self._with_own(quotes, asked_at, question.num_tokens))

    def _with_own(
        self, quotes: Mapping[str, Quote | None], asked_at: Mapping[str, float], num_tokens: int
    ) -> dict[str, Quote | None]:
        """Add this ingress' bookings since each quote was asked for, which it cannot count, and what fetching saves."""
        found = dict(quotes)
        for own in self._own:
            quote = found.get(own.node_id)
            if quote is not None and own.at_s >= asked_at[own.node_id]:
                found[own.node_id] = replace(quote, wait_s=quote.wait_s + own.next_s)
        return with_fetches(found, self._placement.addresses, num_tokens)

    async def _hear(self, node_ids: Iterable[str], method: str, *args: Any, likely: str = "") -> dict[str, Any]:
        """Ask the engines of nodes; return the answers of those that answer in time.

        Nodes that did not answer their last question are waited for only if no other is asked, and are not asked again
        while a question is under way.

        Args:
            node_ids: The nodes.
            method: Method of the engines.
            args: Its arguments.
            likely: A node that is waited for longer than for others after the first answer; '' for none.
        """
        known = list(node_ids)
        answering = [node_id for node_id in known if not (node_id in self._silent and self._unanswered[node_id])]
        asked = {node_id: asyncio.ensure_future(self._ask(node_id, method, *args)) for node_id in answering or known}
        waited = [task for node_id, task in asked.items() if node_id not in self._silent] or list(asked.values())
        began_s = self._clock()
        done, left = await asyncio.wait(waited, timeout=QUOTE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if done and left:
            _, left = await asyncio.wait(left, timeout=BEHIND_FIRST_S)
        if asked.get(likely) in left:
            await asyncio.wait([asked[likely]], timeout=max(0.0, began_s + LIKELY_TIMEOUT_S - self._clock()))
        self._silent |= {node_id for node_id, task in asked.items() if not task.done()}
        return {node_id: task.result() for node_id, task in asked.items() if task.done() and not task.exception()}

    async def _ask(self, node_id: str, method: str, *args: Any) -> Any:
        """Call a method of the engine on a node; record whether it answers. Raises whatever the call raises."""
        handle = self._engines.options(method_name=method, session_id=pin_to(node_id, 0.0))
        self._unanswered[node_id] += 1
        try:
            answer = await call_within(LATE_ANSWER_S, handle.remote(*args))
        except Exception as error:
            if node_id not in self._silent:
                log.warning("the engine %s does not answer questions: %r", node_id, error)
            self._silent.add(node_id)
            raise
        finally:
            self._unanswered[node_id] -= 1
            if not self._unanswered[node_id]:
                del self._unanswered[node_id]
        self._silent.discard(node_id)
        return answer


def facts_of(node: RunningNode) -> NodeFacts:
    """Return what the engine of a node said of itself at its start."""
    return NodeFacts(node.node_id, **node.metadata.get(FACTS, {}))
