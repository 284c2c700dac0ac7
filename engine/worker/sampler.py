"""Samples one token per row from the logits, each row with its own parameters and random numbers.

A row's randomness is keyed by (seed, output position) only: the same seed gives the same tokens in any batch. A token
is the argmax of the filtered logits plus Gumbel noise, which samples the softmax exactly (Gumbel 1954; Maddison et al.
2014, arXiv 1411.0030). Only rows with top_k or top_p are sorted, and only as deep as their top_k: sorting a vocabulary
of 150,000 for every row costs more than a small model's step.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.core.runner import NO_TOKEN
from engine.protocol import SamplingParams
from engine.worker.ranking import best_first

COLDEST = 1e-6
"""Lower temperatures are greedy: dividing by them leaves only the best token, or overflows."""


class Sampler:
    """Samples a fixed set of rows, with their parameters on the device; rebuilt when rows join or are removed."""

    def __init__(self, rows: Sequence[SamplingParams]):
        hot = [i for i, p in enumerate(rows) if p.temperature >= COLDEST]
        self._all_hot = len(hot) == len(rows)
        self._hot = mx.array(hot, mx.int32) if hot else None
        if not hot:
            return
        params = [rows[i] for i in hot]
        self._seeds = mx.array(mix_seeds(np.array([p.seed for p in params], np.uint64)))[:, None]
        self._temperature = _column([p.temperature for p in params])
        self._log_min_p = _log_min_p(params) if any(p.min_p for p in params) else None
        ranked = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1]
        self._nucleus = Nucleus([params[i] for i in ranked]) if ranked else None
        self._ranked = mx.array(ranked, mx.int32)

    def noise(self, positions: mx.array, vocab_size: int) -> mx.array | None:
        """Return the Gumbel noise for output positions int32 [B, L].

        Returns:
            float32 [rows with temperature, L, vocab]; None when all rows are greedy.
        """
        if self._hot is None:
            return None
        keys = random_keys(self._seeds, positions[self._hot])
        noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys.reshape(-1, 2))
        return noise.reshape(*keys.shape[:2], vocab_size)

    def __call__(self, logits: mx.array, noise: mx.array | None) -> mx.array:
        """Sample tokens.

        Args:
            logits: [B, L, vocab].
            noise: Noise of the same positions, from `noise`.

        Returns:
            int32 [B, L]; NO_TOKEN where the best logit is not finite.
        """
        logits = logits.astype(mx.float32)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        if self._hot is not None:
            assert noise is not None
            if self._all_hot:
                tokens = self._sample(logits, noise)
            else:
                tokens[self._hot] = self._sample(logits[self._hot], noise)
        return mx.where(mx.isfinite(mx.max(logits, axis=-1)), tokens, NO_TOKEN)

    def _sample(self, logits: mx.array, noise: mx.array) -> mx.array:
        scaled = logits / self._temperature
        allowed = scaled
        if self._log_min_p is not None:
            limit = mx.max(scaled, axis=-1, keepdims=True) + self._log_min_p
            allowed = mx.where(scaled < limit, -mx.inf, scaled)
        tokens = mx.argmax(allowed + noise, axis=-1).astype(mx.int32)
        if self._nucleus is not None:
            tokens[self._ranked] = self._nucleus(scaled[self._ranked], noise[self._ranked])
        return tokens


class Nucleus:
    """Applies top_k, then top_p, then min_p, for rows with at least one of the first two."""

    def __init__(self, rows: Sequence[SamplingParams]):
        no_limit = 2**31 - 1
        self._top_k = mx.array([p.top_k or no_limit for p in rows], mx.int32)[:, None, None]
        self._top_p = _column([p.top_p for p in rows])
        self._log_min_p = _log_min_p(rows)
        self._depth = max(p.top_k or no_limit for p in rows)

    def __call__(self, scaled: mx.array, noise: mx.array) -> mx.array:
        """Sample from logits and noise, both float32 [rows, L, vocab]. Returns int32 [rows, L]."""
        order = best_first(scaled, self._depth)
        logits = mx.take_along_axis(scaled, order, axis=-1)
        rank = mx.arange(order.shape[-1])
        logits = mx.where(rank < self._top_k, logits, -mx.inf)
        from_here_on = mx.cumsum(mx.softmax(logits, axis=-1), axis=-1, reverse=True)  # summed from the small end
        in_nucleus = (from_here_on > 1 - self._top_p) | (self._top_p >= 1) | (rank == 0)
        in_nucleus &= logits >= logits[..., :1] + self._log_min_p
        noisy = mx.where(in_nucleus, logits + mx.take_along_axis(noise, order, axis=-1), -mx.inf)
        chosen = mx.argmax(noisy, axis=-1, keepdims=True)
        return mx.take_along_axis(order, chosen, axis=-1)[..., 0].astype(mx.int32)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None, None]


def _log_min_p(rows: Sequence[SamplingParams]) -> mx.array:
    """Return [rows, 1, 1]: how far below the best logit the last allowed one lies; min_p 0 allows everything."""
    return mx.log(_column([max(p.min_p, 1e-30) for p in rows]))


def random_keys(mixed_seeds: mx.array, positions: mx.array) -> mx.array:
    """Return a random key per (seed, position), mixed by SplitMix64 (Steele, Lea, Flood 2014).

    Positions are on the device: the host does not know them while tokens are being computed.

    Args:
        mixed_seeds: uint64 [B, 1], from `mix_seeds`.
        positions: int32 [B, L].

    Returns:
        uint32 [B, L, 2].
    """
    x = mixed_seeds + (positions.astype(mx.uint64) + 1) * _uint64(_GOLDEN)
    x = (x ^ (x >> 30)) * _uint64(_MIX_1)
    x = (x ^ (x >> 27)) * _uint64(_MIX_2)
    return (x ^ (x >> 31))[..., None].view(mx.uint32)


def mix_seeds(x: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 to uint64 [B], so that similar seeds give unrelated keys."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _uint64(value: int) -> mx.array:
    return mx.array(np.array(value, np.uint64))  # mx.array takes Python integers as signed


_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
