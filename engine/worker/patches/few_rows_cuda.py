"""Products of few rows with weights of 16 bits on CUDA, by a kernel that is cheap to launch.

MLX 0.32.4 multiplies one row by a kernel of its own, and more rows by cuBLAS: for each product of each step it asks
cuBLAS for an algorithm, and captures the launch as a graph within the step's graph. On an H200 that takes the host
30 us, longer than the device takes to read most weights. This kernel is one node of the step's graph (15 us), and the
result of a row depends on its own values alone, not on the rows beside it. It also multiplies the same rows by several
weights at once, normalizes rows of bfloat16 before, computes the gated half of an MLP, and adds a product to something.
With 64 rows it takes the device twice as long as cuBLAS, and steps were slower. It can be removed when the library
keeps cuBLAS's choices, or has such a kernel.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.activations import swiglu

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
NARROW = 4096
"""Weights of at most this many outputs are divided into more blocks: otherwise many processors would have none."""

SOURCE = """
    // Tiles of 16 rows x 8 outputs by mma.m16n8k16. Of 32 columns a lane loads 8 neighbours of a row, which serve two
    // products: which columns a product adds up does not matter as long as both operands agree.
    const int rows = x_shape[0], columns = x_shape[1];
    const int lane = threadIdx.x, warp = threadIdx.y, group = lane >> 2, part = (lane & 3) * 8;
    // All of a block's tiles are of one weight; with a gate the first half is of the gate, the second of `up`.
    constexpr int Own = Gated ? OutTiles / 2 : OutTiles;
    const int chunks = columns / 32, first = block * (8 * Own);
    const bool aligned = (size_t(x) | size_t(w) | size_t(up) | size_t(norm)) % 16 == 0;
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
    float squares[RowTiles][2] = {};
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
                const int output = first + j % Own * 8 + group;
                const bool there = chunk < chunks && output < outputs;
                b[u][j] = there ? load((j < Own ? w : up) + size_t(output) * columns + chunk * 32 + part) : zeros;
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
                uint4 upper = there && row < rows ? load_x(from) : zeros;
                uint4 lower = there && row + 8 < rows ? load_x(from + size_t(8) * columns) : zeros;
                if (Normed && there) {
                    const uint4 factors = load_x(norm + chunk * 32 + part);
                    squares[i][0] += scaled(upper, factors);
                    if (i * 16 + 8 < rows) squares[i][1] += scaled(lower, factors);
                }
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
    __shared__ float shared_squares[Warps][RowTiles * 16];
    if (Normed)
        for (int i = 0; i < RowTiles * 2; ++i) {
            float sum = squares[i / 2][i % 2];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if ((lane & 3) == 0) shared_squares[warp][i * 8 + group] = sum;
        }
    if (warp >= Half)
        for (int s = 0; s < Sums; ++s) shared[warp - Half][s][lane] = sums[s / (4 * OutTiles)][s / 4 % OutTiles][s % 4];
    __syncthreads();
    if (warp < Half)
        for (int s = 0; s < Sums; ++s) shared[warp][s][lane] += sums[s / (4 * OutTiles)][s / 4 % OutTiles][s % 4];
    __syncthreads();
    auto total = [&](int s) {
        float sum = 0.0f;
        for (int h = 0; h < Half; ++h) sum += shared[h][s][lane];
        return sum;
    };
    for (int s = warp; s < RowTiles * Own * 4; s += Warps) {
        const int i = s / (4 * Own), j = s / 4 % Own, r = s % 4, at = (i * OutTiles + j) * 4 + r;
        const int row = i * 16 + group + (r >= 2 ? 8 : 0), output = first + j * 8 + (lane & 3) * 2 + (r & 1);
        float factor = 1.0f;
        if (Normed) {
            float sum = 0.0f;
            for (int w = 0; w < Warps; ++w) sum += shared_squares[w][row];
            factor = rsqrtf(sum / columns + EPS);
        }
        float sum = total(at) * factor;
        if (Gated) sum = sum / (1.0f + expf(-sum)) * total(at + 4 * Own) * factor;
        if (row >= rows || output >= outputs) continue;
        const size_t place = size_t(row) * outputs + output;
        if (Added) sum += static_cast<float>(added[place]);
        y[place] = static_cast<T>(sum);
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
// Multiply eight bfloat16 by factors; return the sum of their squares before.
__device__ __forceinline__ float scaled(uint4& x, const uint4& factors) {
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&x);
    const __nv_bfloat162* by = reinterpret_cast<const __nv_bfloat162*>(&factors);
    float squares = 0.0f;
    for (int i = 0; i < 4; ++i) {
        const float2 a = __bfloat1622float2(pairs[i]);
        squares += a.x * a.x + a.y * a.y;
        pairs[i] = __hmul2(pairs[i], by[i]);
    }
    return squares;
}
"""

_NAMES = {mx.bfloat16: "bf16", mx.float16: "f16"}

_library_call: Any = nn.Linear.__call__
_library_as_linear: Any = nn.Embedding.as_linear


def is_supported(x: mx.array, weight: mx.array) -> bool:
    """Return whether the kernel computes x [..., in] times weight [out, in]."""
    size, most = x.shape[-1], MAX_ROWS if weight.shape[0] < MANY_OUTPUTS else ROWS
    return x.dtype in _NAMES and weight.dtype == x.dtype and size % COLUMNS == 0 and x.size <= most * size


def _are_supported(x: mx.array, layers: Sequence[Any]) -> bool:
    """Return whether the kernel is installed and computes x [..., in] times the weights of the layers."""
    plain = nn.Linear.__call__ is linear and all(type(layer) is nn.Linear and "bias" not in layer for layer in layers)
    return plain and all(is_supported(x, layer.weight) for layer in layers)


def product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x [..., in] times the transposed weight [out, in], both in bfloat16 or float16: [..., out].

    Sums are float32. `is_supported` says which arrays are allowed.
    """
    return _multiply(x, [weight])[0]


def products(layers: Sequence[Any], x: mx.array, norm: Any = None) -> list[mx.array]:
    """Apply up to four layers to x [..., in], by one kernel if all are linear, without a bias, and supported.

    Args:
        layers: The layers.
        x: Their input.
        norm: A norm that is applied to x first; None for nothing.
    """
    if not _are_supported(x, layers):
        x = x if norm is None else norm(x)
        return [layer(x) for layer in layers]
    return _multiply(x, [layer.weight for layer in layers], norm=norm)


def gated(gate: Any, up: Any, x: mx.array, norm: Any = None) -> mx.array:
    """Return silu(gate(x)) * up(x), by one kernel if both layers are linear, without a bias, and supported.

    A `norm` is applied to x first.
    """
    if not _are_supported(x, (gate, up)):
        x = x if norm is None else norm(x)
        return swiglu(gate(x), up(x))
    return _multiply(x, [gate.weight, up.weight], form="gated", norm=norm)[0]


def added(to: mx.array, layer: Any, x: mx.array) -> mx.array:
    """Return to [..., out] + layer(x), by one kernel if the layer is linear, without a bias, and supported."""
    if to.dtype != x.dtype or to.shape[:-1] != x.shape[:-1] or not _are_supported(x, (layer,)):
        return to + layer(x)
    return _multiply(x, [layer.weight], to, form="added")[0]


Form = Literal["plain", "gated", "added"]


def _tiles(num_outputs: int, num_rows: int, form: Form) -> dict[str, int]:
    """Return the output tiles of a block, and the number of steps whose weights a warp loads in advance.

    Measured on an H200 with 1, 4, 16 and 32 rows and the weights of Qwen3.5-4B. A row's result does not depend on them.
    """
    if num_outputs <= NARROW and form != "gated":  # which has at least a tile of each half
        tiles, ahead = (1, 8) if num_rows <= ROWS else (2, 4)
    elif num_outputs >= MANY_OUTPUTS:
        tiles, ahead = 4, 1
    else:
        tiles, ahead = (2 if num_rows <= ROWS else 4), 2
    return {"OutTiles": tiles, "Ahead": ahead}


def _multiply(
    x: mx.array, weights: Sequence[mx.array], *others: mx.array, form: Form = "plain", norm: Any = None
) -> list[mx.array]:
    """Return x [..., in] times each of the transposed weights [out, in], as `products`, `gated` or `added` say."""
    size = x.shape[-1]
    rows, num_outputs = x.size // size, [weight.shape[0] for weight in weights[: 1 if form == "gated" else None]]
    tiles = _tiles(sum(num_outputs) * (2 if form == "gated" else 1), rows, form)
    per_block = OUTPUTS * tiles["OutTiles"] // (2 if form == "gated" else 1)
    eps = None
    if rows <= ROWS and type(norm) is nn.RMSNorm and norm.weight.dtype == x.dtype == mx.bfloat16:
        eps, others = norm.eps, (*others, norm.weight)  # float16 might not hold a value before it is normalized
    elif norm is not None:
        x = norm(x)
    return _kernel(_NAMES[x.dtype], len(weights), form, eps)(
        inputs=[x.reshape(rows, size), *weights, *others],
        template=[("T", x.dtype), ("RowTiles", -(-rows // ROWS)), ("Warps", WARPS), *tiles.items()],
        grid=(32 * sum(-(-num // per_block) for num in num_outputs), WARPS, 1),
        threadgroup=(32, WARPS, 1),
        output_shapes=[(*x.shape[:-1], num) for num in num_outputs],
        output_dtypes=[x.dtype] * len(num_outputs),
    )


@cache
def _kernel(dtype: str, num_weights: int, form: Form, eps: float | None) -> Any:
    """Return the kernel; its first lines find the weight that a block multiplies by, `w`, and that of `up`."""
    num_results = 1 if form == "gated" else num_weights
    flags = {"Gated": form == "gated", "Added": form == "added", "Normed": eps is not None}
    lines = [
        f"constexpr bool {', '.join(f'{name} = {str(value).lower()}' for name, value in flags.items())};",
        f"constexpr float EPS = {eps or 0.0!r}f;",
        "int block = blockIdx.x, outputs = w0_shape[0];",
        f"const T *w = w0, *up = {'w1' if form == 'gated' else 'w0'};",
        f"const T *added = {'other' if form == 'added' else 'nullptr'}, *norm = {'nullptr' if eps is None else 'by'};",
        "T* y = y0;",
    ]
    for i in range(1, num_results):
        blocks = f"(w{i - 1}_shape[0] + 8 * OutTiles - 1) / (8 * OutTiles)"
        lines.append(f"if (y == y{i - 1} && block >= {blocks}) {{")
        lines.append(f"block -= {blocks}; w = up = w{i}; y = y{i}; outputs = w{i}_shape[0]; }}")
    others = [*(["other"] if form == "added" else []), *([] if eps is None else ["by"])]
    return mx.fast.cuda_kernel(
        name=f"few_rows_{dtype}_{num_weights}_{form}{'' if eps is None else '_normed'}",
        input_names=["x", *(f"w{i}" for i in range(num_weights)), *others],
        output_names=[f"y{i}" for i in range(num_results)],
        header=_MULTIPLY.replace("TYPE", dtype),
        source=short("\n".join(lines) + SOURCE),
    )


def short(source: str) -> str:
    """Return a kernel's source without comments and indentation: MLX hashes it at each launch."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Linear.__call__`."""
    if _is_for_library(x, self["weight"]):
        return _library_call(self, x)
    y = product(x, self["weight"])
    return y + self["bias"] if "bias" in self else y


def as_linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Embedding.as_linear`."""
    return _library_as_linear(self, x) if _is_for_library(x, self.weight) else product(x, self.weight)


def _is_for_library(x: mx.array, weight: mx.array) -> bool:
    """Return whether the library computes the product: also that of one row, unless it gives logits.

    The library has a kernel for one row, which rounds differently: a row's logits must not depend on others.
    """
    return not is_supported(x, weight) or (x.size == x.shape[-1] and weight.shape[0] < MANY_OUTPUTS)


def install() -> None:
    """Replace the library's methods; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        nn.Linear.__call__ = linear
        nn.Embedding.as_linear = as_linear
