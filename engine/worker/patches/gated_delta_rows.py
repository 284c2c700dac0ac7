"""Verification of a batch on the CPU by the factored delta rule.

mlx_vlm 0.7.10 calls `gated_delta_update` by name in two modules; both get this one, which differs only for this
package's own caches while they record. On GPUs one kernel per layer works token by token (Metal: the library's, CUDA:
gated_delta_cuda). It can be removed when the library lets a cache choose how its state is updated.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5 import gated_delta, language, speculative_verifier

from engine.worker import delta_rule
from engine.worker.layer_kinds import in_group
from engine.worker.recurrent_layer import BatchRecurrentLayer

_library = gated_delta.gated_delta_update


def _gated_delta_update(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, **kwargs: Any
) -> Any:
    cache: Any = kwargs.get("cache")
    if not (in_group(cache) and cache.recording and kwargs.get("mask") is None):
        return _library(q, k, v, a, b, A_log, dt_bias, **kwargs)
    g, beta = gated_delta._compute_g_beta(A_log, a, b, dt_bias)
    index = kwargs.get("cache_index", 1)
    y, factors = delta_rule.run(q, k, v, g, beta, cache[index])
    cache.record_factors(index, factors)
    return y, cache[index]


def install() -> None:
    """Replace the library's function. May be called several times."""
    BatchRecurrentLayer.is_factored = True
    for module in (language, speculative_verifier):
        vars(module)["gated_delta_update"] = _gated_delta_update
