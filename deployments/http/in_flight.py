"""InFlight: the requests in progress at an ingress: admission, cancellation and draining."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from engine import retry_after
from engine.errors import Cancelled, InvalidRequest, OrchardError, Overloaded, Unavailable

Clock = Callable[[], float]

WINDOW_S = 30.0


class Pace:
    """Recent rate at which choices finish, from which Retry-After is estimated.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque()
        self._num_ended = 0
        self._since = clock()

    def begin(self) -> None:
        """Start a new measurement at the first request after an idle time."""
        self._ends.clear()
        self._num_ended, self._since = 0, self._clock()

    def ended(self, num_choices: int) -> None:
        now = self._clock()
        self._ends.append((now, num_choices))
        self._num_ended += num_choices
        self._forget_before(now - WINDOW_S)

    def seconds_until(self, num_choices: int) -> float:
        """Estimate the seconds until num_choices more choices have finished, from 1 to 60.

        While no choice has finished yet, one is expected after the time that has passed since `begin`.
        """
        now = self._clock()
        self._forget_before(now - WINDOW_S)
        lasted_s = min(WINDOW_S, now - self._since)
        return min(max(num_choices * lasted_s / max(1, self._num_ended), retry_after.MIN_S), retry_after.MAX_S)

    def _forget_before(self, moment: float) -> None:
        while self._ends and self._ends[0][0] < moment:
            self._num_ended -= self._ends.popleft()[1]


class InFlightRequest:
    """One request, from its headers to the end of its response. It counts for no choices until its body is parsed.

    Attributes:
        ids: Ids by which the request can be cancelled.
        address: The client in terms of max_share_per_address; None: exempt.
        num_choices: Choices that it counts for; 0 until its body is parsed.
        is_parsed: Whether its body is parsed.
        cancelled: Done when the request is to end early, with the error for the client.
    """

    def __init__(self, request_id: str, address: str | None = None):
        self.ids = {request_id}
        self.address = address
        self.num_choices = 0
        self.is_parsed = False
        self.cancelled: asyncio.Future[OrchardError] = asyncio.get_running_loop().create_future()
        self._is_answered = False

    def mark_complete(self) -> None:
        """Mark the answer as complete; it can no longer be cancelled."""
        self._is_answered = True

    def end(self, error: OrchardError) -> bool:
        """End the request with an error. Returns False if it is complete or ending already."""
        if self._is_answered or self.cancelled.done():
            return False
        self.cancelled.set_result(error)
        return True


class InFlight:
    """The requests in progress.

    Args:
        capacity: Returns how many choices may be in flight now; at least max_choices.
        max_choices: Most choices of one request.
        clock: Monotonic seconds.
        max_share_per_address: Fraction of the capacity for all requests of one address; the first request of an
            address is exempt.
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
        self._entries: set[InFlightRequest] = set()
        self._num_choices = self._num_refused = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    @contextmanager
    def enter(self, request_id: str, address: str | None = None) -> Iterator[InFlightRequest]:
        """Enter a request of which only the headers have arrived.

        It counts for its choices only after its body is parsed (`set_choices`), but is refused at once if not even one
        more choice fits.

        Args:
            request_id: Need not be unique.
            address: See InFlightRequest.

        Raises:
            Unavailable: The server is stopping.
            Overloaded: Not one more choice fits.
        """
        self._check_room(1, address)
        if not self._entries:
            self._pace.begin()
        entry = InFlightRequest(request_id, address)
        self._entries.add(entry)
        self._is_empty.clear()
        try:
            yield entry
        finally:
            self._entries.remove(entry)
            self._num_choices -= entry.num_choices
            if entry.is_parsed:
                self._pace.ended(entry.num_choices)
            if not self._entries:
                self._is_empty.set()

    def set_choices(self, entry: InFlightRequest, completion_id: str, num_choices: int) -> None:
        """Count an entered request for the choices that its parsed body asks for.

        Raises:
            InvalidRequest: More choices than one request may have.
            Unavailable, Overloaded: See `enter`.
        """
        if num_choices > self.max_choices:
            raise InvalidRequest(f"n is {num_choices}; it must be between 1 and {self.max_choices} (max_running)", "n")
        self._check_room(num_choices, entry.address)
        self._num_choices += num_choices
        entry.num_choices = num_choices
        entry.ids.add(completion_id)
        entry.is_parsed = True

    def _check_room(self, num_choices: int, address: str | None) -> None:
        if self.is_draining:
            self._num_refused += 1
            raise _not_taken()
        limit = self._capacity()
        num_over = self._num_choices + num_choices - limit
        if num_over > 0:
            self._refuse(
                f"{self._num_choices} choices are in flight, and {num_choices} more were requested; the limit is "
                f"{limit}, max_running + max_queue of all engines.",
                num_over,
                "max_queue",
            )
        share = self._max_share_per_address
        num_same = sum(entry.num_choices for entry in self._entries if entry.address == address) if address else 0
        num_over = num_same + num_choices - int(share * limit)
        if share < 1 and num_same and num_over > 0:
            self._refuse(
                f"{num_same} choices for this address are in flight, and {num_choices} more were requested; the limit "
                f"for one address is {int(share * limit)}, {share:g} of {limit} (http.max_share_per_address).",
                num_over,
                "max_share_per_address",
            )

    def _refuse(self, message: str, num_over: int, limit: str) -> NoReturn:
        self._num_refused += 1
        raise Overloaded(message, self._pace.seconds_until(num_over), limit)

    def cancel(self, request_id: str) -> bool:
        """Cancel all requests with this id. Returns False if there is none that can still be cancelled."""
        named = [entry for entry in self._entries if request_id in entry.ids]
        return any(
            [entry.end(Cancelled("The request was cancelled.")) for entry in named]
        )  # all of them, not the first

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the running ones have ended.

        Requests whose bodies are not parsed yet are refused too. Requests that still run after timeout_s end with an
        error. Later calls wait for the first one and ignore their own timeout.
        """
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._end_all_after(timeout_s))
            for entry in self._entries:
                if not entry.is_parsed:
                    self._num_refused += entry.end(_not_taken())
        await asyncio.shield(self._draining)

    def status(self) -> dict[str, Any]:
        """Return the figures of this ingress for `/v1/status`.

        num_in_flight counts choices of requests whose bodies are parsed, num_refused refused requests since the start.
        """
        return {
            "num_in_flight": self._num_choices,
            "num_refused": self._num_refused,
            "is_draining": self.is_draining,
        }

    async def _end_all_after(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            late = Unavailable(
                f"The server is shutting down; the request did not finish within {timeout_s:g} s. "
                "Please send the request again.",
                retry_after.STOPPED_S,
            )
            for entry in self._entries:
                entry.end(late)
            await self._is_empty.wait()


def _not_taken() -> Unavailable:
    return Unavailable("The server is shutting down: it accepts no new requests.", retry_after.STOPPED_S)
