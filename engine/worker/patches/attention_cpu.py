"""Attention over a prompt on x86 CPUs, with numpy's exponential.

MLX 0.32.4 takes 16 ns for an exponential on x86, numpy 0.6 ns (with AVX-512): 7168 tokens of the demo's draft take 2.6
instead of 7.4 s of CPU. Scores are computed in blocks of queries, each over the keys that it may see. mlx_vlm's models
call `scaled_dot_product_attention` by name, each in its module; `install` replaces it for the Qwen and Llama families.
It can be removed when MLX's CPU backend has a faster exponential on x86.
"""

import platform
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models import base
from mlx_vlm.models.llama import language as llama
from mlx_vlm.models.qwen2 import language as qwen2
from mlx_vlm.models.qwen3 import language as qwen3
from mlx_vlm.models.qwen3_5 import language as qwen3_5
from mlx_vlm.models.qwen3_vl import language as qwen3_vl

from engine.worker.layer_kinds import keeps_all

MODULES = (llama, qwen2, qwen3, qwen3_5, qwen3_vl)

MIN_QUERIES = 16
"""Fewer queries are a decode step, which must not wait for the device within a forward."""

BLOCK_QUERIES = 256

_library: Any = base.scaled_dot_product_attention


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """Compute attention in the place of `mlx_vlm.models.base.scaled_dot_product_attention`."""
    is_ours = keeps_all(cache) and queries.dtype == keys.dtype == values.dtype == mx.float32 and sinks is None
    is_causal = isinstance(mask, str) and mask == "causal"
    if not is_ours or queries.shape[2] < MIN_QUERIES or not (is_causal or mask is None):
        return _library(queries, keys, values, cache, scale, mask, sinks)
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    blocks = []
    for start in range(0, num_queries, BLOCK_QUERIES):
        end = min(start + BLOCK_QUERIES, num_queries)
        seen = num_keys - num_queries + end if is_causal else num_keys
        blocks.append(_block(queries[:, :, start:end] * scale, keys[:, :, :seen], values[:, :, :seen], is_causal))
        mx.eval(blocks[-1])  # frees its scores
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def _block(q: mx.array, k: mx.array, v: mx.array, is_causal: bool) -> mx.array:
    """Compute one block of queries.

    Args:
        q: [B, heads, n, head_dim].
        k: [B, kv heads, m, head_dim]; with is_causal the last n keys are the queries' own.
        v: As k.
        is_causal: Whether query i sees only the keys up to its own.
    """
    batch, num_heads, n, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, head_dim)
    scores = grouped @ k.swapaxes(-1, -2)
    mx.eval(scores)
    _softmax(np.array(scores, copy=False), n if is_causal else 0)  # in place: the array has no other reference
    return (scores @ v).reshape(batch, num_heads, n, v.shape[-1])


def _softmax(scores: np.ndarray, num_causal: int) -> None:
    """Apply softmax in place over the last axis.

    num_causal is the number of queries per head that see no later keys; 0 for all keys.
    """
    if num_causal:
        newest = scores.reshape(*scores.shape[:2], -1, num_causal, scores.shape[-1])[..., -num_causal:]
        np.copyto(newest, -np.inf, where=np.triu(np.ones((num_causal, num_causal), bool), 1))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


def install() -> None:
    """Replace the attention of the supported models; x86 only. May be called several times."""
    if platform.machine() in ("x86_64", "AMD64"):
        for module in MODULES:
            vars(module)["scaled_dot_product_attention"] = attention


def max_queries() -> int:
    """Return how many queries attention computes at once; unbounded if the patch is not installed."""
    return BLOCK_QUERIES if vars(qwen3_5)["scaled_dot_product_attention"] is attention else 2**31
