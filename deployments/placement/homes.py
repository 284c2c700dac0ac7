"""Homes: which node has computed a conversation last, as this ingress remembers it. Pure."""

from collections import OrderedDict

MAX_HOMES = 65_536
"""Conversations that an ingress remembers: 10 MB."""


class Homes:
    """Remembers the last node of each conversation, least recently placed first out.

    Args:
        max_homes: Conversations to remember.
    """

    def __init__(self, max_homes: int = MAX_HOMES):
        self._max_homes = max_homes
        self._nodes: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, conversation: int) -> str | None:
        """Return the last node of a conversation; None if unknown."""
        return self._nodes.get(conversation)

    def put(self, conversation: int, node_id: str) -> None:
        """Remember that a request of the conversation is placed on a node."""
        self._nodes[conversation] = node_id
        self._nodes.move_to_end(conversation)
        if len(self._nodes) > self._max_homes:
            self._nodes.popitem(last=False)
