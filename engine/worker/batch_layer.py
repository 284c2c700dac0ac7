"""The methods that a decode group calls on its layers; each kind of state has a class of its own.

Beside these methods a layer has `row`, `append`, `select`, `with_arrays` and `load` for its rows' arrays, and those of
the library's caches by which the model's layers read and write it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False)
class SeenSlots:
    """The keys and values of a layer that the newest token of each row sees."""

    keys: mx.array  # [B, heads, slots, head_dim], as computed.
    values: mx.array  # Likewise.
    seen: mx.array  # bool [B, 1, 1, slots].


class BatchLayer:
    """A layer whose rows have slots of their own, in which rejected tokens are overwritten."""

    appends = False
    """Whether keys and values lie in slots that never change."""
    num_slots = 0
    """Tokens of a row for which there are slots; 0 if a row's tokens have none of their own."""
    margin = math.inf
    """Slots after a row's end that a forward may write."""
    recording = False
    """Whether `commit` follows the next forward."""

    @classmethod
    def of(cls, cache: Any, cursor: Any) -> "BatchLayer":
        """Return a layer with one row, whose cache this is. cursor: Where the rows write, see Cursor."""
        raise NotImplementedError

    @property
    def recorded(self) -> Sequence[mx.array]:
        """The arrays that the last forward recorded for `commit`."""
        return ()

    def commit(self, num_kept: mx.array) -> None:
        """Return to the state after `num_kept` int32 [B] >= 1 tokens of the recorded forward."""

    def seen_slots(self, lengths: mx.array, extent: int) -> SeenSlots:
        """Return what the newest tokens see, for heads that share it; only attention layers have it.

        Args:
            lengths: int32 [B], tokens of each row; slots after them may hold others.
            extent: At least max(lengths).
        """
        raise NotImplementedError

    def reserve(self, num_slots: int) -> bool:
        """Allocate slots for `num_slots` tokens per row; return whether there are more now."""
        raise NotImplementedError
