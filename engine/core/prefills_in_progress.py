"""PrefillsInProgress: the admitted requests whose prompts are not yet computed."""

from collections.abc import Iterator, Sequence

from engine.core.prefill import Prefill
from engine.core.request import Request
from engine.core.request_queue import QueueEntry


class PrefillsInProgress:
    """The prompts in progress, in the order of their admission."""

    def __init__(self) -> None:
        self._prefills: list[Prefill] = []

    def __len__(self) -> int:
        return len(self._prefills)

    def __iter__(self) -> Iterator[Prefill]:
        return iter(self._prefills)

    @property
    def num_rows(self) -> int:
        """Rows of the prompts in progress."""
        return sum(len(prefill.rows) for prefill in self._prefills)

    def of(self, row: Request) -> Prefill:
        """Return the prompt in progress of a row."""
        return next(prefill for prefill in self._prefills if row in prefill.rows)

    def add(self, prefill: Prefill) -> None:
        """Add the prompt of an admitted request."""
        self._prefills.append(prefill)

    def remove(self, row: Request) -> None:
        """Remove one row; its prompt ends with the last of its rows."""
        prefill = self.of(row)
        prefill.rows.remove(row)
        if not prefill.rows:
            self._prefills.remove(prefill)

    def complete(self, row: Request) -> QueueEntry:
        """Remove the computed prompt of a row and return its request."""
        prefill = self.of(row)
        self._prefills.remove(prefill)
        return prefill.entry

    def wait_for_disk(self, rows: Sequence[Request]) -> None:
        """Skip this prompt for the rest of the step: its snapshot is still being fetched or read from disk."""
        for prefill in self._prefills:
            prefill.is_waiting |= rows[0] in prefill.rows

    def compute_alone(self, rows: Sequence[Request]) -> None:
        """Restart these rows' prompts, each in forwards of its own, after their shared forward has failed."""
        for row in rows:
            row.num_charged, row.num_prefilled = max(row.num_charged, row.num_prefilled), 0
            self.of(row).is_alone = True
