"""The body of the kernel for many rows and weights of 4 or 8 bits on CUDA; few_rows_kernel.py makes kernels of it.

A block multiplies up to 64 rows by some outputs. Rows and weights are copied into shared memory some steps ahead, 128
bytes of each output at once, and each weight is expanded by one warp, for all rows. With the kernel for few rows each
warp reads the rows from the device's cache, which takes longer than reading weights from 33 rows on.
"""

WARPS, SPLIT = 8, 2
"""Warps of a block, and how many of them share the columns of the same outputs, on which a row's result depends."""
ROW_TILES, OUT_TILES = 4, 4
"""Row tiles of a block, of 16 rows each, and output tiles of a warp, of 8 outputs each."""
OUTPUTS = 8 * OUT_TILES * WARPS // SPLIT
"""Outputs of a block, of gate and up together."""
STAGES = 2
"""Number of steps whose rows and weights are in shared memory, or on their way. With 2 a block takes 96 KB, which all
devices of compute capability 8 have; on an H200 3 or 4 stages and 1 to 5 output tiles were no faster."""
CONSTANTS = (("OutTiles", OUT_TILES), ("Warps", WARPS), ("Split", SPLIT), ("Stages", STAGES))
"""Constants of the kernel beside RowTiles."""


def shared_bytes(bits: int) -> int:
    """Return the bytes of a block's shared memory: of rows and weights of so many bits, and then of sums."""
    return max(STAGES * (16 * ROW_TILES * 2048 // bits + OUTPUTS * 128), 16 * ROW_TILES * OUTPUTS * SPLIT * 4)


SOURCE = """
    // Tiles of 16 rows x 8 outputs by mma.m16n8k16. In each step the block has some columns of its rows and weights in
    // shared memory: 128 bytes of each output. Split warps share the columns of the same outputs.
    constexpr int Own = Gated ? OutTiles / 2 : OutTiles, Across = Warps / Split, Rows = RowTiles * 16;
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
        const int output = (block * Across + at / (8 * OutTiles)) * (8 * Own) + j % Own * 8 + at % 8;
        weights[i] = output < outputs ? (j < Own ? w : up_w) + size_t(output) * row_bytes + thread % 8 * 16 : nullptr;
    }
    auto stage = [&](int step) {
        uint4* to = staged + step % Stages * Stage;
        const int skipped = step * Units * 8;
        #pragma unroll
        for (int i = 0; i < Loads; ++i) {
            const int row = own_row + i * (Threads / Units);
            const bool there = row < rows && skipped + unit * 8 < columns;
            copy(to + place(row, unit), x + (there ? sources[i] + skipped : 0u), there, aligned);
        }
        #pragma unroll
        for (int i = 0; i < WeightLoads; ++i) {
            const int at = thread / 8 + i * (Threads / 8);
            const bool there = weights[i] != nullptr && step * 128 + thread % 8 * 16 < row_bytes;
            uint4* own_to = to + Rows * Units + at * 8 + (thread % 8 ^ (at & 1) * 4);
            copy(own_to, there ? weights[i] + step * 128 : w, there, aligned);
        }
    };
    unsigned scale_and_bias[2][OutTiles];
    auto fetch = [&](int u, int step) {
        const int column = (step * Split + share) * (4 * PerLane) + (lane & 3) * PerLane;
        #pragma unroll
        for (int j = 0; j < OutTiles; ++j) {
            const int output = first + j % Own * 8 + group;
            const bool there = column < columns && output < outputs;
            const unsigned at = there ? unsigned(output) * groups + (column >> group_bits) : 0u;
            const unsigned bias = __ldg((j < Own ? biases : up_biases) + at);
            scale_and_bias[u][j] = __ldg((j < Own ? scales : up_scales) + at) | bias << 16;
        }
    };
    float sums[RowTiles][OutTiles][4];
    for (int i = 0; i < RowTiles; ++i)
        for (int j = 0; j < OutTiles; ++j)
            for (int r = 0; r < 4; ++r) sums[i][j][r] = 0.0f;
    #pragma unroll
    for (int s = 0; s < Stages - 1; ++s) {
        if (s < steps) stage(s);
        end_of_copies();
    }
    fetch(0, 0);
    fetch(1, 1);
    for (int start = 0; start < steps; start += 2) {
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int step = start + u;
            if (step >= steps) break;
            wait_for_copies<Stages - 2>();
            __syncthreads();
            if (step + Stages - 1 < steps) stage(step + Stages - 1);
            end_of_copies();
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
                for (int j = 0; j < OutTiles; ++j)
                    eight[j] = in_order<Bits>(expanded<Bits>(loaded[j], e, scale_and_bias[u][j]));
                const int at = (share * 4 + (lane & 3)) * (PerLane / 8) + e;
                #pragma unroll
                for (int i = 0; i < RowTiles; ++i) {
                    const uint4 upper = of_rows[place(i * 16 + group, at)];
                    const uint4 lower = of_rows[place(i * 16 + 8 + group, at)];
                    #pragma unroll
                    for (int j = 0; j < OutTiles; ++j)
                        multiply(sums[i][j], upper.x, lower.x, upper.y, lower.y, eight[j].x, eight[j].y);
                    #pragma unroll
                    for (int j = 0; j < OutTiles; ++j)
                        multiply(sums[i][j], upper.z, lower.z, upper.w, lower.w, eight[j].z, eight[j].w);
                }
            }
            fetch(u, step + 2);
        }
    }
    // The sums of the warps with the same outputs are added in shared memory, and each writes some of the row tiles.
    constexpr int Sums = RowTiles * OutTiles * 4;
    float* handed = reinterpret_cast<float*>(staged) + mine * Split * Sums * 32 + lane;
    wait_for_copies<0>();
    __syncthreads();
    #pragma unroll
    for (int s = 0; s < Sums; ++s)
        handed[(share * Sums + s) * 32] = sums[s / (4 * OutTiles)][s / 4 % OutTiles][s % 4];
    __syncthreads();
    auto total = [&](int i, int j, int r) {
        float sum = 0.0f;
        for (int part = 0; part < Split; ++part) sum += handed[(part * Sums + (i * OutTiles + j) * 4 + r) * 32];
        return sum;
    };
    #pragma unroll
    for (int i = 0; i < RowTiles; ++i) {
        if (i % Split != share) continue;
        #pragma unroll
        for (int j = 0; j < Own; ++j)
            #pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = i * 16 + group + (r >= 2 ? 8 : 0), output = first + j * 8 + (lane & 3) * 2 + (r & 1);
                float sum = total(i, j, r);
                if (Gated) sum = sum / (1.0f + expf(-sum)) * total(i, j + OutTiles - Own, r);
                if (row >= rows || output >= outputs) continue;
                const size_t at = size_t(target(row)) * outputs + output;
                if (Added) sum += static_cast<float>(added[at]);
                y[at] = static_cast<T>(sum);
            }
    }
"""

HEADER = """
// Copy 16 bytes to shared memory, zeros unless they are there; it has happened when the group of copies is waited for.
__device__ __forceinline__ void copy(uint4* to, const void* from, bool there, bool aligned) {
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
