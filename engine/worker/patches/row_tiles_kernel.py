"""The body of the kernel for many rows and weights of 4 or 8 bits on CUDA; few_rows_kernel.py makes kernels of it.

A block multiplies up to 64 rows by some outputs. Rows and weights are copied into shared memory some steps ahead, 128
bytes of each output at once, and each weight is expanded by one warp, for all rows. With the kernel for few rows each
warp reads the rows from the device's cache, which takes longer than reading weights from 33 rows on.
"""

from typing import NamedTuple

SPLIT = 2
"""How many warps of a block share the columns of the same outputs. A row's result depends on it."""
ROW_TILES = 4
"""Row tiles of a block, of 16 rows each."""
STAGES = 2
"""Number of steps whose rows and weights are in shared memory, or on their way. On an H200 3 stages were no faster."""


class Block(NamedTuple):
    """The form of a block. A row's result does not depend on it.

    Attributes:
        warps: Its warps.
        out_tiles: Output tiles of a warp, of 8 outputs each.
        per_processor: How many blocks a multiprocessor has at once, if its registers and shared memory allow it.
    """

    warps: int
    out_tiles: int
    per_processor: int

    @property
    def num_outputs(self) -> int:
        """Its outputs, of gate and up together."""
        return 8 * self.out_tiles * self.warps // SPLIT

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """The constants of the kernel beside RowTiles."""
        return (("OutTiles", self.out_tiles), ("Warps", self.warps), ("Split", SPLIT), ("Stages", STAGES))

    def shared_bytes(self, bits: int) -> int:
        """Return the bytes of its shared memory: of rows and weights of so many bits, and then of sums."""
        outputs = self.num_outputs
        return max(STAGES * (16 * ROW_TILES * 2048 // bits + outputs * 128), 16 * ROW_TILES * outputs * SPLIT * 4)

    @property
    def header(self) -> str:
        """The functions that the body calls, and a limit of registers, so that a multiprocessor has so many blocks."""
        bounds = f"__launch_bounds__({32 * self.warps}, {self.per_processor})"
        return f"{HEADER}#undef __global__\n#define __global__ __attribute__((global)) {bounds}\n"


LARGE = Block(warps=8, out_tiles=4, per_processor=1)
"""With 4 bits it takes 96 KB, which all devices of compute capability 8 have."""
MIDDLE = Block(warps=8, out_tiles=2, per_processor=2)
"""With 4 bits it takes 80 KB."""
SMALL = Block(warps=4, out_tiles=2, per_processor=3)
"""With 4 bits it takes 72 KB."""

SOURCE = """
    // Tiles of 16 outputs x 8 rows by mma.m16n8k16: a lane's numbers of a row are then neighbours in its registers. In
    // each step the block has some columns of its rows and weights in shared memory: 128 bytes of each output. Split
    // warps share the columns of the same outputs.
    // With a gate, every other tile of 8 outputs is of `up`.
    constexpr int Step = Gated ? 2 : 1, Own = OutTiles / Step, Across = Warps / Split, Rows = RowTiles * 16;
    constexpr int Eights = RowTiles * 2, Pairs = OutTiles / 2;
    constexpr int Outputs = Across * OutTiles * 8, Units = 128 / Bits, Stage = Rows * Units + Outputs * 8;
    constexpr int Threads = Warps * 32, Loads = Rows * Units / Threads, WeightLoads = Outputs * 8 / Threads;
    constexpr int PerLane = 128 / Bits;
    extern __shared__ uint4 staged[];
    const int columns = x_shape[1], row_bytes = columns / 8 * Bits, steps = (row_bytes + 127) / 128;
    const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane, group = lane >> 2;
    const int share = warp % Split, mine = warp / Split, first = (block * Across + mine) * (8 * Own);
    const int group_bits = 31 - __clz(columns / groups);
    const bool aligned = (size_t(x) | size_t(w) | size_t(up_w)) % 16 == 0;
    // A thread copies 16 bytes of some rows and of some outputs. The places of a row's units depend on the row, so that
    // lanes which read at once read different banks.
    auto place = [&](int row, int u) { return row * Units + (u ^ ((u >> 3 & 1) << 1) ^ (row & 1)); };
    const int unit = thread % Units, own_row = thread / Units;
    unsigned sources[Loads];
    #pragma unroll
    for (int i = 0; i < Loads; ++i) {
        const int row = own_row + i * (Threads / Units);
        sources[i] = row < rows ? unsigned(source(row)) * columns + unit * 8 : 0u;
    }
    const char* weights[WeightLoads];
    #pragma unroll
    for (int i = 0; i < WeightLoads; ++i) {
        const int at = thread / 8 + i * (Threads / 8), j = at / 8 % OutTiles;
        const int output = (block * Across + at / (8 * OutTiles)) * (8 * Own) + j / Step * 8 + at % 8;
        const char* start = (j % Step == 0 ? w : up_w) + size_t(output) * row_bytes + thread % 8 * 16;
        weights[i] = output < outputs ? start : nullptr;
    }
    auto stage = [&](int step) {
        uint4* to = staged + step % Stages * Stage;
        const int skipped = step * Units * 8;
        #pragma unroll
        for (int i = 0; i < Loads; ++i) {
            const int row = own_row + i * (Threads / Units);
            const bool there = row < rows && skipped + unit * 8 < columns;
            copy(to + place(row, unit), x + (there ? sources[i] + skipped : 0u), there);
        }
        #pragma unroll
        for (int i = 0; i < WeightLoads; ++i) {
            const int at = thread / 8 + i * (Threads / 8);
            const bool there = weights[i] != nullptr && step * 128 + thread % 8 * 16 < row_bytes;
            uint4* own_to = to + Rows * Units + at * 8 + (thread % 8 ^ (at & 1) * 4);
            copy(own_to, there ? weights[i] + step * 128 : w, there);
        }
    };
    // The same for arrays whose places do not allow for copies of 16 bytes.
    auto stage_slowly = [&](int step) {
        unsigned short* to = reinterpret_cast<unsigned short*>(staged + step % Stages * Stage);
        #pragma unroll 1
        for (int i = thread; i < Rows * Units * 8; i += Threads) {
            const int row = i / (Units * 8), column = step * Units * 8 + i % (Units * 8);
            const bool there = row < rows && column < columns;
            const unsigned short* from = reinterpret_cast<const unsigned short*>(x);
            to[place(row, i / 8 % Units) * 8 + i % 8] = there ? from[unsigned(source(row)) * columns + column] : 0;
        }
        #pragma unroll 1
        for (int i = thread; i < Outputs * 64; i += Threads) {
            const int at = i / 64, byte = step * 128 + i % 64 * 2, j = at / 8 % OutTiles;
            const int output = (block * Across + at / (8 * OutTiles)) * (8 * Own) + j / Step * 8 + at % 8;
            const char* from = (j % Step == 0 ? w : up_w) + size_t(output) * row_bytes + byte;
            const bool there = output < outputs && byte < row_bytes;
            to[(Rows * Units + at * 8 + (i / 8 % 8 ^ (at & 1) * 4)) * 8 + i % 8] =
                there ? *reinterpret_cast<const unsigned short*>(from) : 0;
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
    unsigned scale_and_bias[2][OutTiles];
    auto fetch = [&](int u, int step) {
        const int column = (step * Split + share) * (4 * PerLane) + (lane & 3) * PerLane;
        #pragma unroll
        for (int j = 0; j < OutTiles; ++j) {
            const int output = first + j / Step * 8 + group;
            const bool there = column < columns && output < outputs;
            const unsigned at = there ? unsigned(output) * groups + (column >> group_bits) : 0u;
            const unsigned bias = __ldg((j % Step == 0 ? biases : up_biases) + at);
            scale_and_bias[u][j] = __ldg((j % Step == 0 ? scales : up_scales) + at) | bias << 16;
        }
    };
    float sums[Eights][Pairs][4];
    for (int i = 0; i < Eights; ++i)
        for (int j = 0; j < Pairs; ++j)
            for (int r = 0; r < 4; ++r) sums[i][j][r] = 0.0f;
    #pragma unroll
    for (int s = 0; s < Stages - 1; ++s) prepare(s);
    fetch(0, 0);
    fetch(1, 1);
    for (int start = 0; start < steps; start += 2) {
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int step = start + u;
            if (step >= steps) break;
            wait_for_copies<Stages - 2>();
            __syncthreads();
            prepare(step + Stages - 1);
            const uint4 *of_rows = staged + step % Stages * Stage, *of_weights = of_rows + Rows * Units;
            uint4 loaded[OutTiles];
            #pragma unroll
            for (int j = 0; j < OutTiles; ++j) {
                const int output = (mine * OutTiles + j) * 8 + group;
                loaded[j] = of_weights[output * 8 + (share * 4 + (lane & 3) ^ (group & 1) * 4)];
            }
            #pragma unroll
            for (int e = 0; e < PerLane / 8; ++e) {
                uint4 eight[OutTiles];
                #pragma unroll
                for (int j = 0; j < OutTiles; ++j) eight[j] = in_order<Bits>(loaded[j], e, scale_and_bias[u][j], mask);
                const int at = (share * 4 + (lane & 3)) * (PerLane / 8) + e;
                #pragma unroll
                for (int i = 0; i < Eights; ++i) {
                    const uint4 row = of_rows[place(i * 8 + group, at)];
                    #pragma unroll
                    for (int j = 0; j < Pairs; ++j) {
                        const uint4 &upper = eight[2 * j], &lower = eight[2 * j + 1];
                        multiply(sums[i][j], upper.x, lower.x, upper.y, lower.y, row.x, row.y);
                    }
                    #pragma unroll
                    for (int j = 0; j < Pairs; ++j) {
                        const uint4 &upper = eight[2 * j], &lower = eight[2 * j + 1];
                        multiply(sums[i][j], upper.z, lower.z, upper.w, lower.w, row.z, row.w);
                    }
                }
            }
            fetch(u, step + 2);
        }
    }
    // The sums of the warps with the same outputs are added in shared memory, and each writes some.
    constexpr int Sums = Eights * Pairs * 4;
    float* handed = reinterpret_cast<float*>(staged) + mine * Split * Sums * 32 + lane;
    wait_for_copies<0>();
    __syncthreads();
    #pragma unroll
    for (int s = 0; s < Sums; ++s)
        handed[(share * Sums + s) * 32] = sums[s / (4 * Pairs)][s / 4 % Pairs][s % 4];
    __syncthreads();
    auto total = [&](int i, int j, int r) {
        float sum = 0.0f;
        for (int part = 0; part < Split; ++part) sum += handed[(part * Sums + (i * Pairs + j) * 4 + r) * 32];
        return sum;
    };
    #pragma unroll
    for (int i = 0; i < Eights; ++i) {
        #pragma unroll
        for (int j = 0; j < Pairs; ++j) {
            if ((i * Pairs + j) % Split != share) continue;
            #pragma unroll
            for (int r = 0; r < (Gated ? 2 : 4); ++r) {
                const int row = i * 8 + (lane & 3) * 2 + r % 2;
                const int output = first + (Gated ? j : j * 2 + r / 2) * 8 + group;
                float sum = total(i, j, r);
                if (Gated) sum = sum / (1.0f + expf(-sum)) * total(i, j, r + 2);
                if (row >= rows || output >= outputs) continue;
                const size_t at = size_t(target(row)) * outputs + output;
                if (Added) sum += static_cast<float>(added[at]);
                y[at] = static_cast<T>(sum);
            }
        }
    }
"""

HEADER = """
// Copy 16 bytes to shared memory, zeros unless they are there; it has happened when the group of copies is waited for.
__device__ __forceinline__ void copy(uint4* to, const void* from, bool there, bool aligned = true) {
    if (!aligned) {
        const unsigned short* halves = static_cast<const unsigned short*>(from);
        for (int i = 0; i < 8; ++i) reinterpret_cast<unsigned short*>(to)[i] = there ? halves[i] : (unsigned short)0;
        return;
    }
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most the last Groups groups are on their way.
template <int Groups>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(Groups) : "memory"); }
"""
"""Functions of the device that the body calls."""
