"""Results of the scheduler: new tokens of rows, and rows to drop."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.protocol import TokenChunk

Published = dict[str, TokenChunk]
"""Row id -> the row's new tokens."""


@dataclass(frozen=True, slots=True)
class PreemptedRows:
    """A decoding row, or all rows of a prompt in progress, that have returned to the queue as a new prompt.

    They were preempted for others, suspended to be moved to another engine, or must be admitted again.
    """

    rows: Sequence[Row]
    prompt: Prompt
    """Their prompt until now."""
    was_decoding: bool
    """Whether the prompt was computed: a step in flight may still give the row tokens."""

    @property
    def has_begun(self) -> bool:
        """Whether the runner has computed any of it."""
        return self.was_decoding or self.prompt.has_started


@dataclass(slots=True)
class ReleasedRows:
    """Rows that no longer decode or prefill. EngineCore._release snapshots, publishes and drops them."""

    preempted: list[PreemptedRows] = field(default_factory=list)
    """Their memory is reserved for others already, so they are dropped before the next forward."""
    completed: list[Row] = field(default_factory=list)
    """Rows with complete answers, snapshotted while the runner has them."""
    failed: Published = field(default_factory=dict)
    """Final chunks of rows that expired in the queue or ran out of memory."""
    aborted: Published = field(default_factory=dict)
    """Final chunks of aborted rows."""
    finished: list[Row] = field(default_factory=list)
    """Rows that the runner has and that will get no more tokens; their memory is reserved until they are released."""

    @property
    def rows(self) -> list[Row]:
        """The rows to drop."""
        return [*self.finished, *(row for one in self.preempted for row in one.rows)]

    @property
    def row_ids(self) -> list[str]:
        """Ids of the rows to drop."""
        return [row.id for row in self.rows]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of the rows to drop, those included that are computed already."""
        return [*(row.prompt for row in self.finished), *(one.prompt for one in self.preempted)]
