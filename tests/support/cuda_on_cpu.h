// Stands for the CUDA functions that the kernels of cuda_on_cpu.py call, on a CPU: the lanes of a block take turns.
// It includes headers of C alone, as those of C++ take most of the time of a kernel's compilation.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __shared__ static

// bfloat16, rounded to the nearest even one.
struct bf16 {
    uint16_t bits;
    bf16() = default;
    explicit bf16(float x) {
        uint32_t u;
        memcpy(&u, &x, 4);
        bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    }
    operator float() const {
        const uint32_t u = uint32_t(bits) << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
};
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct __nv_bfloat162 { bf16 x, y; };
struct Place { int x, y; };

// Copies of a lane to shared memory, which happen when it waits for them.
struct Copy {
    void* to;
    const void* from;
    bool there;
    int bytes;
};
constexpr int MAX_COPIES = 4096;

// A product of a warpgroup, of which a lane has two rows, and which happens when it waits for it.
struct Product {
    float *c, a[2][16];
    uint64_t rows;
    int num_rows;
};
constexpr int MAX_PRODUCTS = 64;

// A lane runs until it waits at a barrier; then it is the next one's turn.
struct Lane {
    ucontext_t context;
    void* stack;
    bool has_ended;
    Copy copies[MAX_COPIES];
    int ends[MAX_COPIES], num_copies, num_ends, num_waited, num_done;
    Product products[MAX_PRODUCTS];
    int product_ends[MAX_PRODUCTS], num_products, num_product_ends;
};
ucontext_t scheduler;
Lane* running;

struct Barrier {
    int lanes, arrived = 0, round = 0;
    void arrive_and_wait() {
        const int mine = round;
        if (++arrived == lanes) arrived = 0, ++round;
        while (round == mine) swapcontext(&running->context, &scheduler);
    }
};

// Values that the lanes of a warp exchange.
struct Warp {
    Barrier barrier{32};
    unsigned a[32][4], b[32][2];
    float shuffled[32];
    const uint16_t* rows[32];
};

Place threadIdx, blockIdx, blockDim, gridDim;
Warp* warp_of_lane;
Barrier block_barrier;

inline void __syncthreads() { block_barrier.arrive_and_wait(); }
inline void __syncwarp() { warp_of_lane->barrier.arrive_and_wait(); }

inline float half_of(unsigned pair, int i) {
    bf16 x;
    x.bits = i ? pair >> 16 : pair & 0xffff;
    return x;
}
// mma.m16n8k16: lane l has rows l / 4 and l / 4 + 8 of a, column l / 4 of b, and columns l % 4 * 2 and + 1 of c.
inline void multiply(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = threadIdx.x, group = lane / 4, part = lane % 4;
    Warp& warp = *warp_of_lane;
    __syncwarp();
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    memcpy(warp.a[lane], a, sizeof a);
    memcpy(warp.b[lane], b, sizeof b);
    __syncwarp();
    for (int r = 0; r < 4; ++r)
        for (int k = 0; k < 16; ++k) {
            const int holder = k % 8 / 2, high = k / 8, column = part * 2 + r % 2;
            c[r] += half_of(warp.a[group * 4 + holder][r / 2 + 2 * high], k % 2) *
                    half_of(warp.b[column * 4 + holder][high], k % 2);
        }
}
inline void copy(uint4* to, const void* from, bool there, bool = true) {
    running->copies[running->num_copies++] = {to, from, there, 16};
}
inline void copy_pair(unsigned* to, const void* from, bool there) {
    running->copies[running->num_copies++] = {to, from, there, 4};
}
inline void end_of_copies() { running->ends[running->num_ends++] = running->num_copies; }
template <int Groups> void wait_for_copies() {
    for (; running->num_waited + Groups < running->num_ends; ++running->num_waited)
        for (; running->num_done < running->ends[running->num_waited]; ++running->num_done) {
            const Copy& one = running->copies[running->num_done];
            if (one.there) memcpy(one.to, one.from, one.bytes);
            else memset(one.to, 0, one.bytes);
        }
}
// wgmma.m64nNk16: a warp has sixteen rows of a, as those of `multiply`; the places of b's rows in shared memory are
// described by 64 bits.
template <int N> struct Size { static constexpr int value = N; };
char* kilobyte;
inline uint4* aligned_to_kilobyte(uint4* memory) {
    kilobyte = (char*)((size_t(memory) + 1023) / 1024 * 1024);
    return (uint4*)kilobyte;
}
inline uint64_t description(const uint4* rows) {
    return uint64_t((const char*)rows - kilobyte) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
inline void show_to_tensor_cores() {}
inline void begin_products() {}
template <int Sums> void multiply_group(float (&c)[Sums], const unsigned (&a)[4], uint64_t rows) {
    const int lane = threadIdx.x, group = lane / 4;
    Warp& warp = *warp_of_lane;
    __syncwarp();
    memcpy(warp.a[lane], a, sizeof a);
    __syncwarp();
    Product& one = running->products[running->num_products++];
    one.c = c, one.rows = rows, one.num_rows = Sums * 2;
    for (int lower = 0; lower < 2; ++lower)
        for (int k = 0; k < 16; ++k)
            one.a[lower][k] = half_of(warp.a[group * 4 + k % 8 / 2][lower + k / 8 * 2], k % 2);
    __syncwarp();
}
inline void end_of_products() { running->product_ends[running->num_product_ends++] = running->num_products; }
template <int Groups> void wait_for_products() {
    Lane& lane = *running;
    const int ended = lane.num_product_ends - Groups;
    if (ended <= 0) return;
    const int done = lane.product_ends[ended - 1];
    for (int i = 0; i < done; ++i) {
        const Product& one = lane.products[i];
        const uint64_t begin = (one.rows & 0x3fff) << 4, atom = (one.rows >> 32 & 0x3fff) << 4;
        for (int r = 0; r < one.num_rows / 2; ++r) {
            const int row = r / 4 * 8 + threadIdx.x % 4 * 2 + r % 2;
            for (int k = 0; k < 16; ++k) {
                uint64_t at = begin + row / 8 * atom + row % 8 * 128 + k * 2;
                at ^= (at >> 7 & 7) << 4;
                bf16 b;
                memcpy(&b, kilobyte + at, 2);
                one.c[r] += one.a[r / 2 % 2][k] * b;
            }
        }
    }
    lane.num_products -= done;
    memmove(lane.products, lane.products + done, lane.num_products * sizeof(Product));
    lane.num_product_ends -= ended;
    for (int i = 0; i < lane.num_product_ends; ++i) lane.product_ends[i] = lane.product_ends[ended + i] - done;
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    memcpy(&warp_of_lane->shuffled[lane], &x, 4);
    __syncwarp();
    memcpy(&x, &warp_of_lane->shuffled[lane ^ mask], 4);
    return x;
}
// ldmatrix: lane l gets numbers 2 (l % 4) and the next one of row l / 4 of each matrix, or of column l / 4.
inline void load(unsigned (&x)[4], const uint4* row, bool transposed) {
    const int lane = threadIdx.x, group = lane / 4, part = lane % 4 * 2;
    Warp& warp = *warp_of_lane;
    __syncwarp();
    warp.rows[lane] = reinterpret_cast<const uint16_t*>(row);
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const uint16_t** rows = warp.rows + i * 8;
        const unsigned low = transposed ? rows[part][group] : rows[group][part];
        x[i] = low | unsigned(transposed ? rows[part + 1][group] : rows[group][part + 1]) << 16;
    }
}
inline void load_matrices(unsigned (&x)[4], const uint4* row) { load(x, row, false); }
inline void load_transposed(unsigned (&x)[4], const uint4* row) { load(x, row, true); }
inline bool __all_sync(unsigned, bool x) {
    for (int step = 16; step; step >>= 1) x = __shfl_xor_sync(0u, float(x), step) != 0.0f && x;
    return x;
}
inline int atomicAdd(int* to, int x) { return *to += x, *to - x; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return result;
}
template <typename T> T __ldg(const T* from) { return *from; }
template <typename T> T __ldcs(const T* from) { return *from; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int __clz(int x) { return __builtin_clz(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {bf16(a), bf16(b)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return {bf16(a.x - b.x), bf16(a.y - b.y)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {bf16(a.x * b.x), bf16(a.y * b.y)}; }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {bf16(a.x * b.x + c.x), bf16(a.y * b.y + c.y)};
}

void kernel();

inline void run_lane() {
    kernel();
    running->has_ended = true;
}

// Run the blocks one after the other. The lanes take turns forwards and backwards, so that those which lack a barrier
// read too early in one of the two orders.
inline void launch(int columns, int rows, int lanes, int warps) {
    blockDim = {lanes, warps};
    gridDim = {columns, rows};
    const int count = lanes * warps, stack_bytes = 1 << 17;
    Lane* all = (Lane*)calloc(count, sizeof(Lane));
    for (int i = 0; i < count; ++i) all[i].stack = malloc(stack_bytes);
    for (int block = 0; block < columns * rows; ++block) {
        blockIdx = {block % columns, block / columns};
        block_barrier = {count};
        Warp* of_block = new Warp[count / 32];
        for (int i = 0; i < count; ++i) {
            getcontext(&all[i].context);
            all[i].context.uc_stack.ss_sp = all[i].stack;
            all[i].context.uc_stack.ss_size = stack_bytes;
            all[i].context.uc_link = &scheduler;
            all[i].has_ended = false;
            all[i].num_copies = all[i].num_ends = all[i].num_waited = all[i].num_done = 0;
            all[i].num_products = all[i].num_product_ends = 0;
            makecontext(&all[i].context, run_lane, 0);
        }
        for (int turn = 0, ended = 0; ended < count; ++turn)
            for (int i = 0; i < count; ++i) {
                const int thread = turn % 2 ? count - 1 - i : i;
                running = &all[thread];
                if (running->has_ended) continue;
                threadIdx = {thread % lanes, thread / lanes};
                warp_of_lane = &of_block[thread / 32];
                swapcontext(&scheduler, &running->context);
                ended += running->has_ended;
            }
        delete[] of_block;
    }
}
template <typename T> T* read(const char* path, size_t size) {
    T* values = (T*)malloc(size * sizeof(T));
    FILE* file = fopen(path, "rb");
    if (!file || fread(values, sizeof(T), size, file) != size) abort();
    fclose(file);
    return values;
}
template <typename T> void write(const char* path, const T* values, size_t size) {
    FILE* file = fopen(path, "wb");
    if (!file || fwrite(values, sizeof(T), size, file) != size || fclose(file)) abort();
}
