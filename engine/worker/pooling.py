"""Pools the hidden states of a prompt, chunk by chunk, into one vector."""

import mlx.core as mx
import numpy as np

from engine.config import Pooling


class PooledStates:
    """The pooled hidden state of a prompt in progress, accumulated in float32."""

    def __init__(self, pooling: Pooling):
        self._pooling = pooling
        self._sum: mx.array | None = None

    def add(self, hidden: mx.array) -> None:
        """Add the hidden states [1, L, hidden] of the next L tokens, taken after the last norm."""
        states = {"cls": hidden[0, :1], "last": hidden[0, -1:]}.get(self._pooling, hidden[0])
        total = states.astype(mx.float32).sum(axis=0)
        if self._pooling == "mean" and self._sum is not None:
            total = self._sum + total
        mx.eval(total)
        self._sum = total

    @property
    def state(self) -> mx.array:
        """The pooled hidden state, float32 [hidden], not normalized."""
        assert self._sum is not None
        return self._sum

    def vector(self) -> bytes | None:
        """Return the vector as little-endian float32 [hidden] of norm 1; None if it is not finite.

        The mean has the direction of the sum, so no division is needed. A vector of zeros stays as it is.
        """
        vector = np.array(self.state, np.float64)
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length):
            return None
        return (vector / (length or 1.0)).astype("<f4").tobytes()
