"""The norms and the rope of an attention layer's queries and keys as one CUDA kernel.

mlx_vlm 0.7.10 splits, normalizes, rotates and concatenates them by some twenty operations, which cost the host more
than they cost the device. It can be removed when the library has such a kernel.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.worker.cuda_kernel import CudaKernel, short

WARPS = 4
"""Warps per block; each computes one head of one token."""

_SOURCE = """
    constexpr int Heads = Hq + Hk;
    const int lane = threadIdx.x, n = blockIdx.x * Warps + threadIdx.y, token = n / Heads, head = n % Heads;
    if (token >= queries_shape[0] * queries_shape[1]) return;
    const bool is_query = head < Hq;
    const size_t query = size_t(token) * Hq + head, key = size_t(token) * Hk + head - Hq;
    const T* from = is_query ? queries + query * 2 * D : keys + key * D;
    T* to = is_query ? q + query * D : k + key * D;
    __shared__ float rows[Warps][D];
    float* row = rows[threadIdx.y];
    float squares = 0.0f;
    for (int d = lane; d < D; d += 32) {
        row[d] = static_cast<float>(from[d]);
        squares += row[d] * row[d];
    }
    for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    const float norm = rsqrtf(squares / D + (is_query ? Q_EPS : K_EPS));
    for (int d = lane; d < D; d += 32)
        row[d] *= norm * static_cast<float>(is_query ? q_weight[d] : k_weight[d]);
    __syncwarp();
    for (int d = lane; d < D; d += 32) {
        float value = row[d];
        if (d < Rotary) {
            const float other = d < Rotary / 2 ? -row[d + Rotary / 2] : row[d - Rotary / 2];
            const size_t at = size_t(token) * Rotary + d;
            value = value * static_cast<float>(cosines[at]) + other * static_cast<float>(sines[at]);
        }
        to[d] = static_cast<T>(value);
    }
"""


def is_supported(layer: Any, x: mx.array, cosines: mx.array) -> bool:
    """Return whether the kernel rotates the heads of a Qwen3_5Attention for inputs x [B, L, hidden size]."""
    return (
        type(layer.q_norm) is nn.RMSNorm
        and type(layer.k_norm) is nn.RMSNorm
        and cosines.shape[:-1] == x.shape[:-1]
        and cosines.shape[-1] <= layer.head_dim
    )


def rotated_heads(
    layer: Any, queries: mx.array, keys: mx.array, cosines: mx.array, sines: mx.array
) -> tuple[mx.array, mx.array]:
    """Normalize and rotate the heads of a Qwen3_5Attention.

    Args:
        layer: The attention layer.
        queries: [B, L, heads * 2 * head_dim], each head's queries before its gate.
        keys: [B, L, kv_heads * head_dim].
        cosines: [B, L, rotary], of the halves one after the other.
        sines: Likewise.

    Returns:
        Queries [B, L, heads, head_dim] and keys [B, L, kv_heads, head_dim], in the dtype of `queries`.
    """
    batch, length, _ = queries.shape
    heads, kv_heads, head_dim = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    sizes = {"Hq": heads, "Hk": kv_heads, "D": head_dim, "Rotary": cosines.shape[-1], "Warps": WARPS}
    q, k = _kernel(layer.q_norm.eps, layer.k_norm.eps)(
        inputs=[queries, keys, cosines, sines, layer.q_norm.weight, layer.k_norm.weight],
        template=[("T", queries.dtype), *sizes.items()],
        grid=(32 * -(-batch * length * (heads + kv_heads) // WARPS), WARPS, 1),
        threadgroup=(32, WARPS, 1),
        output_shapes=[(batch, length, heads, head_dim), (batch, length, kv_heads, head_dim)],
        output_dtypes=[queries.dtype] * 2,
    )
    return q, k


@cache
def _kernel(q_eps: float, k_eps: float) -> CudaKernel:
    return CudaKernel(
        name="rotated_heads",
        input_names=["queries", "keys", "cosines", "sines", "q_weight", "k_weight"],
        output_names=["q", "k"],
        header=f"constexpr float Q_EPS = {q_eps!r}f, K_EPS = {k_eps!r}f;",
        source=short(_SOURCE),
    )
