"""Placement: which nodes are asked for a quote, and which of them gets the request. Pure."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median

from deployments.placement.homes import Homes
from deployments.placement.rendezvous import Rendezvous
from engine.placement import ConversationKeys, MovableSnapshot, Question, Quote

NUM_HASHED = 2
"""Nodes that are asked because of the conversation's key."""

NUM_MORE = 3
"""Nodes that are asked after them."""

NODES_PER_HOME = 25
"""A system part has one home per so many nodes: a home that holds it spares a new conversation its prefill, and is
asked by all requests that it is the home of."""

LONG_WAIT_S = 5.0
"""A new conversation that would wait longer at each node that was asked is offered to more nodes."""

MIN_GAIN, MIN_GAIN_S = 0.2, 1.0
"""A conversation leaves its last node only if another one is faster by this share and by these seconds."""

TIE_S = 0.05
"""Quotes that differ by at most this count as equal."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node from the start of its engine; None: unknown."""

    node_id: str
    room_bytes: int | None = None
    """Bytes that requests and caches share."""
    max_context_tokens: int | None = None
    reads_images: bool = True
    pace_s: float | None = None
    """Seconds to prefill 2,048 tokens."""
    snapshots: str = ""
    """`host:port` at which other nodes fetch its snapshots; '' if it shares none."""


class Placement:
    """Chooses nodes for requests. One per ingress and model.

    For each request: `candidates` are asked; if `more` names further nodes, those are asked, too; `choose` picks one of
    all that were asked; `placed` remembers it.

    Args:
        homes: The last nodes of conversations.

    Attributes:
        addresses: Where nodes fetch the snapshots of each node; '' for one that shares none.
    """

    def __init__(self, homes: Homes | None = None):
        self._homes = homes or Homes()
        self._nodes: dict[str, NodeFacts] = {}
        self.addresses: dict[str, str] = {}
        self._contexts: dict[bool, list[float]] = {False: [], True: []}  # by whether there are images; ascending
        self._rendezvous: dict[tuple[bool, int], Rendezvous] = {}  # by images, and index of the shortest context

    @property
    def node_ids(self) -> Collection[str]:
        """The nodes that exist."""
        return self._nodes.keys()

    def update(self, nodes: Iterable[NodeFacts]) -> None:
        """Replace the nodes that exist. Cheap if nothing has changed."""
        by_id = {node.node_id: node for node in nodes}
        if by_id != self._nodes:
            self._nodes = by_id
            self.addresses = {node_id: node.snapshots for node_id, node in by_id.items()}
            self._contexts = {
                has_images: sorted({_context(one) for one in by_id.values() if one.reads_images or not has_images})
                for has_images in (False, True)
            }
            self._rendezvous.clear()

    def last(self, question: Question) -> str | None:
        """Return the last node of the question's conversation; None if unknown or if it no longer exists."""
        node_id = self._homes.get(question.keys.conversation)
        return node_id if node_id in self._nodes else None

    def candidates(self, question: Question, without: Collection[str] = ()) -> list[str]:
        """Return the nodes to ask first, at most four.

        These are the first nodes of the conversation's key, its last node, and a home of its system part.

        Args:
            question: The request.
            without: Nodes to leave out, because they were lost or have refused the request.
        """
        chosen = dict.fromkeys(self._ranked(question, NUM_HASHED, without))
        for node_id in (self.last(question), self._system_home(question, without)):
            if node_id is not None and node_id not in without:
                chosen[node_id] = None
        return list(chosen)

    def more(self, question: Question, quotes: Mapping[str, Quote | None], without: Collection[str] = ()) -> list[str]:
        """Return the nodes to ask next, if any.

        Empty as a rule, else the next NUM_MORE nodes of the conversation's key: if every node that was asked refuses or
        is silent; if for a new conversation each of them is crowded or busy for more than LONG_WAIT_S; if a
        conversation that this ingress does not know lives at none of them, as another ingress may have placed it at one
        of the next. Where a conversation that has had turns may live at a silent node, that one is asked again.

        Args:
            question: The request.
            quotes: The quotes of the candidates; None for a node that did not answer in time.
            without: See `candidates`.
        """
        taking = [quote for quote in quotes.values() if quote is not None and quote.refusal is None]
        if any(quote.is_resident for quote in taking):
            return []
        last, is_continued = self.last(question), _is_continued(question)
        if last is not None and taking:
            return [last] if last in quotes and quotes[last] is None else []
        is_busy = all(one.crowding_s > 0 or one.wait_s > LONG_WAIT_S for one in taking)
        if not is_busy and not is_continued:
            return []
        silent = [node_id for node_id, quote in quotes.items() if quote is None and is_continued]
        return [*silent, *self._ranked(question, NUM_MORE, {*quotes, *without})]

    def successor(self, snapshot: MovableSnapshot, without: Collection[str]) -> str | None:
        """Return the node that is asked first for what a snapshot belongs to, if it can take the snapshot over.

        Args:
            snapshot: A snapshot that leaves its node.
            without: Nodes to leave out: its own.
        """
        keys = ConversationKeys(snapshot.key, snapshot.key)
        question = Question("", keys, snapshot.num_tokens, has_images=snapshot.has_images)
        alone = {node_id for node_id, address in self.addresses.items() if not address}
        ranked = self._ranked(question, 1, {*without, *alone})
        return ranked[0] if ranked else None

    def neighbours(self, node_id: str, num_nodes: int) -> list[str]:
        """Return nodes from which a node that has joined may take over what many prompts share.

        They differ from node to node, so that several that join at the same time do not all ask the same ones.
        """
        key = int.from_bytes(blake2b(node_id.encode(), digest_size=8).digest())
        sharing = {other: 1.0 for other, address in self.addresses.items() if address and other != node_id}
        return Rendezvous(sharing).ranked(key, num_nodes)

    def choose(self, question: Question, quotes: Mapping[str, Quote | None]) -> str | None:
        """Return the node for the request; None if every node refuses it. See the function `choose`.

        The conversation's last node is the one that has most of it cached by its own account, as other ingresses may
        have placed it, else the one that this ingress remembers.
        """
        last = self.last(question)
        return choose(quotes, _residence(quotes, last) or last)

    def placed(self, question: Question, node_id: str) -> None:
        """Remember the node of a request's conversation."""
        self._homes.put(question.keys.conversation, node_id)

    def _ranked(self, question: Question, num_nodes: int, without: Collection[str]) -> list[str]:
        """Return the first nodes of the conversation's key that are not left out."""
        ranked = self._able(question).ranked(question.keys.conversation, num_nodes + len(without))
        return [node_id for node_id in ranked if node_id not in without][:num_nodes]

    def _system_home(self, question: Question, without: Collection[str]) -> str | None:
        """Return the home of the question's system part for this conversation; None if all homes are left out."""
        able, keys = self._able(question), question.keys
        num_homes = -(-len(able.node_ids) // NODES_PER_HOME)
        homes = able.ranked_among(keys.conversation, keys.system, num_homes + len(without))
        return next((node_id for node_id in homes if node_id not in without), None)

    def _able(self, question: Question) -> Rendezvous:
        """Return the order of the nodes that can take the request, as far as the nodes have said.

        Where no node has a context that is long enough, these are the nodes with the longest: the number of tokens is
        an estimate.
        """
        contexts = self._contexts[question.has_images]
        index = min(bisect_left(contexts, question.num_tokens), max(len(contexts) - 1, 0))
        key = question.has_images, index
        if key not in self._rendezvous:
            able = [
                node
                for node in self._nodes.values()
                if (node.reads_images or not question.has_images) and _context(node) >= contexts[index]
            ]
            self._rendezvous[key] = Rendezvous(weights(able))
        return self._rendezvous[key]


def choose(quotes: Mapping[str, Quote | None], last: str | None = None) -> str | None:
    """Return the node with the fewest seconds.

    The conversation's last node keeps it unless another one is faster by MIN_GAIN and MIN_GAIN_S. Nodes that refuse are
    left out; nodes that did not answer are chosen only where no other takes the request.

    Args:
        quotes: Quotes by node, in the order of preference among equal ones; None for a node that did not answer.
        last: The conversation's last node; None for a new conversation.

    Returns:
        None if every node refuses.
    """
    seconds = {node: quote.seconds for node, quote in quotes.items() if quote is not None and quote.refusal is None}
    if not seconds:
        silent = [node for node, quote in quotes.items() if quote is None]
        return last if last in silent else next(iter(silent), None)
    least = min(seconds.values())
    if last in seconds and seconds[last] - least < max(MIN_GAIN_S, MIN_GAIN * seconds[last]):
        return last
    return next(node for node, each in seconds.items() if each <= least + TIE_S)


def weights(nodes: Collection[NodeFacts]) -> dict[str, float]:
    """Return the nodes' weights: the harmonic mean of room and speed, each relative to the median of the nodes.

    A conversation needs both, so that much of one makes up for little of the other only in part. A figure that a node
    has not said counts as the median.
    """
    rooms = [node.room_bytes for node in nodes if node.room_bytes]
    paces = [node.pace_s for node in nodes if node.pace_s]
    room, pace = median(rooms) if rooms else 1.0, median(paces) if paces else 1.0
    return {node.node_id: 2.0 / (room / (node.room_bytes or room) + (node.pace_s or pace) / pace) for node in nodes}


def _residence(quotes: Mapping[str, Quote | None], last: str | None) -> str | None:
    """Return the node where the conversation lives by its own account; None if there is none.

    Args:
        quotes: See `choose`.
        last: The node that is preferred among equal ones.
    """
    cached = {node: quote.cached_tokens for node, quote in quotes.items() if quote is not None and quote.is_resident}
    return max(cached, key=lambda node: (cached[node], node == last), default=None)


def _is_continued(question: Question) -> bool:
    """Return whether the conversation has had turns before."""
    return any(key != question.keys.system for key in question.keys.turns[1:])


def _context(node: NodeFacts) -> float:
    return float("inf") if node.max_context_tokens is None else node.max_context_tokens
