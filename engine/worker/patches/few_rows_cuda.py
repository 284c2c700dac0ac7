"""Products of few rows with weights of 16, 8 and 4 bits on CUDA, by a kernel that is cheap to launch.

MLX 0.32.4 multiplies one row by a kernel of its own, and more rows by cuBLAS: for each product of each step it asks
cuBLAS for an algorithm, and captures the launch as a graph within the step's graph. On an H200 that takes the host
30 us, longer than the device takes to read most weights. This kernel is one node of the step's graph (15 us), and the
result of a row depends on its own values alone, not on the rows beside it (behind a norm with up to ROWS rows, as more
are normalized by the library). It also multiplies the same rows by several
weights at once, normalizes rows of bfloat16 before, computes the gated half of an MLP, and adds a product to something.
With 64 rows it takes the device twice as long as cuBLAS, and steps were slower. Weights of 4 and 8 bits are expanded
to 16 in registers; the library's kernel for several rows takes the device two to seven times as long, except for the
output layer. It can be removed when the library keeps cuBLAS's choices, or has such a kernel.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.activations import swiglu

from engine.worker.cuda_kernel import CudaKernel

MAX_ROWS = 32
"""More rows are multiplied by the library, with quantized weights expanded before (quantized_cuda.py)."""
MANY_OUTPUTS = 65536
"""Weights of 16 bits with at least this many outputs are multiplied by the kernel for at most ROWS rows: reading them
takes longer than launching cuBLAS."""
MAX_SIZE = 2**31
"""The library multiplies by weights with at least this many numbers: the kernel computes their places in 32 bits."""
ROWS, OUTPUTS, COLUMNS = 16, 8, 32
"""A tile's number of rows, of outputs, and of the input's features. The library multiplies inputs whose number of
features is not a multiple of COLUMNS."""
UNQUANTIZED, QUANTIZED_BITS = 16, (4, 8)
"""Bits of the weights' numbers."""
NARROW = 4096
"""Weights of at most this many outputs have blocks of fewer outputs and more warps: otherwise few processors would have
one."""

SOURCE = """
    // Tiles of 16 rows x 8 outputs by mma.m16n8k16. A lane loads 16 bytes of an output's weights: neighbours of a row,
    // which serve several products. Which columns a product adds up does not matter as long as both operands agree.
    constexpr int Own = Gated ? OutTiles / 2 : OutTiles, PerLane = 128 / Bits, PerWarp = 4 * PerLane;
    const int rows = x_shape[0], columns = x_shape[1];
    const int lane = threadIdx.x, warp = threadIdx.y, group = lane >> 2, part = (lane & 3) * PerLane;
    // All of a block's tiles are of one weight; with a gate the first half is of the gate, the second of `up`.
    const int chunks = (columns + PerWarp - 1) / PerWarp, first = block * (8 * Own);
    const int group_bits = Bits < 16 ? 31 - __clz(columns / groups) : 0;
    const bool aligned = (size_t(x) | size_t(w) | size_t(up_w) | size_t(norm)) % 16 == 0;
    auto load = [&](const void* from) {
        if (aligned) return __ldcs(static_cast<const uint4*>(from));
        uint4 loaded;
        for (int i = 0; i < 8; ++i)
            reinterpret_cast<unsigned short*>(&loaded)[i] = static_cast<const unsigned short*>(from)[i];
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
    uint4 b[Ahead][OutTiles];
    unsigned scale_and_bias[Ahead][OutTiles];
    auto fetch = [&](int u, int chunk) {
        const int column = chunk * PerWarp + part;
        #pragma unroll
        for (int j = 0; j < OutTiles; ++j) {
            const int output = first + j % Own * 8 + group;
            const bool there = column < columns && output < outputs;
            const unsigned at = unsigned(output) * columns + column;
            b[u][j] = there ? load((j < Own ? w : up_w) + (Bits < 8 ? at / 2 : at * (Bits / 8))) : zeros;
            if (Bits < 16) {
                const unsigned place = there ? at >> group_bits : 0;
                const unsigned bias = __ldg((j < Own ? biases : up_biases) + place);
                scale_and_bias[u][j] = __ldg((j < Own ? scales : up_scales) + place) | bias << 16;
            }
        }
    };
    // Eight features of each row: those of the next weights, or a few of them.
    constexpr int Eights = PerLane / 8, Next = Bits == 16 ? Ahead : 2;
    uint4 xs[Next][RowTiles][2], norms[Next];
    auto fetch_x = [&](int n, int chunk, int e) {
        const int column = chunk * PerWarp + part + e * 8;
        const bool there = column < columns;
        #pragma unroll
        for (int i = 0; i < RowTiles * 2; ++i) {
            const int row = i * 8 + group;
            xs[n][i / 2][i % 2] = there && row < rows ? load_x(x + row * columns + column) : zeros;
        }
        if (Normed) norms[n] = there ? load_x(norm + column) : zeros;
    };
    #pragma unroll
    for (int u = 0; u < Ahead; ++u) fetch(u, warp + u * Warps);
    #pragma unroll
    for (int n = 0; n < Next; ++n) fetch_x(n, warp + n / Eights * Warps, n % Eights);
    for (int start = warp; start < chunks; start += Warps * Ahead) {
        #pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            const int chunk = start + u * Warps;
            if (chunk >= chunks) break;
            #pragma unroll
            for (int e = 0; e < Eights; ++e) {
                const int n = (u * Eights + e) % Next;
                uint4 eight[OutTiles];
                #pragma unroll
                for (int j = 0; j < OutTiles; ++j) eight[j] = expanded<Bits>(b[u][j], e, scale_and_bias[u][j]);
                #pragma unroll
                for (int i = 0; i < RowTiles; ++i) {
                    uint4 &upper = xs[n][i][0], &lower = xs[n][i][1];
                    if (Normed) {
                        squares[i][0] += scaled(upper, norms[n]);
                        if (i * 16 + 8 < rows) squares[i][1] += scaled(lower, norms[n]);
                    }
                    upper = ordered<Bits>(upper);
                    lower = ordered<Bits>(lower);
                    #pragma unroll
                    for (int j = 0; j < OutTiles; ++j) {
                        multiply(sums[i][j], upper.x, lower.x, upper.y, lower.y, eight[j].x, eight[j].y);
                        multiply(sums[i][j], upper.z, lower.z, upper.w, lower.w, eight[j].z, eight[j].w);
                    }
                }
                fetch_x(n, chunk + (e + Next) / Eights * Warps, (e + Next) % Eights);
            }
            fetch(u, chunk + Warps * Ahead);
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

_HEADER = """
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
__device__ __forceinline__ PAIR as_pair(unsigned bits) { return *reinterpret_cast<PAIR*>(&bits); }
// Return the weights 8 e to 8 e + 7 of those that a lane has loaded, as four pairs.
template <int Bits>
__device__ __forceinline__ uint4 expanded(const uint4& loaded, int e, unsigned scale_and_bias) {
    if constexpr (Bits == 16) return loaded;
    const unsigned* words = reinterpret_cast<const unsigned*>(&loaded);
    const PAIR scale = as_pair(__byte_perm(scale_and_bias, 0u, 0x1010));
    const PAIR bias = as_pair(__byte_perm(scale_and_bias, 0u, 0x3232));
    uint4 result;
    for (int i = 0; i < 4; ++i) {
        PAIR two;
        if constexpr (Bits == 4) {  // numbers i and i + 4, in the last bits of a large number's digits
            two = __hsub2(as_pair(((words[e] >> (4 * i)) & 0x000f000fu) | MAGICu), as_pair(MAGICu));
        } else {
            const unsigned word = words[2 * e + i / 2];
            const float low = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i % 2 * 2)) - 8388608.0f;
            const float high = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + i % 2 * 2)) - 8388608.0f;
            two = FROM_FLOATS(low, high);
        }
        reinterpret_cast<PAIR*>(&result)[i] = __hfma2(two, scale, bias);
    }
    return result;
}
// Return eight features in the order of `expanded`.
template <int Bits>
__device__ __forceinline__ uint4 ordered(const uint4& x) {
    if constexpr (Bits != 4) return x;
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
            __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
}
"""

NAMES = {mx.bfloat16: "bf16", mx.float16: "f16"}
_PAIRS = {
    mx.bfloat16: {"PAIR": "__nv_bfloat162", "FROM_FLOATS": "__floats2bfloat162_rn", "MAGIC": "0x43004300"},
    mx.float16: {"PAIR": "__half2", "FROM_FLOATS": "__floats2half2_rn", "MAGIC": "0x64006400"},
}
"""CUDA's type of a pair of numbers, the function that makes one of two floats, and the bits of a pair of 128 or 1024,
whose last four digits may be replaced by a number of 4 bits: then that number is added."""

_library_call: Any = nn.Linear.__call__
_library_as_linear: Any = nn.Embedding.as_linear


class Weight(NamedTuple):
    """A layer's weight.

    Attributes:
        arrays: Numbers of 16 bits [out, in]; or, quantized, uint32 [out, in * bits / 32], and scales and biases
            [out, in / group_size].
        bits: Bits of a number.
    """

    arrays: tuple[mx.array, ...]
    bits: int = UNQUANTIZED

    @classmethod
    def of(cls, layer: Any) -> Self | None:
        """Return the weight of a linear layer or an embedding; None for one that no kernel multiplies by."""
        if type(layer) in (nn.Linear, nn.Embedding):
            return cls((layer.weight,))
        if type(layer) not in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            return None
        if layer.mode != "affine" or layer.bits not in QUANTIZED_BITS:
            return None
        return cls((layer.weight, layer.scales, layer.biases), layer.bits)

    @property
    def num_outputs(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def num_groups(self) -> int:
        """Number of scales of an output; 1 if the weight is not quantized."""
        return self.arrays[1].shape[1] if self.bits < UNQUANTIZED else 1

    @property
    def dtype(self) -> mx.Dtype:
        return self.arrays[-1].dtype


def is_supported(x: mx.array, weight: Weight) -> bool:
    """Return whether the kernel computes x [..., in] times the weight."""
    size, most = x.shape[-1], MAX_ROWS
    if weight.num_outputs >= MANY_OUTPUTS and weight.bits == UNQUANTIZED:
        most = ROWS
    is_form = x.dtype in NAMES and weight.dtype == x.dtype and size % COLUMNS == 0
    return is_form and x.size <= most * size and weight.num_outputs * size < MAX_SIZE


def weights_of_one_kernel(x: mx.array, layers: Sequence[Any]) -> list[Weight] | None:
    """Return the weights of the layers, if the kernel is installed and computes x [..., in] times all at once."""
    if not is_installed() or any("bias" in layer for layer in layers):
        return None
    found = [weight for weight in map(Weight.of, layers) if weight is not None and is_supported(x, weight)]
    are_alike = len({(weight.bits, weight.num_groups) for weight in found}) == 1
    return found if are_alike and len(found) == len(layers) else None


def product(x: mx.array, weight: Weight) -> mx.array:
    """Return x [..., in] times the transposed weight [out, in], x in bfloat16 or float16: [..., out].

    Sums are float32; a quantized weight is expanded to the dtype of x. `is_supported` says which arrays are allowed.
    """
    return _multiply(x, [weight])[0]


def products(layers: Sequence[Any], x: mx.array, norm: Any = None) -> list[mx.array]:
    """Apply up to four layers to x [..., in], by one kernel if all are linear, without a bias, alike and supported.

    Args:
        layers: The layers.
        x: Their input.
        norm: A norm that is applied to x first; None for nothing.
    """
    if (weights := weights_of_one_kernel(x, layers)) is None:
        x = x if norm is None else norm(x)
        return [layer(x) for layer in layers]
    return _multiply(x, weights, norm=norm)


def gated(gate: Any, up: Any, x: mx.array, norm: Any = None) -> mx.array:
    """Return silu(gate(x)) * up(x), by one kernel if both layers are linear, without a bias, alike and supported.

    A `norm` is applied to x first.
    """
    if (weights := weights_of_one_kernel(x, (gate, up))) is None:
        x = x if norm is None else norm(x)
        return swiglu(gate(x), up(x))
    return _multiply(x, weights, form="gated", norm=norm)[0]


def added(to: mx.array, layer: Any, x: mx.array) -> mx.array:
    """Return to [..., out] + layer(x), by one kernel if the layer is linear, without a bias, and supported."""
    weights = weights_of_one_kernel(x, (layer,))
    if weights is None or to.dtype != x.dtype or to.shape[:-1] != x.shape[:-1]:
        return to + layer(x)
    return _multiply(x, weights, to, form="added")[0]


Form = Literal["plain", "gated", "added"]


def _tiles(num_outputs: int, num_rows: int, bits: int, form: Form) -> dict[str, int]:
    """Return the output tiles of a block, the number of loads that a warp is ahead, and the number of warps.

    Measured on an H200 with 1, 4, 16 and 32 rows and the weights of Qwen3.5-4B. A row's result depends on the warps
    alone, which depend on the weights alone.
    """
    if num_outputs <= NARROW and form != "gated":  # a gated block has at least one tile of each half
        tiles, ahead, warps = (1, 2, 16) if bits == UNQUANTIZED else (2, 1, 16)
    elif num_outputs >= MANY_OUTPUTS and bits == UNQUANTIZED:
        tiles, ahead, warps = 4, 1, 8
    else:
        tiles, ahead, warps = (2 if num_rows <= ROWS and bits == UNQUANTIZED else 4), 2, 8
    return {"OutTiles": tiles, "Ahead": ahead, "Warps": warps}


def _multiply(
    x: mx.array, weights: Sequence[Weight], *others: mx.array, form: Form = "plain", norm: Any = None
) -> list[mx.array]:
    """Return x [..., in] times each of the transposed weights [out, in], as `products`, `gated` or `added` say."""
    size = x.shape[-1]
    rows, num_outputs = x.size // size, [weight.num_outputs for weight in weights[: 1 if form == "gated" else None]]
    bits = weights[0].bits
    tiles = _tiles(sum(num_outputs) * (2 if form == "gated" else 1), rows, bits, form)
    per_block = OUTPUTS * tiles["OutTiles"] // (2 if form == "gated" else 1)
    eps = None
    if rows <= ROWS and type(norm) is nn.RMSNorm and norm.weight.dtype == x.dtype == mx.bfloat16:
        eps, others = norm.eps, (*others, norm.weight)  # float16 might not hold a value before it is normalized
    elif norm is not None:
        x = norm(x)
    return _kernel(x.dtype, len(weights), bits < UNQUANTIZED, form, eps)(
        inputs=[x.reshape(rows, size), *(array for weight in weights for array in weight.arrays), *others],
        template=[("T", x.dtype), ("RowTiles", -(-rows // ROWS)), ("Bits", bits), *tiles.items()],
        grid=(32 * sum(-(-num // per_block) for num in num_outputs), tiles["Warps"], 1),
        threadgroup=(32, tiles["Warps"], 1),
        output_shapes=[(*x.shape[:-1], num) for num in num_outputs],
        output_dtypes=[x.dtype] * len(num_outputs),
    )


@cache
def _kernel(dtype: mx.Dtype, num_weights: int, is_quantized: bool, form: Form, eps: float | None) -> CudaKernel:
    """Return the kernel; its first lines find the weight that a block multiplies by, `w`, and that of `up`."""
    names = ("w", "scales", "biases") if is_quantized else ("w",)

    def chosen(name: str, i: int, up: int) -> str:
        """Return the lines that point to an array of weight i, and to that of `up`."""
        return f"{name} = (decltype({name})){name}{i}; up_{name} = (decltype({name})){name}{up};"

    num_results = 1 if form == "gated" else num_weights
    flags = {"Gated": form == "gated", "Added": form == "added", "Normed": eps is not None}
    lines = [
        f"constexpr bool {', '.join(f'{name} = {str(value).lower()}' for name, value in flags.items())};",
        f"constexpr float EPS = {eps or 0.0!r}f;",
        "int block = blockIdx.x, outputs = w0_shape[0];",
        "const char *w, *up_w;",
        f"const int groups = {'scales0_shape[1]' if is_quantized else 1};",
        "const unsigned short *scales = nullptr, *up_scales = nullptr, *biases = nullptr, *up_biases = nullptr;",
        *(chosen(name, 0, 1 if form == "gated" else 0) for name in names),
        f"const T *added = {'other' if form == 'added' else 'nullptr'}, *norm = {'nullptr' if eps is None else 'by'};",
        "T* y = y0;",
    ]
    for i in range(1, num_results):
        blocks = f"(w{i - 1}_shape[0] + 8 * OutTiles - 1) / (8 * OutTiles)"
        lines.append(f"if (y == y{i - 1} && block >= {blocks}) {{")
        lines += [
            f"block -= {blocks}; y = y{i}; outputs = w{i}_shape[0];",
            *(chosen(name, i, i) for name in names),
            "}",
        ]
    others = [*(["other"] if form == "added" else []), *([] if eps is None else ["by"])]
    kind = f"{NAMES[dtype]}{'_quantized' if is_quantized else ''}"
    return CudaKernel(
        name=f"few_rows_{kind}_{num_weights}_{form}{'' if eps is None else '_normed'}",
        input_names=["x", *(f"{name}{i}" for i in range(num_weights) for name in names), *others],
        output_names=[f"y{i}" for i in range(num_results)],
        header=header(dtype),
        source=short("\n".join(lines) + SOURCE),
    )


def header(dtype: mx.Dtype) -> str:
    """Return the functions that the kernels call."""
    source = _HEADER.replace("TYPE", NAMES[dtype])
    for name, meaning in _PAIRS[dtype].items():
        source = source.replace(name, meaning)
    return source


def short(source: str) -> str:
    """Return a kernel's source without comments and indentation: MLX hashes it at each launch."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Linear.__call__`."""
    weight = Weight((self["weight"],))
    if _is_for_library(x, weight):
        return _library_call(self, x)
    y = product(x, weight)
    return y + self["bias"] if "bias" in self else y


def as_linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Embedding.as_linear`."""
    weight = Weight((self.weight,))
    return _library_as_linear(self, x) if _is_for_library(x, weight) else product(x, weight)


def _is_for_library(x: mx.array, weight: Weight) -> bool:
    """Return whether the library computes the product: also that of one row, unless it gives logits.

    The library has a kernel for one row, which rounds differently: a row's logits must not depend on others.
    """
    return not is_supported(x, weight) or (x.size == x.shape[-1] and weight.num_outputs < MANY_OUTPUTS)


def is_installed() -> bool:
    """Return whether the device has the kernels."""
    return nn.Linear.__call__ is linear


def install() -> None:
    """Replace the library's methods; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        nn.Linear.__call__ = linear
        nn.Embedding.as_linear = as_linear
