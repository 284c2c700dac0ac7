"""Where the rows of a decode group write: each row's tokens are left-justified in slots of their own.

The library's batch caches align all rows to one common end: rows that accept different numbers of draft tokens must be
rolled, and a join moves all rows. Here a row's tokens lie in slots 0, 1, 2, ..., and `Cursor.start` says, on the
device, where each row writes next. Rejected tokens are overwritten, so nothing moves and the host need not know how
many there are. Slots after a row's end are masked and finite.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(slots=True, eq=False)
class Cursor:
    """Where the rows write in the next forward; shared by all layers, and set before each forward."""

    start: mx.array
    """int32 [B], on the device: each row's next slot."""
    extent: int
    """Slots that attention reads, at least max(start) + new tokens."""
    uniform_start: int | None = None
    """`start` if the host knows that it is the same for all rows: slices suffice then, without masks."""
    as_offset: bool = False
    """Whether the layers' offset is `start`, from which they derive positions, or the extent, with explicit
    positions."""
    _slots: tuple[mx.array, mx.array] | None = None
    """`start` and the slots of as many new tokens from it on; layers that write as many need them again."""

    def slots(self, num_new: int) -> mx.array:
        """Return the slots of new tokens, int32 [B, num_new]."""
        if self._slots is None or self._slots[0] is not self.start or self._slots[1].shape[1] != num_new:
            self._slots = self.start, self.start[:, None] + mx.arange(num_new)
        return self._slots[1]

    def mask(self, num_new: int, window_size: int | None) -> mx.array | str | None:
        """Return which slots each new token sees: bool [B, 1, num_new, extent], or the library's shorthand.

        The shorthand stands for all preceding tokens: None for one new token, otherwise "causal".
        """
        if self.uniform_start is not None and window_size is None:
            return None if num_new == 1 else "causal"
        slots = mx.arange(self.extent)[None, None]
        own = self.slots(num_new)[..., None]
        seen = slots <= own
        if window_size is not None:
            seen &= slots > own - window_size
        return seen[:, None]
