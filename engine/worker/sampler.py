"""One token per row from the logits, each row by its own parameters and its own random numbers.

The randomness of a row is keyed by (seed, output position) alone: the same seed gives the same tokens in any batch,
whatever else runs. A token is the argmax of the filtered logits plus Gumbel noise, which samples the softmax exactly
(Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030).
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.protocol import SamplingParams


class Sampler:
    """The parameters of a fixed set of rows, on the device once; made anew when rows join or leave."""

    def __init__(self, rows: Sequence[SamplingParams]):
        self._greedy = all(p.temperature == 0 for p in rows)
        if self._greedy:
            return
        self._seeds = np.array([p.seed for p in rows], np.uint64)
        self._is_greedy = mx.array([p.temperature == 0 for p in rows])
        self._temperature = mx.array([p.temperature or 1.0 for p in rows], mx.float32)[:, None]
        self._top_k = _column([p.top_k or 2**31 - 1 for p in rows], mx.int32, any(p.top_k for p in rows))
        self._top_p = _column([p.top_p for p in rows], mx.float32, any(p.top_p < 1 for p in rows))
        self._min_p = _column([max(p.min_p, 1e-30) for p in rows], mx.float32, any(p.min_p for p in rows))

    def __call__(self, logits: mx.array, positions: np.ndarray) -> mx.array:
        """logits [B, vocab]; positions int [B]: how many tokens each row has sampled before. Returns int32 [B]."""
        logits = logits.astype(mx.float32)
        best = mx.argmax(logits, axis=-1).astype(mx.int32)
        if self._greedy:
            return best
        scaled = self._filter(logits / self._temperature)
        keys = mx.array(random_keys(self._seeds, positions))
        noise = mx.vmap(lambda key: mx.random.gumbel((scaled.shape[-1],), key=key))(keys)
        sampled = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
        return mx.where(self._is_greedy, best, sampled)

    def _filter(self, scaled: mx.array) -> mx.array:
        """Tokens that top_k, top_p or min_p exclude become -inf. A filter that no row uses costs nothing."""
        if self._top_k is not None or self._top_p is not None:
            scaled = mx.where(scaled < self._threshold(scaled), -mx.inf, scaled)
        if self._min_p is not None:
            limit = mx.max(scaled, axis=-1, keepdims=True) + mx.log(self._min_p)
            scaled = mx.where(scaled < limit, -mx.inf, scaled)
        return scaled

    def _threshold(self, scaled: mx.array) -> mx.array:
        """[B, 1]: the smallest logit that top_k and then top_p leave. The best token always stays."""
        ordered = -mx.sort(-scaled, axis=-1)
        rank = mx.arange(ordered.shape[-1])[None]
        kept = mx.ones(ordered.shape, mx.bool_)
        if self._top_k is not None:
            kept = rank < self._top_k
        if self._top_p is not None:
            probs = mx.softmax(mx.where(kept, ordered, -mx.inf), axis=-1)
            before = mx.cumsum(probs, axis=-1) - probs
            kept = kept & ((before < self._top_p) | (rank == 0))
        last = mx.sum(kept, axis=-1, keepdims=True) - 1
        return mx.take_along_axis(ordered, last, axis=-1)


def random_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint32 [B, 2]: a key per (seed, position), mixed by SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(x)[:, None].view(np.uint32)


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _column(values: list, dtype: mx.Dtype, used: bool) -> mx.array | None:
    return mx.array(values, dtype)[:, None] if used else None
