"""Products of 2 to 32 rows with weights of 16 bits on CUDA, by a kernel that is cheap to launch.

MLX 0.32.4 multiplies one row by a kernel of its own, and more rows by cuBLAS: for each product of each step it asks
cuBLAS for an algorithm, and captures the launch as a graph within the step's graph. On an H200 that takes the host
30 us, longer than the device takes to read most weights. This kernel is one node of the step's graph (15 us), and the
result of a row depends on its own values alone, not on the rows beside it. With 64 rows it takes the device twice as
long as cuBLAS, and steps were slower. It can be removed when the library keeps cuBLAS's choices, or has such a kernel.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

MAX_ROWS = 32
"""More rows are multiplied by the library."""
MANY_OUTPUTS = 65536
"""Weights with at least this many outputs are multiplied by the kernel for at most ROWS rows: reading them takes longer
than launching cuBLAS."""
ROWS, OUTPUTS, COLUMNS = 16, 8, 32
"""A tile's number of rows, of outputs, and of the input's features. The library multiplies inputs whose number of
features is not a multiple of COLUMNS."""
WARPS = 8
"""Warps per block. Each warp sums over its share of the features; the block then adds the warps' sums in a fixed order,
so that the result does not depend on timing."""
SIZES = {"Warps": WARPS, "OutTiles": 4, "Ahead": 2}
"""Template arguments of the kernel: OutTiles is the number of output tiles of a block, Ahead the number of steps whose
weights a warp loads in advance. The fastest of ten choices on an H200, for 16 and 32 rows and weights of 2560 x 4096,
2560 x 9216, 9216 x 2560 and 248320 x 2560."""

SOURCE = """
    // Tiles of 16 rows x 8 outputs by mma.m16n8k16. Of 32 columns a lane loads 8 neighbours of a row, which serve two
    // products: which columns a product adds up does not matter as long as both operands agree.
    const int rows = x_shape[0], columns = x_shape[1], outputs = w_shape[0];
    const int lane = threadIdx.x, warp = threadIdx.y, group = lane >> 2, part = (lane & 3) * 8;
    const int chunks = columns / 32, first = blockIdx.x * (8 * OutTiles);
    const bool aligned = ((reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(w)) & 15) == 0;
    auto load = [&](const T* from) {
        if (aligned) return __ldcs(reinterpret_cast<const uint4*>(from));
        uint4 loaded;
        for (int i = 0; i < 8; ++i) reinterpret_cast<T*>(&loaded)[i] = from[i];
        return loaded;
    };
    auto load_x = [&](const T* from) {
        if (aligned) return __ldg(reinterpret_cast<const uint4*>(from));
        return load(from);
    };
    const uint4 zeros = {0u, 0u, 0u, 0u};
    float sums[RowTiles][OutTiles][4];
    for (int i = 0; i < RowTiles; ++i)
        for (int j = 0; j < OutTiles; ++j)
            for (int r = 0; r < 4; ++r) sums[i][j][r] = 0.0f;
    for (int start = warp; start < chunks; start += Warps * Ahead) {
        uint4 b[Ahead][OutTiles];
        #pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            const int chunk = start + u * Warps;
            #pragma unroll
            for (int j = 0; j < OutTiles; ++j) {
                const int output = first + j * 8 + group;
                const bool there = chunk < chunks && output < outputs;
                b[u][j] = there ? load(w + size_t(output) * columns + chunk * 32 + part) : zeros;
            }
        }
        #pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            const int chunk = start + u * Warps;
            const bool there = chunk < chunks;
            #pragma unroll
            for (int i = 0; i < RowTiles; ++i) {
                const int row = i * 16 + group;
                const T* from = x + size_t(row) * columns + chunk * 32 + part;
                const uint4 upper = there && row < rows ? load_x(from) : zeros;
                const uint4 lower = there && row + 8 < rows ? load_x(from + size_t(8) * columns) : zeros;
                #pragma unroll
                for (int j = 0; j < OutTiles; ++j) {
                    multiply(sums[i][j], upper.x, lower.x, upper.y, lower.y, b[u][j].x, b[u][j].y);
                    multiply(sums[i][j], upper.z, lower.z, upper.w, lower.w, b[u][j].z, b[u][j].w);
                }
            }
        }
    }
    // The second half of the warps hands its sums to the first, which then adds up one output per thread.
    constexpr int Half = Warps / 2, Sums = RowTiles * OutTiles * 4;
    __shared__ float shared[Half][Sums][32];
    if (warp >= Half)
        for (int s = 0; s < Sums; ++s) shared[warp - Half][s][lane] = sums[s / (4 * OutTiles)][s / 4 % OutTiles][s % 4];
    __syncthreads();
    if (warp < Half)
        for (int s = 0; s < Sums; ++s) shared[warp][s][lane] += sums[s / (4 * OutTiles)][s / 4 % OutTiles][s % 4];
    __syncthreads();
    for (int s = warp; s < Sums; s += Warps) {
        const int i = s / (4 * OutTiles), j = s / 4 % OutTiles, r = s % 4;
        const int row = i * 16 + group + (r >= 2 ? 8 : 0), output = first + j * 8 + (lane & 3) * 2 + (r & 1);
        float sum = 0.0f;
        for (int h = 0; h < Half; ++h) sum += shared[h][s][lane];
        if (row < rows && output < outputs) y[size_t(row) * outputs + output] = static_cast<T>(sum);
    }
"""

_MULTIPLY = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__device__ __forceinline__ void multiply(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""

_NAMES = {mx.bfloat16: "bf16", mx.float16: "f16"}

_library_call: Any = nn.Linear.__call__
_library_as_linear: Any = nn.Embedding.as_linear


def is_supported(x: mx.array, weight: mx.array) -> bool:
    """Return whether the kernel computes x [..., in] times weight [out, in]."""
    size, most = x.shape[-1], MAX_ROWS if weight.shape[0] < MANY_OUTPUTS else ROWS
    return x.dtype in _NAMES and weight.dtype == x.dtype and size % COLUMNS == 0 and size < x.size <= most * size


def product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x [..., in] times the transposed weight [out, in], both in bfloat16 or float16: [..., out].

    Sums are float32. `is_supported` says which arrays are allowed.
    """
    size, outputs = x.shape[-1], weight.shape[0]
    rows = x.size // size
    y = _kernel(_NAMES[x.dtype])(
        inputs=[x.reshape(rows, size), weight],
        template=[("T", x.dtype), ("RowTiles", -(-rows // ROWS)), *SIZES.items()],
        grid=(32 * -(-outputs // (OUTPUTS * SIZES["OutTiles"])), WARPS, 1),
        threadgroup=(32, WARPS, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )[0]
    return y.reshape(*x.shape[:-1], outputs)


@cache
def _kernel(name: str) -> Any:
    return mx.fast.cuda_kernel(
        name=f"few_rows_{name}",
        input_names=["x", "w"],
        output_names=["y"],
        header=_MULTIPLY.replace("TYPE", name),
        source=SOURCE,
    )


def linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Linear.__call__`."""
    if not is_supported(x, self["weight"]):
        return _library_call(self, x)
    y = product(x, self["weight"])
    return y + self["bias"] if "bias" in self else y


def as_linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Embedding.as_linear`."""
    return product(x, self.weight) if is_supported(x, self.weight) else _library_as_linear(self, x)


def install() -> None:
    """Replace the library's methods; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        nn.Linear.__call__ = linear
        nn.Embedding.as_linear = as_linear
