"""RequestTimeline: where the seconds of one HTTP request went, from its arrival to the end of its response.

A timeline has no text of a prompt or an answer. Its stretches follow one another without gaps.
"""

import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from engine.timeline import Compiling, Decoded, Phase, Prefilled, Queued, RowTimeline

log = logging.getLogger("orchard.http")

Outcome = Literal["answered", "refused", "cancelled", "disconnected", "failed"]

MAX_KEPT = 1000
"""Finished timelines that an ingress keeps."""

MAX_STRETCHES = 64
MAX_ROWS = 8
"""Choices of one request whose phases are kept."""

MAX_PROXY_S = 60.0
"""Times of arrival that are longer ago are not believed."""

ARRIVED_HEADER = "x-orchard-arrived"
"""Header with which the HTTP proxy tells the ingress when the request arrived: its host and monotonic seconds."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of W3C's trace context."""

ENGINE = "engine"
"""The stretch in which the ingress waits for the engine."""


@dataclass(slots=True)
class Stretch:
    """A part of the request's time."""

    name: str
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and names that explain it."""
    phase: Phase | None = None
    """The engine's phase that it shows."""


class RequestTimeline:
    """The timeline of one request, written while it is served.

    Args:
        request_id: Its X-Request-ID.
        path: Its route.
        key_name: Name of its API key; '' without one.
        arrived_s: When it arrived, on `clock`; None: now.
        clock: Monotonic seconds.

    Attributes:
        answer_id: Id of the answer, '' before its body is parsed.
        node_id: The engine's id; '' before it is chosen.
        first_token_s: Seconds until the first token; None without any.
        usage: Tokens of the answer by kind, as far as they are known.
        asked: Sampling parameters that are known once the request is planned.
        trace_context: Headers of the request that name the trace that it belongs to.
        note: What else happened; '' if nothing.
        rows: The engine's timelines of the choices that have ended, the longest first.
    """

    def __init__(
        self,
        request_id: str,
        path: str,
        key_name: str = "",
        arrived_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.request_id = request_id
        self.path = path
        self.key_name = key_name
        self.answer_id = self.node_id = ""
        self.first_token_s: float | None = None
        self.usage: dict[str, int] = {}
        self.asked: dict[str, float] = {}
        self.trace_context: dict[str, str] = {}
        self.rows: tuple[RowTimeline, ...] = ()
        self.outcome: Outcome | None = None
        self.status = 0
        self.error = self.note = ""
        self.created = time.time()
        self._clock = clock
        self._began_s = self._last_s = clock()
        self._stretches: list[Stretch] = []
        self._failure: tuple[int, str] | None = None
        if arrived_s is not None:
            self.created -= self._began_s - arrived_s
            self._began_s = self._last_s = arrived_s
            self.lap("proxy")

    @property
    def seconds(self) -> float:
        """Sum of all stretches so far."""
        return self._last_s - self._began_s

    @property
    def spent_s(self) -> float:
        """Seconds since the arrival."""
        return self._clock() - self._began_s

    def lap(self, name: str, **facts: Any) -> None:
        """Name what has been done since the last stretch ended; the same name again continues that stretch."""
        now = self._clock()
        seconds, self._last_s = now - self._last_s, now
        if self._stretches and (self._stretches[-1].name == name or len(self._stretches) >= MAX_STRETCHES):
            self._stretches[-1].seconds += seconds
            self._stretches[-1].facts |= facts
        else:
            self._stretches.append(Stretch(name, seconds, facts))

    def add_row(self, row: RowTimeline) -> None:
        """Add the engine's timeline of a choice. It replaces that of an attempt on another replica."""
        others = [one for one in self.rows if one.index != row.index]
        self.rows = tuple(sorted([*others, row], key=lambda one: -one.seconds)[:MAX_ROWS])

    def end(self, outcome: Outcome, status: int) -> None:
        """Close the timeline, with the error that was noted instead of this outcome; later calls are ignored."""
        if self.outcome is not None:
            return
        self.lap("send")
        self.outcome, self.status = outcome, status
        if self._failure is not None:
            self.status, self.error = self._failure
            self.outcome = "cancelled" if self.status == 499 else "failed" if self.status >= 500 else "refused"

    def failed(self, status: int, error: str) -> None:
        """Note the error with which the response ends; see `end`."""
        self._failure = status, error

    def stretches(self) -> list[Stretch]:
        """Return the stretches. The engine's phases take the place of the last wait for it, where they are known."""
        at = max((i for i, one in enumerate(self._stretches) if one.name == ENGINE), default=None)
        if at is None or not self.rows:
            return list(self._stretches)
        phases, left_s = list[Stretch](), self._stretches[at].seconds
        for phase in self.rows[0].phases:
            shown = _shown(phase)
            shown.seconds = min(shown.seconds, left_s)  # it may have gone on after the request was cancelled here
            left_s -= shown.seconds
            phases.append(shown)
        return [*self._stretches[:at], *phases, Stretch("return", left_s), *self._stretches[at + 1 :]]


def _shown(phase: Phase) -> Stretch:
    """Convert a phase of the engine to a stretch."""
    facts = {one.name: getattr(phase, one.name) for one in fields(phase) if one.name != "seconds"}
    match phase:
        case Compiling():
            return Stretch("grammar" if phase.has_grammar else "handover", phase.seconds, {}, phase)
        case Queued():
            return Stretch("queue" if phase.preempted_by is None else "preempted", phase.seconds, facts, phase)
        case Prefilled():
            return Stretch("prefill", phase.seconds, facts | {"others_s": phase.others_s}, phase)
        case Decoded():
            return Stretch("decode", phase.seconds, facts, phase)


class Timelines:
    """The last finished timelines of one ingress, by X-Request-ID and by the answer's id.

    Args:
        max_kept: How many.
        listener: Receives each of them; what it raises is logged.
    """

    def __init__(self, max_kept: int = MAX_KEPT, listener: Callable[[RequestTimeline], None] | None = None):
        self._listener = listener
        self.max_kept = max_kept
        self._kept: OrderedDict[int, RequestTimeline] = OrderedDict()
        self._num_kept = 0

    def keep(self, timeline: RequestTimeline) -> None:
        self._num_kept += 1
        self._kept[self._num_kept] = timeline
        if len(self._kept) > self.max_kept:
            self._kept.popitem(last=False)
        if self._listener is None:
            return
        try:
            self._listener(timeline)
        except Exception:
            log.exception("the timeline of request %s could not be passed on", timeline.request_id)

    def find(self, id: str) -> RequestTimeline | None:
        """Return the newest timeline with this id; None without one."""
        return next((one for one in reversed(self._kept.values()) if id in (one.request_id, one.answer_id)), None)

    def slowest(self, num: int) -> list[RequestTimeline]:
        """Return the `num` slowest requests, the slowest first."""
        return sorted(self._kept.values(), key=lambda one: -one.seconds)[:num]

    def newest(self, num: int) -> list[RequestTimeline]:
        """Return the last `num` requests, the newest first."""
        return list(reversed(self._kept.values()))[:num]


_current: ContextVar[RequestTimeline | None] = ContextVar("timeline", default=None)


def current() -> RequestTimeline:
    """Return the timeline of the HTTP request that this task serves; outside of one, a new one that is not kept."""
    return _current.get() or RequestTimeline("", "")


def use(timeline: RequestTimeline) -> None:
    """Make a timeline that of this task, and of tasks that it starts from now on."""
    _current.set(timeline)


def arrival_header() -> str:
    """Return the value of ARRIVED_HEADER for a request that arrives now."""
    return f"{socket.gethostname()} {time.monotonic():.6f}"


def arrived_s(header: str | None) -> float | None:
    """Return the time of arrival in a header, on this process's monotonic clock; None if it is not of this machine."""
    host, _, moment = (header or "").rpartition(" ")
    try:
        arrived = float(moment)
    except ValueError:
        return None
    if host != socket.gethostname() or not 0 <= time.monotonic() - arrived <= MAX_PROXY_S:
        return None
    return arrived


def sum_by_name(stretches: Iterable[Stretch]) -> dict[str, float]:
    """Return the seconds by name, in the order of the first stretch of each."""
    sums = dict[str, float]()
    for one in stretches:
        sums[one.name] = sums.get(one.name, 0.0) + one.seconds
    return sums
