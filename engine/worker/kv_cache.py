"""The caches of a decode group: the layers of all rows, and the cursor at which they write."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.worker.cursor import Cursor
from engine.worker.kv_layer import rounded
from engine.worker.layer_kinds import kind_of

SequenceCache = list[Any]
"""One row's caches, of the classes in layer_kinds.KINDS, for each layer. A layer with several has them one after the
other."""


class BatchCache:
    """All layers of a decode group. They are rebuilt one by one, so that at most one layer exists twice."""

    def __init__(self, layers: list[Any], cursor: Cursor):
        self.layers = layers
        self.cursor = cursor

    @classmethod
    def of(cls, row: SequenceCache, as_offset: bool = False) -> "BatchCache":
        """Create a group of one row, which takes over the row's arrays."""
        cursor = Cursor(mx.zeros(1, mx.int32), 0, None, as_offset)
        return cls([kind_of(layer).batch_layer(layer, cursor) for layer in row], cursor)

    def row(self, index: int, num_tokens: int) -> SequenceCache:
        """Return one row's caches with `num_tokens` tokens: lazy slices that later writes do not affect."""
        return [layer.row(index, num_tokens) for layer in self.layers]

    def join(self, rows: Sequence[SequenceCache], move: bool = False) -> None:
        """Add rows, evaluated. When it raises, the rows are as before.

        Args:
            rows: Caches of one row each.
            move: Free each layer of the new rows once it is copied; their caches must not be used afterwards.
        """
        before, done = self.num_rows, 0
        try:
            for done, mine in enumerate(self.layers):
                self._put(done, mine.append([row[done] for row in rows]))
                if move:
                    for row in rows:
                        row[done] = None
        except Exception:
            for i in range(done):
                self.layers[i] = self.layers[i].select(mx.arange(before), self.num_slots)
            raise

    def select(self, rows: list[int], num_slots: int, leaving: Sequence[Callable[[Any], None]] = ()) -> None:
        """Keep these rows in this order, with `num_slots` slots each. When it raises, all rows are lost.

        Args:
            rows: Indices of the rows.
            num_slots: Slots that they need.
            leaving: Called with each layer before it is replaced.
        """
        index = mx.array(rows, mx.int32)
        for i, layer in enumerate(self.layers):
            for call in leaving:
                call(layer)
            self._put(i, layer.select(index, num_slots) if rows else None)

    def _put(self, i: int, layer: Any) -> None:
        if layer is not None:
            mx.eval(layer.state)
        self.layers[i] = layer

    @property
    def num_rows(self) -> int:
        return self.layers[0].state[0].shape[0] if self.layers else 0

    @property
    def num_slots(self) -> int:
        """Tokens of a row for which an attention layer has slots, at most; 0 without one."""
        return max((layer.num_slots for layer in self.layers), default=0)

    def at(self, start: mx.array, extent: int, uniform_start: int | None = None, record: bool = False) -> list[Any]:
        """Return the layers, prepared for a forward that writes at `start`; see Cursor.

        With `record`, `commit` will follow.
        """
        self.reserve(extent)
        self.cursor.start, self.cursor.extent, self.cursor.uniform_start = start, extent, uniform_start
        for layer in self.layers:
            layer.recording = record
        return self.layers

    def commit(self, num_kept: mx.array) -> None:
        """Return recurrent layers to the state after `num_kept` int32 [B] tokens of the recorded forward."""
        for layer in self.layers:
            layer.commit(num_kept)

    def reserve(self, num_slots: int) -> int:
        """Allocate at least `num_slots` slots per row; return how many slots there are."""
        for layer in self.layers:
            if layer.reserve(num_slots):  # otherwise there is nothing to wait for
                mx.eval(layer.state)
        return max(self.num_slots, rounded(num_slots))

    @property
    def recorded(self) -> list[mx.array]:
        """The arrays that the last forward recorded for `commit`."""
        return [array for layer in self.layers for array in layer.recorded]

    def load(self, state: Sequence[mx.array], recorded: Sequence[mx.array]) -> None:
        """Set the arrays that `state` and `recorded` of a cache of the same structure returned."""
        arrays, records = iter(state), iter(recorded)
        for layer in self.layers:
            layer.load(arrays, records)

    def with_arrays(self, state: Sequence[mx.array]) -> "BatchCache":
        """Return another cache of the same structure with these arrays."""
        cursor = Cursor(self.cursor.start, 0, None, self.cursor.as_offset)
        arrays = iter(state)
        return BatchCache([layer.with_arrays(arrays, cursor) for layer in self.layers], cursor)

    @property
    def state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        return num_bytes(self.layers)


def num_bytes(cache: Sequence[Any]) -> int:
    """Return the bytes of all layers."""
    return sum(layer.nbytes for layer in cache)
