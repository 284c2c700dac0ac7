"""Mamba-2 layers whose rows go back to before rejected drafts, and whose states padding does not change.

mlx_vlm 0.7.10 overwrites the states of these layers, so that rejected drafts could not be taken back. Where prompts of
different lengths share a forward, it decays the states of those that have begun over the padding as well, and
Nemotron-H forgets the new tokens of a padded prompt. Here the change of the state over a verified forward stays
factored, as in worker/delta_rule.py: with steps dt and G[t] = exp(A * (dt[1] + ... + dt[t])),

    S[t] = G[t] * S[0] + sum over i <= t of G[t] / G[i] * dt[i] x[i] B[i]^T

The outputs are those of the library for several tokens, in float32. In a forward over prompts of different lengths the
state of each is updated by itself. It can be removed when the library's mixers call `update_window` and
`update_recurrent` and skip padding.
"""

from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import ArraysCache
from mlx_vlm.models.falcon_h1.language import FalconH1Mixer
from mlx_vlm.models.granitemoehybrid.language import GraniteMoeHybridMamba2Mixer
from mlx_vlm.models.mamba2.language import Mamba2Block
from mlx_vlm.models.nemotron_h.language import NemotronHMamba2Mixer
from mlx_vlm.models.plamo2vl.language import Mamba
from mlx_vlm.models.ssm import compute_dt, ssm_update

from engine.worker.delta_rule import Factors
from engine.worker.layer_kinds import in_burst, in_group

LIBRARY: dict[Any, tuple[Any, Any]] = {
    mixer: (mixer._conv, mixer._ssm)
    for mixer in (FalconH1Mixer, GraniteMoeHybridMamba2Mixer, Mamba, Mamba2Block, NemotronHMamba2Mixer)
}
"""The library's convolution and state update, by class of mixer."""
TIME_STEP_LIMIT: tuple[float, float] = signature(ssm_update).parameters["time_step_limit"].default
"""The smallest and largest step of a mixer that has no limits of its own."""


def _conv(self: Any, inputs: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
    if not (in_group(cache) and cache.recording):
        return LIBRARY[type(self)][0](self, inputs, cache, mask)
    source = mx.concatenate([cache[0], inputs], axis=1)
    cache.update_window(0, source, self.conv_kernel_size - 1)
    return nn.silu(self.conv1d(source))


def _ssm(
    self: Any, x: mx.array, keys: mx.array, queries: mx.array, dt: mx.array, cache: Any, mask: mx.array | None
) -> mx.array:
    """Update the state; return [B, L, heads * head dim], zeros for padding.

    x are the convolved inputs [B, L, heads * head dim], keys and queries B and C [B, L, groups * state size], dt the
    steps [B, L, heads] before their bias.
    """
    library = LIBRARY[type(self)][1]
    if in_burst(cache) and cache.lengths is not None:
        outputs = [
            library(self, *(each[i : i + 1, :length] for each in (x, keys, queries, dt)), row, None)
            for i, (row, length) in enumerate(cache.rows)
        ]
        return mx.concatenate([mx.pad(y, [(0, 0), (0, x.shape[1] - y.shape[1]), (0, 0)]) for y in outputs])
    if not (in_group(cache) and cache.recording):
        return library(self, x, keys, queries, dt, cache, mask)
    state: Any = cache[1]
    unwritten = ArraysCache(2)
    unwritten[1] = state
    keys, queries = keys.astype(mx.float32), queries.astype(mx.float32)
    cache.record_factors(1, _factors(self, x, keys, dt, state))
    return library(self, x, keys, queries, dt, unwritten, None)


def _factors(self: Any, x: mx.array, keys: mx.array, dt: mx.array, state: mx.array) -> Factors:
    """Return the factors of the change of a state [B, heads, head dim, state size]."""
    batch, num_heads, head_dim, state_size = state.shape
    steps = compute_dt(dt, self.dt_bias, getattr(self, "time_step_limit", TIME_STEP_LIMIT))
    keys = mx.unflatten(keys, -1, (-1, state_size))
    return Factors(
        log_decay=mx.swapaxes(mx.cumsum(-mx.exp(self.A_log.astype(mx.float32)) * steps, axis=1), 1, 2),
        deltas=mx.swapaxes(x.reshape(batch, -1, num_heads, head_dim) * steps[..., None], 1, 2),
        keys=mx.swapaxes(mx.repeat(keys, num_heads // keys.shape[2], axis=2), 1, 2),
    )


def install() -> None:
    """Replace the library's methods. May be called several times."""
    for mixer in LIBRARY:
        mixer._conv, mixer._ssm = _conv, _ssm
