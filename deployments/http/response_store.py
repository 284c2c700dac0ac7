"""ResponseStore: recent responses of this ingress with their conversations, in memory.

Responses of one conversation share their turns, so a conversation of n turns takes the memory of n turns.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deployments.http.errors import Refusal, shown

StoreResponses = Literal["off", "asked", "all"]

OVERHEAD_BYTES = 1024
"""Approximate bytes of a turn in addition to its texts."""


class ResponseNotFound(Refusal):
    """A response or item is not stored.

    Args:
        id: The requested id.
        field: The client's field; None if the id was part of the route.
    """

    status, code = 404, "response_not_found"

    def __init__(self, id: str, field: str | None = None):
        super().__init__(id, field, field=field)

    @property
    def message(self) -> str:
        id, field = self.args
        where = "" if field is None else f"`{field}`: "
        return (
            f"{where}{shown(id)} was not found. A response is kept, in the memory of the node that created it, if its "
            "request said `store: true` or the server stores all (http.store_responses). It is deleted "
            "http.stored_responses_ttl_s seconds after its last use, or earlier when the store is full."
        )


class PreviousResponseNotFound(ResponseNotFound):
    """No stored response has the id in `previous_response_id`."""

    code = "previous_response_not_found"


@dataclass(frozen=True, eq=False)
class Turn:
    """The part of a conversation that one response added."""

    items: bytes
    """The input items as JSON."""
    body: bytes
    """The response as JSON."""

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.body) + OVERHEAD_BYTES


@dataclass(frozen=True)
class StoredResponse:
    """A response with the conversation that it belongs to."""

    id: str
    owner: str
    """Name of the API key of its request; other keys cannot access it."""
    turns: tuple[Turn, ...]
    """The conversation, with the response's own turn last."""

    @property
    def body(self) -> bytes:
        """The response as JSON."""
        return self.turns[-1].body


class ResponseStore:
    """Stores responses up to three limits; the least recently used ones are evicted first.

    Args:
        max_responses: Most responses.
        max_bytes: Most bytes of all turns.
        ttl_s: Lifetime since the last use.
        clock: Monotonic seconds.
    """

    def __init__(self, max_responses: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self._num_uses: Counter[Turn] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        self._evict()
        return len(self._stored)

    def add(self, response: StoredResponse) -> None:
        """Store a response, evicting others if a limit is exceeded."""
        for turn in response.turns:
            self._num_uses[turn] += 1
            if self._num_uses[turn] == 1:
                self.num_bytes += turn.num_bytes
        self._stored[response.id] = self._clock(), response
        self._evict()

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response of this owner and mark it as used; None if there is none."""
        self._evict()
        _, response = self._stored.get(id, (0.0, None))
        if response is None or response.owner != owner:
            return None
        self._stored[id] = self._clock(), response
        self._stored.move_to_end(id)
        return response

    def delete(self, owner: str, id: str) -> bool:
        """Delete a response of this owner; return False if there is none."""
        if self.get(owner, id) is None:
            return False
        self._remove(id)
        return True

    def _evict(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._stored:
            id, (used_s, _) = next(iter(self._stored.items()))
            is_over = len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes
            if not is_over and used_s > oldest_s:
                return
            self._remove(id)

    def _remove(self, id: str) -> None:
        _, response = self._stored.pop(id)
        for turn in response.turns:
            self._num_uses[turn] -= 1
            if not self._num_uses[turn]:
                del self._num_uses[turn]
                self.num_bytes -= turn.num_bytes
