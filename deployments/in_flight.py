"""InFlight: the requests that an ingress is answering: how many there may be, how one is ended, and how all are."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from engine.protocol import Cancelled, InvalidRequest, OrchardError, Overloaded, Unavailable

Clock = Callable[[], float]

WINDOW_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0

STOPPED_RETRY_S = 5.0
"""What a client is told while the server stops: a new one cannot be there much sooner."""


class Pace:
    """How fast choices have ended lately: it tells how long until there is room. clock: monotonic seconds."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque()
        self._num_ended = 0
        self._since = clock()

    def begin(self) -> None:
        """The first comes after nobody was there: what had ended before says nothing of the answers from now on."""
        self._ends.clear()
        self._num_ended, self._since = 0, self._clock()

    def ended(self, num_choices: int) -> None:
        now = self._clock()
        self._ends.append((now, num_choices))
        self._num_ended += num_choices
        self._forget_before(now - WINDOW_S)

    def seconds_until(self, num_choices: int) -> float:
        """How long it takes until so many more have ended, 1 to 60. Where none has, one is expected after as long a
        time as all have been waited for."""
        now = self._clock()
        self._forget_before(now - WINDOW_S)
        lasted_s = min(WINDOW_S, now - self._since)
        return min(max(num_choices * lasted_s / max(1, self._num_ended), MIN_RETRY_S), MAX_RETRY_S)

    def _forget_before(self, moment: float) -> None:
        while self._ends and self._ends[0][0] < moment:
            self._num_ended -= self._ends.popleft()[1]


class Entry:
    """One request, from its headers to the end of its response. Until its body has been read it takes no place.

    ids: by which it can be cancelled. must_end: done as soon as somebody wants it to end; what its client is told.
    address: what counts as one client in max_share_per_address; None: no share holds for it.
    """

    def __init__(self, request_id: str, address: str | None = None):
        self.ids = {request_id}
        self.address = address
        self.num_choices = 0
        self.is_understood = False
        self.must_end: asyncio.Future[OrchardError] = asyncio.get_running_loop().create_future()
        self._is_answered = False

    def answered(self) -> None:
        """All of the answer is made, and only on its way: nobody can end it any more."""
        self._is_answered = True

    def end(self, error: OrchardError) -> bool:
        """False if it is too late for that."""
        if self._is_answered or self.must_end.done():
            return False
        self.must_end.set_result(error)
        return True


class InFlight:
    """capacity: how many choices may be in flight now; never less than max_choices, those of one request.

    max_share_per_address: part of the capacity that the requests of one address may take together; the first request
    of an address is exempt.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_choices: int,
        clock: Clock = time.monotonic,
        max_share_per_address: float = 1.0,
    ):
        self._capacity = capacity
        self.max_choices = max_choices
        self._max_share_per_address = max_share_per_address
        self._pace = Pace(clock)
        self._entries: set[Entry] = set()
        self._num_choices = self._num_refused = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    @property
    def retry_after_s(self) -> float:
        """How long until there is room for one more choice."""
        return self._pace.seconds_until(1)

    @contextmanager
    def enter(self, request_id: str, address: str | None = None) -> Iterator[Entry]:
        """For a request of which no more than the headers is there. request_id need not be unique.

        It takes its place only when its body has been read (`understood`), but is refused at once if there is no room
        now. Raises Unavailable while the server stops, and Overloaded when there is no room for one more choice.
        """
        self._check_room(1, address)
        if not self._entries:
            self._pace.begin()
        entry = Entry(request_id, address)
        self._entries.add(entry)
        self._is_empty.clear()
        try:
            yield entry
        finally:
            self._entries.remove(entry)
            self._num_choices -= entry.num_choices
            if entry.is_understood:
                self._pace.ended(entry.num_choices)
            if not self._entries:
                self._is_empty.set()

    def understood(self, entry: Entry, completion_id: str, num_choices: int) -> None:
        """What the body of a request that has entered asks for.

        Raises what `enter` raises, and InvalidRequest when there will never be room for so many choices.
        """
        if num_choices > self.max_choices:
            raise InvalidRequest(f"n is {num_choices}; it must be between 1 and {self.max_choices} (max_running)", "n")
        self._check_room(num_choices, entry.address)
        self._num_choices += num_choices
        entry.num_choices = num_choices
        entry.ids.add(completion_id)
        entry.is_understood = True

    def _check_room(self, num_choices: int, address: str | None) -> None:
        if self.is_draining:
            self._num_refused += 1
            raise _not_taken()
        limit = self._capacity()
        num_over = self._num_choices + num_choices - limit
        if num_over > 0:
            self._refuse(
                f"{self._num_choices} answers are being made or waited for, and {num_choices} more were asked for; the "
                f"limit is {limit}, max_running + max_queue of all engines.",
                num_over,
            )
        share = self._max_share_per_address
        num_same = sum(entry.num_choices for entry in self._entries if entry.address == address) if address else 0
        num_over = num_same + num_choices - int(share * limit)
        if share < 1 and num_same and num_over > 0:
            self._refuse(
                f"{num_same} answers for this address are being made or waited for, and {num_choices} more were asked "
                f"for; the limit for one address is {int(share * limit)}, {share:g} of {limit} "
                "(http.max_share_per_address).",
                num_over,
            )

    def _refuse(self, message: str, num_over: int) -> NoReturn:
        self._num_refused += 1
        raise Overloaded(message, self._pace.seconds_until(num_over))

    def cancel(self, request_id: str) -> bool:
        """Ends all requests with this id; False if there is none that could still be ended."""
        ended = [entry.end(Cancelled("The request was cancelled.")) for entry in self._named(request_id)]
        return any(ended)

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, nor what has not yet been read as a whole. What runs may go on for so long, then ends;
        returns when nothing is left.

        Whoever calls it later waits with the first, for the first one's time.
        """
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._end_all_after(timeout_s))
            for entry in self._entries:
                if not entry.is_understood:
                    self._num_refused += entry.end(_not_taken())
        await asyncio.shield(self._draining)

    def status(self) -> dict[str, Any]:
        """num_in_flight: choices of requests whose bodies have been read. num_refused: requests since the start, by
        this ingress alone."""
        return {
            "num_in_flight": self._num_choices,
            "num_refused": self._num_refused,
            "is_draining": self.is_draining,
        }

    def _named(self, request_id: str) -> list[Entry]:
        return [entry for entry in self._entries if request_id in entry.ids]

    async def _end_all_after(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            late = Unavailable(
                f"The server is shutting down; the answer took longer than {timeout_s:g} s. "
                "Please send the request again.",
                STOPPED_RETRY_S,
            )
            for entry in self._entries:
                entry.end(late)
            await self._is_empty.wait()


def _not_taken() -> Unavailable:
    return Unavailable("The server is shutting down: it takes no new requests.", STOPPED_RETRY_S)
