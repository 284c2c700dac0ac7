"""The body of the kernel for experts of many tokens with weights of 4 bits on Hopper GPUs.

few_rows_kernel.py makes kernels of it. A block multiplies up to 64 rows by some outputs, as that of row_tiles_kernel.py
does, by products of a warpgroup: its four warps expand weights in registers, and the tensor cores read the rows from
shared memory by themselves. There is one form of the loop for 16, 32, 48 and 64 rows, so that blocks of few rows take
less time. For 2,048 tokens and 256 experts an H200 takes 0.57 ms, with row tiles in their first form 1.2.
"""

from engine.worker.patches.row_tiles_kernel import ROW_TILES

WARPS = 8
"""Warps of a block, in two warpgroups."""
OUTPUTS = 256
"""Outputs of a block, of gate and up together: each warpgroup has two tiles of 64."""
STAGES = 3
"""Number of steps, of 128 columns each, whose rows and weights are in shared memory, or on their way: 96 KB, so that a
multiprocessor has two blocks."""
CONSTANTS = (("Warps", WARPS), ("Stages", STAGES))
"""Constants of the kernel beside RowTiles."""
SHARED_BYTES = max(STAGES * (16 * ROW_TILES * 256 + OUTPUTS * 64), 16 * ROW_TILES * (OUTPUTS + 4) * 4) + 1024
"""Shared memory of a block: of rows and weights, and then of sums, and as much as it takes to begin at a kilobyte."""

SOURCE = """
    // Tiles of 64 outputs x N rows by wgmma.m64nNk16, with the weights in registers and the rows in shared memory. Each
    // step has 128 columns. A lane expands 32 neighbours of an output's weights, and the rows are written to shared
    // memory in the order in which the lanes of a tile multiply them: column 32 p + 8 e + 2 i at 32 e + 8 i + 2 p.
    // Outputs that are not there are computed as the last one, and not written.
    constexpr int Tiles = 2, Own = Gated ? 1 : Tiles, Groups = Warps / 4, Outputs = 64 * Tiles * Groups;
    constexpr int Rows = RowTiles * 16, Stage = Rows * 16 + Outputs * 4;
    extern __shared__ uint4 staged[];
    __shared__ unsigned sources[Rows], targets[Rows];
    __shared__ const char* weights[2];
    __shared__ const unsigned short *factors[2][2];
    uint4* const memory = aligned_to_kilobyte(staged);
    const int columns = x_shape[1], row_bytes = columns / 2, steps = (columns + 127) / 128;
    const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane, group = lane >> 2, part = lane & 3;
    const int first = block * Groups * Own * 64;
    const int group_bits = 31 - __clz(columns / groups);
    const bool aligned = (size_t(w) | size_t(up_w)) % 16 == 0 && size_t(x) % 4 == 0;
    if (thread < rows) {
        sources[thread] = unsigned(source(thread)) * columns;
        targets[thread] = unsigned(target(thread));
    }
    if (thread == 0) {  // a lane has too few registers for them
        weights[0] = w, weights[1] = up_w;
        factors[0][0] = scales, factors[0][1] = biases, factors[1][0] = up_scales, factors[1][1] = up_biases;
    }
    __syncthreads();
    auto output_of = [&](int warpgroup, int t, int row) {
        return min(first + (warpgroup * Own + t % Own) * 64 + row, outputs - 1);
    };
    const int rows_left = rows - warp;
    auto stage = [&](int step) {
        uint4* to = memory + step % Stages * Stage;
        const int column = step * 128 + lane / 8 * 32 + lane % 8 * 2, byte = step * 64 + thread % 4 * 16;
        unsigned* words = reinterpret_cast<unsigned*>(to + warp * 8 + (lane % 8 ^ warp % 8)) + lane / 8;
        const bool is_there = column < columns, is_next = column + 16 < columns, has_weights = byte < row_bytes;
        #pragma unroll
        for (int i = 0; i < Rows / Warps; ++i) {
            if (i * Warps >= rows_left) break;
            const T* from = x + (sources[warp + i * Warps] + unsigned(column));
            copy_pair(words + i * Warps * 32, from, is_there);
            copy_pair(words + i * Warps * 32 + Rows * 32, from + 16, is_next);
        }
        #pragma unroll
        for (int i = 0; i < Outputs / (Warps * 8); ++i) {
            const int tile = i * (Warps * 8) / 64, row = i * (Warps * 8) % 64 + thread / 4;
            const unsigned at = unsigned(output_of(tile / Tiles, tile % Tiles, row)) * row_bytes + byte;
            copy(to + Rows * 16 + i * Warps * 32 + thread, weights[tile % Tiles / Own] + at, has_weights);
        }
    };
    // The same for arrays whose places do not allow for copies of 16 bytes.
    auto stage_slowly = [&](int step) {
        unsigned short* to = reinterpret_cast<unsigned short*>(memory + step % Stages * Stage);
        #pragma unroll 1
        for (int i = thread; i < rows * 128; i += Warps * 32) {
            const int row = i / 128, column = step * 128 + i % 128;
            const int at = i / 8 % 4 * 32 + i / 2 % 4 * 8 + i / 32 % 4 * 2;
            unsigned short* place = to + at / 64 * (Rows * 64) + row * 64 + (at / 8 % 8 ^ row % 8) * 8 + at % 8 + i % 2;
            *place = column < columns ? reinterpret_cast<const unsigned short*>(x)[sources[row] + column] : 0;
        }
        #pragma unroll 1
        for (int i = thread; i < Outputs * 32; i += Warps * 32) {
            const int tile = i / 2048, byte = step * 64 + i % 32 * 2;
            const unsigned at = unsigned(output_of(tile / Tiles, tile % Tiles, i / 32 % 64)) * row_bytes;
            const char* from = weights[tile % Tiles / Own] + at + byte;
            to[Rows * 128 + i] = byte < row_bytes ? *reinterpret_cast<const unsigned short*>(from) : 0;
        }
    };
    auto prepare = [&](int step) {
        if (step < steps) {
            if (aligned) stage(step);
            else stage_slowly(step);
        }
        end_of_copies();
    };
    const unsigned mask = 0x000f000fu + (unsigned(columns) >> 31);  // a number that the compiler does not know
    unsigned scale_and_bias[Tiles][2];
    auto fetch = [&](int step) {
        const int column = min(step * 128 + part * 32, columns - 1) >> group_bits;
        #pragma unroll
        for (int t = 0; t < Tiles; ++t)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int output = output_of(warp / 4, t, warp % 4 * 16 + half * 8 + group);
                const unsigned at = unsigned(output) * groups + column;
                const unsigned bias = __ldg(factors[t / Own][1] + at);
                scale_and_bias[t][half] = __ldg(factors[t / Own][0] + at) | bias << 16;
            }
    };
    auto multiplied = [&](auto size) {
        constexpr int N = decltype(size)::value;
        float sums[Tiles][N / 2];
        #pragma unroll
        for (int t = 0; t < Tiles; ++t)
            #pragma unroll
            for (int r = 0; r < N / 2; ++r) sums[t][r] = 0.0f;
        #pragma unroll 1
        for (int s = 0; s < Stages - 1; ++s) prepare(s);
        fetch(0);
        #pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            wait_for_copies<Stages - 2>();
            show_to_tensor_cores();
            __syncthreads();
            prepare(step + Stages - 1);
            const uint4* of_rows = memory + step % Stages * Stage;
            uint4 words[Tiles][2];
            #pragma unroll
            for (int t = 0; t < Tiles; ++t)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int at = (warp / 4 * Tiles + t) * 64 + warp % 4 * 16 + half * 8 + group;
                    words[t][half] = of_rows[Rows * 16 + at * 4 + part];
                }
            const unsigned long long rows_at = description(of_rows);
            #pragma unroll
            for (int s = 0; s < 8; ++s) {
                unsigned a[Tiles][4];
                #pragma unroll
                for (int t = 0; t < Tiles; ++t)
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const unsigned word = reinterpret_cast<const unsigned*>(&words[t][i % 2])[s / 2];
                        a[t][i] = two_of(word, s % 2 * 2 + i / 2, scale_and_bias[t][i % 2], mask);
                    }
                begin_products();
                #pragma unroll
                for (int t = 0; t < Tiles; ++t) multiply_group(sums[t], a[t], rows_at + s / 4 * (Rows * 8) + s % 4 * 2);
                end_of_products();
                wait_for_products<1>();
            }
            if (step + 1 < steps) fetch(step + 1);
            wait_for_products<0>();
        }
        // Sums are handed over in shared memory, to a thread for four outputs of some rows.
        float* handed = reinterpret_cast<float*>(memory);
        wait_for_copies<0>();
        __syncthreads();
        #pragma unroll
        for (int t = 0; t < Tiles; ++t)
            #pragma unroll
            for (int r = 0; r < N / 2; ++r) {
                const int row = r / 4 * 8 + part * 2 + r % 2;
                const int at = (warp / 4 * Tiles + t) * 64 + warp % 4 * 16 + r / 2 % 2 * 8 + group;
                handed[row * (Outputs + 4) + at] = sums[t][r];
            }
    };
    if (rows <= 16) multiplied(Size<16>());
    else if (rows <= 32) multiplied(Size<32>());
    else if (rows <= 48) multiplied(Size<48>());
    else multiplied(Size<64>());
    __syncthreads();
    constexpr int Fours = Own * 16 * Groups;
    const float* handed = reinterpret_cast<const float*>(memory);
    for (int i = thread; i < rows * Fours; i += Warps * 32) {
        const int row = i / Fours, at = i % Fours * 4, output = first + at;
        const float* own = handed + row * (Outputs + 4) + at + (Gated ? at / 64 * 64 : 0);
        const float4 four = *reinterpret_cast<const float4*>(own);
        float sums[4] = {four.x, four.y, four.z, four.w};
        if (Gated) {
            const float4 up = *reinterpret_cast<const float4*>(own + 64);
            const float ups[4] = {up.x, up.y, up.z, up.w};
            for (int j = 0; j < 4; ++j) sums[j] = sums[j] / (1.0f + expf(-sums[j])) * ups[j];
        }
        alignas(8) T results[4];
        const size_t place = size_t(targets[row]) * outputs + output;
        for (int j = 0; j < 4; ++j) results[j] = static_cast<T>(sums[j]);
        if (outputs % 4 == 0 && output < outputs) {
            *reinterpret_cast<uint2*>(y + place) = *reinterpret_cast<const uint2*>(results);
            continue;
        }
        #pragma unroll
        for (int j = 0; j < 4; ++j)
            if (output + j < outputs) y[place + j] = results[j];
    }
"""

_PRODUCT = """
__device__ __forceinline__ void multiply_group(float (&c)[COUNT], const unsigned (&a)[4], unsigned long long rows) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64nSIZEk16.f32.TYPE.TYPE {SUMS}, {A}, %ROWS, adds, 1, 1, 0; }"
        : OUTPUTS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
"""


def _product(size: int) -> str:
    """Return the function that multiplies a warpgroup's weights [64, 16] by so many rows in shared memory."""
    count = size // 2
    named = {
        "COUNT": str(count),
        "SIZE": str(size),
        "{SUMS}": "{" + ", ".join(f"%{i}" for i in range(count)) + "}",
        "{A}": "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}",
        "%ROWS": f"%{count + 4}",
        "OUTPUTS": ", ".join(f'"+f"(c[{i}])' for i in range(count)),
    }
    source = _PRODUCT
    for name, meaning in named.items():
        source = source.replace(name, meaning)
    return source


HEADER = """
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(256, 2)
template <int N> struct Size { static constexpr int value = N; };
// Copy two numbers to shared memory, zeros unless they are there, as `copy` does.
__device__ __forceinline__ void copy_pair(unsigned* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ uint4* aligned_to_kilobyte(uint4* memory) {
    return memory + (1024 - unsigned(__cvta_generic_to_shared(memory)) % 1024) % 1024 / 16;
}
// Let tensor cores read what this thread has written to shared memory, from the next barrier on.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The place of rows in shared memory, of 64 columns each, in atoms of eight rows whose units of 16 bytes are exchanged.
__device__ __forceinline__ unsigned long long description(const uint4* rows) {
    const unsigned long long at = unsigned(__cvta_generic_to_shared(rows)) >> 4 & 0x3fff;
    return at | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most the last Groups groups of products are under way.
template <int Groups>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Groups) : "memory");
}
""" + "".join(_product(16 * tiles) for tiles in range(1, ROW_TILES + 1))
"""Functions of the device that the body calls, beside those of row_tiles_kernel.py and few_rows_kernel.py."""
