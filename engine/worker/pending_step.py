"""A launched decode step, and its rows as far as the host has read their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.core.row import Row
from engine.core.runner import Drafts, RowOutput
from engine.worker.logprobs import Logprobs
from engine.worker.processors import advance_matcher
from engine.worker.proposer import RowDrafts


@dataclass(slots=True, eq=False)
class DecodingRow:
    """A row of the decode batch, as far as the host has read its tokens."""

    row: Row
    length: int  # Tokens in the cache.
    offset: int  # Logical minus physical position of its tokens.
    output_ids: list[int]  # Tokens after the request's own prompt; all but the last are in the cache.
    error: str | None = None  # Why the row cannot continue, None if it can.
    is_removed: bool = False  # Pending output of this row is discarded.
    drafts: Mapping[str, RowDrafts] = field(default_factory=dict)  # By name of the TextProposer.

    @property
    def output_offset(self) -> int:
        """Output position minus physical position of its tokens."""
        return -self.row.num_input_tokens


@dataclass(slots=True, eq=False)
class PendingStep:
    """A launched step whose outputs have not been used yet."""

    rows: list[DecodingRow]
    """Rows of the group at the launch."""
    drafts: Drafts
    """Its drafts, k per row."""
    has_drafts: Sequence[bool]
    """Which rows were given drafts of the proposer; the others keep one token."""
    tokens: mx.array
    """int32 [B, k + 1], sampled tokens."""
    num_kept: mx.array | None
    """int32 [B]: how many of the tokens each row keeps; None for all (k = 0)."""
    num_accepted: mx.array | None
    """int32 [B]: accepted drafts, which may exceed the kept ones of a finished row; None for k = 0."""
    logprobs: Logprobs | None
    """None if no row asks for them."""
    outputs: dict[str, RowOutput] | None = None
    """Set by the first `read`."""

    def token_ids(self) -> list[tuple[int, ...]]:
        """Return the kept tokens of each row. Waits for the device."""
        kept = [1] * len(self.rows) if self.num_kept is None else np.array(self.num_kept).tolist()
        return [tuple(ids[:n]) for ids, n in zip(np.array(self.tokens).tolist(), kept, strict=True)]

    def read(self) -> dict[str, RowOutput]:
        """Return the outputs by row id. Waits for the device. The first call updates rows and matchers."""
        if self.outputs is None:
            new = self.token_ids()
            accepted = [0] * len(self.rows) if self.num_accepted is None else np.array(self.num_accepted).tolist()
            logprobs = {} if self.logprobs is None else self.logprobs.read([len(ids) for ids in new])
            self.outputs = {}
            for i, (row, ids) in enumerate(zip(self.rows, new, strict=True)):
                if row.is_removed:
                    continue
                row.length += len(ids)
                row.output_ids += ids
                for drafts in row.drafts.values():
                    drafts.append(ids)
                row.error = row.error or advance_matcher(row.row, ids)
                self.outputs[row.row.id] = RowOutput(
                    ids,
                    logprobs.get(i, ()),
                    self.drafts.num_tokens if self.has_drafts[i] else 0,
                    accepted[i] if self.has_drafts[i] else 0,
                    self.drafts.proposer,
                    frozenset(name for name, drafts in row.drafts.items() if drafts.has_drafts),
                    row.error,
                )
        return self.outputs
