"""AnswerStatistics: decides whether the states after answers are worth storing."""

from engine.config import SnapshotKind

MAX_UNUSED, PROBE_EVERY = 64, 16
"""After MAX_UNUSED stored answers without any reuse only every PROBE_EVERY-th is stored, until one is reused."""


class AnswerStatistics:
    """Decides whether answers are stored, by whether earlier ones were reused.

    Answers are never reused if the template renders them differently in the next turn.
    """

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._num_offered = 0
        self._num_unused = 0

    def offer(self) -> bool:
        """Return whether to store the next answer: every one while some are reused, else every PROBE_EVERY-th."""
        self._num_offered += 1
        return self._enabled and (self._num_unused < MAX_UNUSED or self._num_offered % PROBE_EVERY == 0)

    def stored(self) -> None:
        """Record that an answer was stored."""
        self._num_unused += 1

    def used(self, kind: SnapshotKind) -> None:
        """Record that a prompt continues from a snapshot of this kind."""
        if kind == "answer":
            self._num_unused = 0
