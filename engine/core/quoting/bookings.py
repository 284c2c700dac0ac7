"""Bookings: requests that an ingress has placed here and that have not arrived yet. Belongs to the event loop."""

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass

from engine.placement import Question

BOOKING_S = 150.0
"""A booking whose request has not arrived after so many seconds ends."""


@dataclass(slots=True)
class Booking:
    """A request that will arrive."""

    question: Question
    num_cached: int
    """Tokens of its prompt that were cached when it was booked."""
    expires_s: float
    is_sent: bool = False
    """Whether the request is on its way to the engine's thread."""


class Bookings:
    """Holds the bookings.

    Args:
        clock: Returns monotonic seconds.
        arrived: Request ids that the engine's thread has taken lately.
    """

    def __init__(self, clock: Callable[[], float], arrived: Container[str]):
        self._clock = clock
        self._arrived = arrived
        self._bookings: OrderedDict[str, Booking] = OrderedDict()  # by request id, in the order of their ends

    def add(self, question: Question, num_cached: int) -> None:
        """Book a request; a booking with the same id is replaced."""
        self._bookings.pop(question.request_id, None)
        self._bookings[question.request_id] = Booking(question, num_cached, self._clock() + BOOKING_S)

    def sent(self, request_id: str, engine_id: str) -> None:
        """Keep the booking of a request until it arrives at the engine's thread, under another id there."""
        if (booking := self._bookings.pop(request_id, None)) is not None:
            booking.is_sent = True
            self._bookings[engine_id] = booking

    def remove(self, request_id: str) -> None:
        """End a booking. Unknown ids are ignored."""
        self._bookings.pop(request_id, None)

    def open(self) -> list[Booking]:
        """Return the bookings of requests that have not arrived, the oldest first."""
        if not self._bookings:
            return []
        now = self._clock()
        for request_id in [
            request_id
            for request_id, booking in self._bookings.items()
            if booking.expires_s <= now or request_id in self._arrived
        ]:
            del self._bookings[request_id]
        return list(self._bookings.values())
