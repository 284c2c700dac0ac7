"""The attention of a decode step over each row's own tokens as one or two CUDA kernels.

MLX 0.32.4 has no attention for heads of 256 on CUDA: it multiplies by cuBLAS, masks, and multiplies again, over the
slots of the longest row. Here a row reads its own slots. Keys are divided into parts by their position, so that a row's
result does not depend on the rows beside it, nor on tokens that are verified with its own. It can be removed when the
library has such a kernel.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.kv_layer import BatchKVLayer
from engine.worker.layer_kinds import in_group

MAX_TOKENS = 16
"""More tokens per row than this are computed by the library's operations."""
KEYS = 512
"""Keys of a part. The first kernel attends to each part; if there are several, a second one adds them up."""
MAX_QUERIES = 8
"""Heads of queries per head of keys; a warp holds all of them in registers."""
MANY_BLOCKS = 64
"""With fewer blocks each attends with one head of queries, and keys are read again for each; a head's result is the
same."""
WARPS = 8
"""Warps per block, which attend to the keys of a part in turns."""
SIZES = {"Keys": KEYS, "Warps": WARPS, "Ahead": 4}
"""Template arguments of the kernel: Ahead is the number of keys that a warp loads at once."""
ADDING_THREADS = 128
"""Threads that add up the parts of one head."""

_SOURCE = """
    constexpr int N = D / 32;
    struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Lane { T values[N]; };
    const int lane = threadIdx.x, warp = threadIdx.y, slots = keys_shape[2], length = q_shape[1];
    // A block attends with G of the query heads, which share their keys, to one part of a row's keys for one token.
    constexpr int Groups = Hq / G;
    const int parts = gridDim.x / (q_shape[0] * length * Groups);
    int n = blockIdx.x;
    const int part = n % parts; n /= parts;
    const int l = n % length; n /= length;
    const int head = n % Groups * G, hk = head / (Hq / Hk), b = n / Groups;
    const int first = part * Keys, end = min(starts[b] + l + 1, first + Keys);
    const size_t query = (size_t(b) * length + l) * Hq + head;
    float queries[G][N], sums[G][N], most[G], total[G];
    for (int g = 0; g < G; ++g) {
        most[g] = -INFINITY;
        total[g] = 0.0f;
        for (int i = 0; i < N; ++i) {
            queries[g][i] = static_cast<float>(q[(query + g) * D + lane * N + i]) * SCALE;
            sums[g][i] = 0.0f;
        }
    }
    const size_t row = (size_t(b) * Hk + hk) * slots;
    for (int start = first + warp; start < end; start += Warps * Ahead) {
        Lane k[Ahead], v[Ahead];
        #pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            const int at = min(start + u * Warps, end - 1);
            k[u] = *reinterpret_cast<const Lane*>(keys + (row + at) * D + lane * N);
            v[u] = *reinterpret_cast<const Lane*>(values + (row + at) * D + lane * N);
        }
        #pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            if (start + u * Warps >= end) break;
            #pragma unroll
            for (int g = 0; g < G; ++g) {
                float score = 0.0f;
                for (int i = 0; i < N; ++i) score += queries[g][i] * static_cast<float>(k[u].values[i]);
                for (int step = 16; step; step >>= 1) score += __shfl_xor_sync(0xffffffffu, score, step);
                if (score > most[g]) {
                    const float kept = expf(most[g] - score);
                    total[g] *= kept;
                    for (int i = 0; i < N; ++i) sums[g][i] *= kept;
                    most[g] = score;
                }
                const float weight = expf(score - most[g]);
                total[g] += weight;
                for (int i = 0; i < N; ++i) sums[g][i] += weight * static_cast<float>(v[u].values[i]);
            }
        }
    }
    // One head after the other: the warps' sums, each for its largest score, become those of the block.
    __shared__ float all_most[Warps][G], all_total[Warps][G], all_sums[Warps][D];
    if (lane == 0)
        for (int g = 0; g < G; ++g) {
            all_most[warp][g] = most[g];
            all_total[warp][g] = total[g];
        }
    __syncthreads();
    #pragma unroll
    for (int g = 0; g < G; ++g) {
        float block_most = -INFINITY, block_total = 0.0f;
        for (int w = 0; w < Warps; ++w) block_most = fmaxf(block_most, all_most[w][g]);
        for (int w = 0; w < Warps; ++w)
            if (all_total[w][g] != 0.0f) block_total += all_total[w][g] * expf(all_most[w][g] - block_most);
        const float kept = total[g] != 0.0f ? expf(most[g] - block_most) : 0.0f;
        for (int i = 0; i < N; ++i) all_sums[warp][lane * N + i] = sums[g][i] * kept;
        __syncthreads();
        for (int d = warp * 32 + lane; d < D; d += 32 * Warps) {
            float sum = 0.0f;
            for (int w = 0; w < Warps; ++w) sum += all_sums[w][d];
            if (Whole) {
                const float gate = static_cast<float>(gates[(query + g) * 2 * D + D + d]);
                y[(query + g) * D + d] = static_cast<Out>(sum / block_total / (1.0f + expf(-gate)));
            } else if (block_total != 0.0f) {
                y[((query + g) * parts + part) * D + d] = static_cast<Out>(sum);
            }
        }
        if (!Whole && warp == 0 && lane == 0) {
            weights[((query + g) * parts + part) * 2] = block_most;
            weights[((query + g) * parts + part) * 2 + 1] = block_total;
        }
        __syncthreads();
    }
"""

_ADD_UP = """
    const size_t query = blockIdx.x;
    const int parts = weights_shape[3];
    float most = -INFINITY, total = 0.0f;
    for (int p = 0; p < parts; ++p) most = fmaxf(most, weights[(query * parts + p) * 2]);
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float sum = 0.0f;
        total = 0.0f;
        for (int p = 0; p < parts; ++p) {
            const float of_part = weights[(query * parts + p) * 2 + 1];
            if (of_part == 0.0f) continue;
            const float kept = expf(weights[(query * parts + p) * 2] - most);
            total += of_part * kept;
            sum += sums[(query * parts + p) * D + d] * kept;
        }
        const float gate = static_cast<float>(gates[query * 2 * D + D + d]);
        y[query * D + d] = static_cast<T>(sum / total / (1.0f + expf(-gate)));
    }
"""


def is_supported(layer: Any, x: mx.array, cache: Any) -> bool:
    """Return whether the kernels attend to the cache for a Qwen3_5Attention's inputs x [B, L, hidden size]."""
    queries_per_key, rest = divmod(layer.num_attention_heads, layer.num_key_value_heads)
    return (
        in_group(cache)
        and cache.appends
        and cache.kv_format is None
        and cache.keys.dtype == cache.values.dtype == x.dtype
        and x.shape[1] <= MAX_TOKENS
        and layer.head_dim in (64, 128, 256)
        and rest == 0
        and queries_per_key <= MAX_QUERIES
    )


def attend(queries: mx.array, gates: mx.array, cache: BatchKVLayer, scale: float) -> mx.array:
    """Attend to all tokens of the row up to each query's own, which the cache holds already.

    Args:
        queries: [B, L, heads, head_dim], L tokens of each row from `cache.starts` on.
        gates: [B, L, heads * 2 * head_dim], each head's gate behind as many values that are not read.
        cache: Keys and values.
        scale: Of the scores.

    Returns:
        The attention, multiplied by the sigmoid of the gates, [B, L, heads * head_dim] in the dtype of `queries`.
    """
    batch, length, heads, head_dim = queries.shape
    kv_heads, parts = cache.keys.shape[1], max(1, -(-cache.cursor.extent // KEYS))
    together = heads // kv_heads if batch * length * kv_heads * parts >= MANY_BLOCKS else 1
    sizes = {"D": head_dim, "G": together, "Hq": heads, "Hk": kv_heads, **SIZES}
    whole, in_parts = (batch, length, heads * head_dim), (batch, length, heads, parts)
    result = queries.dtype if parts == 1 else mx.float32
    y, weights = _kernel(scale)(
        inputs=[queries, gates, cache.keys, cache.values, cache.starts],
        template=[("T", queries.dtype), ("Out", result), *sizes.items(), ("Whole", parts == 1)],
        grid=(32 * batch * length * heads // together * parts, WARPS, 1),
        threadgroup=(32, WARPS, 1),
        output_shapes=[whole if parts == 1 else (*in_parts, head_dim), (*in_parts, 2)],
        output_dtypes=[result, mx.float32],
    )
    if parts == 1:
        return y
    return _add_up()(
        inputs=[y, weights, gates],
        template=[("T", queries.dtype), ("D", head_dim)],
        grid=(ADDING_THREADS * batch * length * heads, 1, 1),
        threadgroup=(ADDING_THREADS, 1, 1),
        output_shapes=[whole],
        output_dtypes=[queries.dtype],
    )[0]


@cache
def _kernel(scale: float) -> CudaKernel:
    return CudaKernel(
        name="step_attention",
        input_names=["q", "gates", "keys", "values", "starts"],
        output_names=["y", "weights"],
        header=f"constexpr float SCALE = {scale!r}f;",
        source=short(_SOURCE),
    )


@cache
def _add_up() -> CudaKernel:
    return CudaKernel(
        name="step_attention_parts",
        input_names=["sums", "weights", "gates"],
        output_names=["y"],
        source=short(_ADD_UP),
    )
