"""Attention of many queries with heads of more than 128 numbers as one CUDA kernel, without stored scores.

MLX 0.32.4 has no attention for such heads on CUDA: it stores all scores. For a chunk of 2,048 tokens behind 6,144 in
Qwen3.5-27B's shape they take 800 MB, and the attention 5.9 ms on an H200, 61 TFLOPS. Here a block attends with up
to 128 queries to KEYS keys at a time, whose scores stay in registers. `install` replaces MLX's function, which the
libraries' models call. It can be removed when MLX has such a kernel.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.patches import few_rows_kernel, row_tiles_kernel

KEYS = 64
"""Keys whose scores a block has at once."""
WARPS = {"large": 8, "small": 4}
"""Warps of a block by the device's shared memory, with 16 queries each: the more, the fewer blocks read the same keys.
On an H200 2,048 queries behind 30,720 tokens take 8.3 ms with 8, and 10.4 with 4."""
MIN_QUERIES = 64
"""Fewer queries are computed by MLX: there would be too few blocks behind a long context."""
HEAD_DIMS = (192, 256)

LARGE_DEVICES = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0))
"""Compute capabilities whose blocks may have 163 or 227 KiB of shared memory."""

_library: Any = mx.fast.scaled_dot_product_attention

_MATRICES = """
// Load four matrices of 8 x 8 numbers; each lane gives the address of a row, those of matrix i by lanes 8 i to 8 i + 7.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
        : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned (&x)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
        : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}
"""

_SOURCE = """
    constexpr int Units = D / 8, Threads = 32 * Warps, Rows = 16 * Warps, Tiles = Keys / 8;
    extern __shared__ uint4 staged[];
    uint4 *of_queries = staged, *of_keys = of_queries + Rows * Units, *of_values = of_keys + Keys * Units;
    const int length = q_shape[2], seen = keys_shape[2], past = seen - length;
    const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane, group = lane >> 2;
    // The queries that see most keys begin.
    const int first = (gridDim.x - 1 - blockIdx.x) * Rows, b = blockIdx.y / Hq, head = blockIdx.y % Hq;
    // The place of a row's unit of 16 bytes depends on the row, so that a matrix's rows lie in different banks.
    auto place = [&](int row, int unit) { return row * Units + (unit ^ (row & 7)); };
    auto stage = [&](uint4* to, const T* from, long row_stride, long stride, int rows, int left) {
        const bool aligned = stride == 1 && row_stride % 8 == 0 && size_t(from) % 16 == 0;
        for (int p = thread; p < rows * Units; p += Threads) {
            const int row = p / Units, unit = p % Units;
            const bool there = row < left;
            const T* start = from + (there ? row * row_stride + unit * 8 * stride : 0);
            uint4* own = to + place(row, unit);
            if (stride == 1) copy(own, start, there, aligned);
            else for (int i = 0; i < 8; ++i)
                reinterpret_cast<T*>(own)[i] = there ? start[i * stride] : static_cast<T>(0.0f);
        }
        end_of_copies();
    };
    const int kv = head / (Hq / Hk);
    const T* own_keys = keys + b * keys_strides[0] + kv * keys_strides[1];
    const T* own_values = values + b * values_strides[0] + kv * values_strides[1];
    auto stage_keys = [&](int from) {
        const T* start = own_keys + from * keys_strides[2];
        stage(of_keys, start, keys_strides[2], keys_strides[3], Keys, seen - from);
    };
    auto stage_values = [&](int from) {
        const T* start = own_values + from * values_strides[2];
        stage(of_values, start, values_strides[2], values_strides[3], Keys, seen - from);
    };
    const int last = first + Rows < length ? first + Rows : length, end = Causal ? past + last : seen;
    const T* own_queries = q + b * q_strides[0] + head * q_strides[1] + first * q_strides[2];
    stage(of_queries, own_queries, q_strides[2], q_strides[3], Rows, length - first);
    stage_keys(0);
    stage_values(0);

    float sums[D / 8][4], most[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int j = 0; j < D / 8; ++j)
        for (int r = 0; r < 4; ++r) sums[j][r] = 0.0f;
    const int own_row = first + warp * 16 + group;  // and the eighth after it
    for (int from = 0; from < end; from += Keys) {
        float scores[Tiles][4];
        for (int j = 0; j < Tiles; ++j)
            for (int r = 0; r < 4; ++r) scores[j][r] = 0.0f;
        wait_for_copies<1>();
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            unsigned a[4], two[4];
            load_matrices(a, of_queries + place(warp * 16 + (lane & 15), k * 2 + (lane >> 4)));
            #pragma unroll
            for (int j = 0; j < Tiles; j += 2) {
                load_matrices(two, of_keys + place(j * 8 + (lane & 7) + (lane >> 4) * 8, k * 2 + (lane >> 3 & 1)));
                multiply(scores[j], a[0], a[1], a[2], a[3], two[0], two[1]);
                multiply(scores[j + 1], a[0], a[1], a[2], a[3], two[2], two[3]);
            }
        }
        __syncthreads();
        if (from + Keys < end) stage_keys(from + Keys);
        else end_of_copies();

        if (Masked || from + Keys > seen || (Causal && from + Keys > past + first + warp * 16 + 1)) {
            #pragma unroll
            for (int j = 0; j < Tiles; ++j)
                for (int r = 0; r < 4; ++r) {
                    const int key = from + j * 8 + (lane & 3) * 2 + (r & 1), row = own_row + (r >> 1) * 8;
                    bool is_seen = key < seen && (!Causal || key <= past + row);
                    if (Masked && is_seen && row < length) {
                        const int own = (mask_shape[0] > 1 ? b : 0) * mask_shape[1] + (mask_shape[1] > 1 ? head : 0);
                        is_seen = mask[(size_t(own) * length + row) * seen + key];
                    }
                    if (!is_seen) scores[j][r] = -INFINITY;
                }
        }
        bool is_kept = true;
        float kept[2];
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float new_most = most[h];
            for (int j = 0; j < Tiles; ++j)
                new_most = fmaxf(new_most, fmaxf(scores[j][h * 2], scores[j][h * 2 + 1]) * LOG2_SCALE);
            new_most = fmaxf(new_most, __shfl_xor_sync(0xffffffffu, new_most, 1));
            new_most = fmaxf(new_most, __shfl_xor_sync(0xffffffffu, new_most, 2));
            const float base = new_most == -INFINITY ? 0.0f : new_most;
            kept[h] = exp2f(most[h] - base);
            is_kept = is_kept && new_most == most[h];
            most[h] = new_most;
            total[h] *= kept[h];
            for (int j = 0; j < Tiles; ++j)
                for (int r = h * 2; r < h * 2 + 2; ++r) {
                    scores[j][r] = exp2f(scores[j][r] * LOG2_SCALE - base);
                    total[h] += scores[j][r];
                }
        }
        if (!__all_sync(0xffffffffu, is_kept))
            #pragma unroll
            for (int j = 0; j < D / 8; ++j)
                for (int r = 0; r < 4; ++r) sums[j][r] *= kept[r >> 1];

        wait_for_copies<1>();
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < Tiles; k += 2) {
            unsigned a[4], two[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = pair_of(scores[k + i / 2][i % 2 * 2], scores[k + i / 2][i % 2 * 2 + 1]);
            #pragma unroll
            for (int j = 0; j < D / 8; j += 2) {
                load_transposed(two, of_values + place(k * 8 + (lane & 15), j + (lane >> 4)));
                multiply(sums[j], a[0], a[1], a[2], a[3], two[0], two[1]);
                multiply(sums[j + 1], a[0], a[1], a[2], a[3], two[2], two[3]);
            }
        }
        __syncthreads();
        if (from + Keys < end) stage_values(from + Keys);
        else end_of_copies();
    }
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = total[h] + __shfl_xor_sync(0xffffffffu, total[h], 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = own_row + h * 8;
        if (row >= length) continue;
        const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
        unsigned* to = reinterpret_cast<unsigned*>(y + ((size_t(b) * length + row) * Hq + head) * D);
        for (int j = 0; j < D / 8; ++j)
            to[j * 4 + (lane & 3)] = pair_of(sums[j][h * 2] * factor, sums[j][h * 2 + 1] * factor);
    }
"""

_PAIR = """
__device__ __forceinline__ unsigned pair_of(float a, float b) {
    const PAIR pair = FROM_FLOATS(a, b);
    return *reinterpret_cast<const unsigned*>(&pair);
}
"""


def is_supported(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None, sinks: mx.array | None) -> bool:
    """Return whether the kernel computes this attention; see `attend` for the shapes."""
    if q.ndim != 4 or sinks is not None or q.shape[2] < MIN_QUERIES or q.shape[-1] not in HEAD_DIMS:
        return False
    if not q.dtype == k.dtype == v.dtype or q.dtype not in few_rows_kernel.NAMES:
        return False
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        return False
    if not isinstance(mask, mx.array):
        return mask in (None, "causal") and k.shape[2] >= q.shape[2]
    if mask.dtype != mx.bool_ or not 2 <= mask.ndim <= 4 or mask.shape[-2:] != (q.shape[2], k.shape[2]):
        return False
    given = ((1,) * (4 - mask.ndim) + mask.shape)[:2]
    return all(size in (1, whole) for size, whole in zip(given, q.shape[:2], strict=True))


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """Return the attention [B, Hq, L, D] in the dtype of q; 0 for a query that sees no key.

    Args:
        q: Queries [B, Hq, L, D].
        k: Keys [B, Hk, K, D].
        v: Values [B, Hk, K, D].
        scale: Of the scores.
        mask: Bool [B or 1, Hq or 1, L, K] or the last axes of it, true where a query sees a key; or "causal": query
            i sees the keys up to K - L + i; None: all keys.
    """
    batch, heads, length, head_dim = q.shape
    if isinstance(mask, mx.array):
        kind, whole = "masked", mx.contiguous(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
    else:
        kind, whole = mask, mx.ones((1, 1, 1, 1), mx.bool_)
    warps = WARPS["large" if length > 16 * WARPS["small"] and _has_large_blocks() else "small"]
    constants = {"D": head_dim, "Hq": heads, "Hk": k.shape[1], "Keys": KEYS, "Warps": warps}
    (y,) = _kernel(q.dtype, scale, head_dim, warps)(
        inputs=[q, k, v, whole],
        template=[
            ("T", q.dtype),
            *constants.items(),
            ("Causal", kind == "causal"),
            ("Masked", kind == "masked"),
        ],
        grid=(32 * -(-length // (16 * warps)), warps * batch * heads, 1),
        threadgroup=(32, warps, 1),
        output_shapes=[(batch, length, heads, head_dim)],
        output_dtypes=[q.dtype],
    )
    return y.transpose(0, 2, 1, 3)


def _has_large_blocks() -> bool:
    """Return whether a block may have 128 KiB of shared memory; those of capability 8.6, 8.9 and 12.0 have 99."""
    device = mx.device_info()
    return tuple(int(device.get(f"compute_capability_{part}", 0)) for part in ("major", "minor")) in LARGE_DEVICES


@cache
def _kernel(dtype: mx.Dtype, scale: float, head_dim: int, warps: int) -> CudaKernel:
    pair = _PAIR
    for name, meaning in few_rows_kernel.PAIRS[dtype].items():
        pair = pair.replace(name, meaning)
    # exp2 takes less time than exp.
    factor = f"constexpr float LOG2_SCALE = {scale * 1.4426950408889634!r}f;\n"
    return CudaKernel(
        name=f"prompt_attention_{few_rows_kernel.NAMES[dtype]}",
        input_names=["q", "keys", "values", "mask"],
        output_names=["y"],
        header=_MATRICES + row_tiles_kernel.HEADER + few_rows_kernel.header(dtype) + pair + factor,
        source=short(_SOURCE),
        shared_memory=(16 * warps + 2 * KEYS) * head_dim * 2,
        are_contiguous=False,
    )


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **others: Any,
) -> mx.array:
    """Stand for `mx.fast.scaled_dot_product_attention`."""
    if others or not is_supported(q, k, v, mask, sinks):
        return _library(q, k, v, scale=scale, mask=mask, sinks=sinks, **others)
    return attend(q, k, v, scale, mask)


def install() -> None:
    """Replace MLX's function; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        mx.fast.scaled_dot_product_attention = attention  # type: ignore[assignment]
