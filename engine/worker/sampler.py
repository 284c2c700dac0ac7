"""One token per row from the logits, each row by its own parameters and its own random numbers.

The randomness of a row is keyed by (seed, output position) alone: the same seed gives the same tokens in any batch,
whatever else runs. A token is the argmax of the filtered logits plus Gumbel noise, which samples the softmax exactly
(Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). Only rows with top_k or top_p are sorted, and only as far as
their top_k reaches: sorting a vocabulary of 150 000 for every row costs more than a small model's step.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.core.batch import NO_TOKEN
from engine.protocol import SamplingParams

COLDEST = 1e-6
"""Temperatures below are greedy: dividing by them leaves nothing but the best token, or overflows."""


class Sampler:
    """The parameters of a fixed set of rows, on the device once; made anew when rows join or leave."""

    def __init__(self, rows: Sequence[SamplingParams]):
        cold = [p.temperature < COLDEST for p in rows]
        self._greedy = all(cold)
        if self._greedy:
            return
        self._seeds = np.array([p.seed for p in rows], np.uint64)
        self._is_greedy = mx.array(cold)
        self._temperature = mx.array([1.0 if c else p.temperature for p, c in zip(rows, cold, strict=True)])[:, None]
        self._log_min_p = _log_min_p(rows) if any(p.min_p for p in rows) else None
        ranked = [i for i, p in enumerate(rows) if not cold[i] and (p.top_k or p.top_p < 1)]
        self._nucleus = Nucleus([rows[i] for i in ranked]) if ranked else None
        self._ranked = mx.array(ranked, mx.int32)

    def __call__(self, logits: mx.array, positions: np.ndarray) -> mx.array:
        """logits [B, vocab]; positions int [B]: how many tokens each row has sampled before. Returns int32 [B].

        A row whose best logit is not a finite number gets NO_TOKEN.
        """
        logits = logits.astype(mx.float32)
        best = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens = best if self._greedy else mx.where(self._is_greedy, best, self._sample(logits, positions))
        return mx.where(mx.isfinite(mx.max(logits, axis=-1)), tokens, NO_TOKEN)

    def _sample(self, logits: mx.array, positions: np.ndarray) -> mx.array:
        scaled = logits / self._temperature
        keys = mx.array(random_keys(self._seeds, positions))
        noise = mx.vmap(lambda key: mx.random.gumbel((scaled.shape[-1],), key=key))(keys)
        allowed = scaled
        if self._log_min_p is not None:
            limit = mx.max(scaled, axis=-1, keepdims=True) + self._log_min_p
            allowed = mx.where(scaled < limit, -mx.inf, scaled)
        tokens = mx.argmax(allowed + noise, axis=-1).astype(mx.int32)
        if self._nucleus is not None:
            tokens[self._ranked] = self._nucleus(scaled[self._ranked], noise[self._ranked])
        return tokens


class Nucleus:
    """top_k, then top_p, then min_p, for rows that have at least one of the first two."""

    def __init__(self, rows: Sequence[SamplingParams]):
        no_limit = 2**31 - 1
        self._top_k = mx.array([p.top_k or no_limit for p in rows], mx.int32)[:, None]
        self._top_p = mx.array([p.top_p for p in rows], mx.float32)[:, None]
        self._log_min_p = _log_min_p(rows)
        self._depth = max(p.top_k or no_limit for p in rows)

    def __call__(self, scaled: mx.array, noise: mx.array) -> mx.array:
        """Both float32 [rows, vocab]. Returns int32 [rows]."""
        order = self._best(scaled)
        logits = mx.take_along_axis(scaled, order, axis=-1)
        rank = mx.arange(order.shape[-1])[None]
        logits = mx.where(rank < self._top_k, logits, -mx.inf)
        from_here_on = mx.cumsum(mx.softmax(logits, axis=-1), axis=-1, reverse=True)  # summed from the small end
        in_nucleus = (from_here_on > 1 - self._top_p) | (self._top_p >= 1) | (rank == 0)
        in_nucleus &= logits >= logits[:, :1] + self._log_min_p
        noisy = mx.where(in_nucleus, logits + mx.take_along_axis(noise, order, axis=-1), -mx.inf)
        chosen = mx.argmax(noisy, axis=-1, keepdims=True)
        return mx.take_along_axis(order, chosen, axis=-1)[:, 0].astype(mx.int32)

    def _best(self, scaled: mx.array) -> mx.array:
        """Token ids, best first, as many as the largest top_k asks for."""
        if self._depth >= scaled.shape[-1]:
            return mx.argsort(-scaled, axis=-1)
        some = mx.argpartition(-scaled, kth=self._depth - 1, axis=-1)[:, : self._depth]
        order = mx.argsort(-mx.take_along_axis(scaled, some, axis=-1), axis=-1)
        return mx.take_along_axis(some, order, axis=-1)


def _log_min_p(rows: Sequence[SamplingParams]) -> mx.array:
    """[rows, 1]: how far below the best logit the last allowed one lies; min_p 0 allows all that float32 can hold."""
    return mx.log(mx.array([max(p.min_p, 1e-30) for p in rows], mx.float32))[:, None]


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
