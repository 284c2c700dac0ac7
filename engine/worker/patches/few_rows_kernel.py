"""The kernel for few rows on CUDA, in each of its forms, and those for many (many_rows.py).

few_rows_cuda.py says which products it computes, and why; experts_cuda.py those with the weights of experts. The
functions of its header are also called by the kernel that expands weights (quantized_cuda.py).
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import mlx.core as mx

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.patches.many_rows import Tiling

Form = Literal["plain", "gated", "added"]
PairGrouping = Literal["none", "gather", "scatter"]
"""How rows are multiplied by the weights of several experts: not at all, each pair of a row and an expert read from its
row and written to its place, or read from its place and written to its pair (experts_cuda.py)."""

_SOURCE = """
    // Tiles of 16 rows x 8 outputs by mma.m16n8k16. A lane loads 16 bytes of an output's weights: neighbours of a row,
    // which serve several products. Which columns a product adds up does not matter as long as both operands agree.
    constexpr int Own = Gated ? OutTiles / 2 : OutTiles, PerLane = 128 / Bits, PerWarp = 4 * PerLane;
    const int columns = x_shape[1];
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
    unsigned sources[RowTiles * 2];
    #pragma unroll
    for (int i = 0; i < RowTiles * 2; ++i)
        sources[i] = i * 8 + group < rows ? unsigned(source(i * 8 + group)) * columns : 0u;
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
            xs[n][i / 2][i % 2] = there && row < rows ? load_x(x + sources[i] + column) : zeros;
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
        const size_t place = size_t(target(row)) * outputs + output;
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
// Return weights 2 i and 2 i + 1 of eight of 4 bits. The mask of their bits is in a register, not in each instruction.
__device__ __forceinline__ unsigned two_of(unsigned word, int i, unsigned scale_and_bias, unsigned mask) {
    const PAIR scale = as_pair(__byte_perm(scale_and_bias, 0u, 0x1010));
    const PAIR bias = as_pair(__byte_perm(scale_and_bias, 0u, 0x3232));
    const unsigned two = __byte_perm(word, word >> 4, i | i << 4 | (4 + i) << 8 | (4 + i) << 12);
    const PAIR sum = __hfma2(__hsub2(as_pair(two & mask | MAGICu), as_pair(MAGICu)), scale, bias);
    return *reinterpret_cast<const unsigned*>(&sum);
}
// Return the weights of `expanded` in the order of the features.
template <int Bits>
__device__ __forceinline__ uint4 in_order(const uint4& loaded, int e, unsigned scale_and_bias, unsigned mask) {
    if constexpr (Bits != 4) return expanded<Bits>(loaded, e, scale_and_bias);
    const unsigned word = reinterpret_cast<const unsigned*>(&loaded)[e];
    return {two_of(word, 0, scale_and_bias, mask), two_of(word, 1, scale_and_bias, mask),
            two_of(word, 2, scale_and_bias, mask), two_of(word, 3, scale_and_bias, mask)};
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
PAIRS = {
    mx.bfloat16: {"PAIR": "__nv_bfloat162", "FROM_FLOATS": "__floats2bfloat162_rn", "MAGIC": "0x43004300"},
    mx.float16: {"PAIR": "__half2", "FROM_FLOATS": "__floats2half2_rn", "MAGIC": "0x64006400"},
}
"""CUDA's type of a pair of numbers, the function that makes one of two floats, and the bits of a pair of 128 or 1024,
whose last four digits may be replaced by a number of 4 bits: then that number is added."""


@cache
def kernel_of(
    dtype: mx.Dtype,
    num_weights: int,
    is_quantized: bool,
    form: Form,
    eps: float | None,
    grouping: PairGrouping = "none",
    is_sorted: bool = False,
    with_shared: bool = False,
    tiling: Tiling | None = None,
) -> CudaKernel:
    """Return the kernel; its first lines find the weight that a block multiplies by, `w`, and that of `up`.

    Args:
        dtype: Dtype of the rows and of the results.
        num_weights: Weights that the rows are multiplied by.
        is_quantized: Whether the weights have scales and biases.
        form: What is computed of the products.
        eps: The number that the norm before adds to the mean square; None without a norm.
        grouping: With experts a weight is [experts, out, in], and a block multiplies rows of one expert.
        is_sorted: Whether `order` and `tiles` say which pairs a block multiplies, or each has one of `experts`.
        with_shared: Whether further blocks multiply all tokens by the weights of an expert that all share.
        tiling: The kernel for many rows; None: the kernel is that for few rows.
    """
    names = ("w", "scales", "biases") if is_quantized else ("w",)

    def chosen(name: str, i: int, up: int) -> str:
        """Return the lines that point to an array of weight i, and to that of `up`."""
        return f"{name} = (decltype({name})){name}{i}; up_{name} = (decltype({name})){name}{up};"

    num_results = 1 if form == "gated" else num_weights
    axis = 0 if grouping == "none" else 1  # of the outputs
    flags = {"Gated": form == "gated", "Added": form == "added", "Normed": eps is not None}
    per_block = "8 * OutTiles" if tiling is None else str(tiling.num_outputs)
    lines = [
        f"constexpr bool {', '.join(f'{name} = {str(value).lower()}' for name, value in flags.items())};",
        f"constexpr float EPS = {eps or 0.0!r}f;",
        f"constexpr int PerBlock = {per_block};",
        f"int block = blockIdx.x, outputs = w0_shape[{axis}];",
        "const char *w, *up_w;",
        f"const int groups = {f'scales0_shape[{axis + 1}]' if is_quantized else 1};",
        "const unsigned short *scales = nullptr, *up_scales = nullptr, *biases = nullptr, *up_biases = nullptr;",
        *(chosen(name, 0, 1 if form == "gated" else 0) for name in names),
        f"const T *added = {'other' if form == 'added' else 'nullptr'}, *norm = {'nullptr' if eps is None else 'by'};",
        "T* y = y0;",
    ]
    for i in range(1, num_results):
        blocks = f"(w{i - 1}_shape[0] + PerBlock - 1) / PerBlock"
        lines.append(f"if (y == y{i - 1} && block >= {blocks}) {{")
        lines += [
            f"block -= {blocks}; y = y{i}; outputs = w{i}_shape[0];",
            *(chosen(name, i, i) for name in names),
            "}",
        ]
    lines += _rows_of_block(grouping, is_sorted, with_shared, names)
    others = [*(["other"] if form == "added" else []), *([] if eps is None else ["by"])]
    if grouping != "none":
        ends = ("shared", "up")[:num_weights] if with_shared else ()
        others = [*(f"{name}_{end}" for end in ends for name in names), *others]
        others += ["order", "tiles"] if is_sorted else ["experts"]
    kind = f"{NAMES[dtype]}{'_quantized' if is_quantized else ''}"
    group = (
        "" if grouping == "none" else f"_{grouping}{'_sorted' if is_sorted else ''}{'_shared' if with_shared else ''}"
    )
    kernel, functions, body = "few_rows", header(dtype), _SOURCE
    if tiling is not None:
        kernel, functions, body = tiling.name, _of_dtype(tiling.functions, dtype) + functions, tiling.source
    return CudaKernel(
        name=f"{kernel}_{kind}_{num_weights}_{form}{'' if eps is None else '_normed'}{group}",
        input_names=["x", *(f"{name}{i}" for i in range(num_weights) for name in names), *others],
        output_names=[f"y{i}" for i in range(num_results)],
        header=functions,
        source=short("\n".join(lines) + body),
        shared_memory=0 if tiling is None else tiling.shared_bytes,
    )


def _rows_of_block(
    grouping: PairGrouping, is_sorted: bool, with_shared: bool, weight_names: Sequence[str]
) -> list[str]:
    """Return the lines that say which rows a block multiplies, and move its weights to those of its expert."""
    if grouping == "none":
        same = "[&](int row) { return begin + row; };"
        begin = "const int begin = blockIdx.y * (16 * RowTiles), left = x_shape[0] - begin;"
        rows = "const int rows = left < 16 * RowTiles ? left : 16 * RowTiles;"
        return [begin, rows, f"auto source = {same}", f"auto target = {same}"]
    pairs, slots = ("order_shape[0]", "tiles_shape[0]") if is_sorted else ("experts_shape[0]", "experts_shape[0]")
    lines = [f"const int slot = blockIdx.y, pairs = {pairs};", "int expert = 0, begin = slot, rows = 1;"]
    lines.append(f"const bool is_chosen = slot < {slots};")
    if is_sorted:
        lines.append(
            "if (is_chosen) { expert = tiles[3 * slot]; begin = tiles[3 * slot + 1]; rows = tiles[3 * slot + 2]; }"
        )
    else:
        lines.append("if (is_chosen) expert = experts[slot];")
    if with_shared:
        tokens = "x_shape[0]" if grouping == "gather" else "x_shape[0] - pairs"
        lines += [
            "if (!is_chosen) {",
            f"begin = (slot - {slots}) * (16 * RowTiles);",
            f"rows = {tokens} - begin < 16 * RowTiles ? {tokens} - begin : 16 * RowTiles;",
            *(f"{name} = (decltype({name})){name}_shared;" for name in weight_names),
            *(
                f"up_{name} = (decltype({name})){name}_{'up' if grouping == 'gather' else 'shared'};"
                for name in weight_names
            ),
            "}",
        ]
    lines += ["if (rows == 0) return;", "const size_t skipped = size_t(expert) * outputs;"]
    for name in weight_names:
        size = "x_shape[1] * Bits / 8" if name == "w" else "groups"
        lines.append(f"{name} += skipped * {size}; up_{name} += skipped * {size};")
    pair, place = "order[begin + row]" if is_sorted else "begin", "is_chosen ? begin + row : pairs + begin + row"
    if grouping == "gather":
        sources = {"source": f"is_chosen ? {pair} / Share : begin + row", "target": place}
    else:
        sources = {"source": place, "target": f"is_chosen ? {pair} : pairs + begin + row"}
    return [*lines, *(f"auto {name} = [&](int row) {{ return {of}; }};" for name, of in sources.items())]


def header(dtype: mx.Dtype) -> str:
    """Return the functions that the kernels call."""
    return _of_dtype(_HEADER, dtype)


def _of_dtype(source: str, dtype: mx.Dtype) -> str:
    source = source.replace("TYPE", NAMES[dtype])
    for name, meaning in PAIRS[dtype].items():
        source = source.replace(name, meaning)
    return source
