"""The timelines of the choices that an engine has ended last."""

from collections import OrderedDict, deque

from engine.open_requests import request_id_of
from engine.timeline import RowTimeline

MAX_UNREAD = 4096
"""Choices that have ended whose timelines wait for `take`; the oldest are left out."""

MAX_TIMELINES = 1000
"""Choices whose timelines `of_request` finds."""


class EndedRows:
    """Timelines of ended rows, for metrics and for lookups by request id."""

    def __init__(self) -> None:
        self._timelines: OrderedDict[str, RowTimeline] = OrderedDict()  # by row id
        self._unread: deque[RowTimeline] = deque(maxlen=MAX_UNREAD)

    def note(self, row_id: str, timeline: RowTimeline) -> None:
        """Keep the timeline of a row that has ended."""
        self._unread.append(timeline)
        self._timelines[row_id] = timeline
        if len(self._timelines) > MAX_TIMELINES:
            self._timelines.popitem(last=False)

    def take(self) -> list[RowTimeline]:
        """Return the timelines of the choices that have ended since the last call, at most MAX_UNREAD."""
        ended = list(self._unread)
        self._unread.clear()
        return ended

    def of_request(self, request_id: str) -> tuple[RowTimeline, ...]:
        """Return the timelines of a request's choices that ended among the last MAX_TIMELINES, by index."""
        found = [
            timeline
            for row_id, timeline in self._timelines.items()
            if request_id_of(row_id.rpartition("/")[0]) == request_id
        ]
        return tuple(sorted(found, key=lambda timeline: timeline.index))
