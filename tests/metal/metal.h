// A C++ stand-in for the parts of the Metal Shading Language that mlx.fast.metal_kernel sources use.
// Each threadgroup runs as fibers of one OS thread; simd functions and barriers are rendezvous points.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#include <cstdlib>
#include <cstdio>
#include <vector>
#include <type_traits>
#include <algorithm>
typedef unsigned int uint; typedef unsigned short ushort; typedef unsigned char uchar;
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>> bfloat16_t(T v) { float f = float(v); uint32_t u; memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) { bits = 0x7fc0; return; }
    u += 0x7fff + ((u >> 16) & 1); bits = uint16_t(u >> 16); }
  operator float() const { uint32_t u = uint32_t(bits) << 16; float f; memcpy(&f, &u, 4); return f; }
  bfloat16_t& operator+=(float o) { *this = bfloat16_t(float(*this) + o); return *this; }
};
typedef bfloat16_t bfloat;
typedef _Float16 half; typedef _Float16 float16_t;
typedef float float32_t;
struct uint3 { uint x, y, z; };
struct float2 { float x, y; float& operator[](int i) { return i ? y : x; } };
#define device
#define thread
#define constant
#define threadgroup static
namespace metal {
  inline float cos(float x) { return std::cos(x); } inline float sin(float x) { return std::sin(x); }
  inline float exp(float x) { return std::exp(x); } inline float log(float x) { return std::log(x); }
  template <class A, class B> inline auto max(A a, B b) { return a > b ? a : b; }
  template <class A, class B> inline auto min(A a, B b) { return a < b ? a : b; }
  namespace fast { inline float exp(float x) { return std::exp(x); } }
  namespace precise { inline float exp(float x) { return std::exp(x); } }
}
namespace fast { using metal::fast::exp; }
using metal::max; using metal::min;
template <class T, class U> inline T as_type(U u) { static_assert(sizeof(T) == sizeof(U)); T t; memcpy(&t, &u, sizeof(T)); return t; }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
// ---- fibers ----
struct Fiber { void* sp; char* stack; bool done; uint3 tid; uint lane, simd; };
extern "C" void fm_switch(void** save, void* load);
asm(R"(
.text
.globl fm_switch
.hidden fm_switch
.type fm_switch,@function
fm_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
static std::vector<Fiber> fm_fibers; static uint fm_current; static void* fm_main;
static float fm_slot_f[2048]; static uint fm_arrived_group[64]; static uint fm_size;
static uint3 thread_position_in_grid_, thread_position_in_threadgroup_, threadgroup_position_in_grid_, threads_per_threadgroup_, threads_per_grid_;
static void (*fm_body)();
// Every rendezvous is a plain yield to the scheduler, which resumes the fibers in order: all have arrived when the first runs again.
static inline void fm_yield() { Fiber& me = fm_fibers[fm_current]; fm_switch(&me.sp, fm_main); }
static void fm_entry() { fm_body(); fm_fibers[fm_current].done = true; for (;;) fm_yield(); }
#define FM_ME fm_fibers[fm_current]
static inline float fm_all(float v, bool is_max) {
  uint base = FM_ME.simd * 32, me = fm_current; fm_slot_f[me] = v; fm_yield();
  // the order of simd_sum on Apple GPUs: butterfly 1,2,4,8,16
  float t[32]; uint n = std::min(32u, fm_size - base); for (uint i = 0; i < 32; ++i) t[i] = i < n ? fm_slot_f[base + i] : (is_max ? -INFINITY : 0.0f);
  for (uint s = 1; s < 32; s <<= 1) { float u[32]; for (uint i = 0; i < 32; ++i) u[i] = is_max ? std::max(t[i], t[i ^ s]) : t[i] + t[i ^ s]; memcpy(t, u, sizeof t); }
  float r = t[FM_ME.lane]; fm_yield(); return r;
}
static inline float simd_sum(float v) { return fm_all(v, false); }
static inline float simd_max(float v) { return fm_all(v, true); }
static inline float fm_from(float v, uint lane) { uint base = FM_ME.simd * 32; fm_slot_f[fm_current] = v; fm_yield(); float r = lane < 32 ? fm_slot_f[base + lane] : v; fm_yield(); return r; }
static inline float simd_shuffle_xor(float v, ushort m) { return fm_from(v, FM_ME.lane ^ m); }
static inline float simd_shuffle_down(float v, ushort d) { return fm_from(v, FM_ME.lane + d); }
static inline float simd_shuffle(float v, ushort l) { return fm_from(v, l); }
static inline void threadgroup_barrier(mem_flags) { fm_yield(); fm_yield(); }
static inline void simdgroup_barrier(mem_flags) { fm_yield(); fm_yield(); }
#define thread_position_in_grid (uint3{threadgroup_position_in_grid_.x * threads_per_threadgroup_.x + FM_ME.tid.x, threadgroup_position_in_grid_.y * threads_per_threadgroup_.y + FM_ME.tid.y, threadgroup_position_in_grid_.z * threads_per_threadgroup_.z + FM_ME.tid.z})
#define thread_position_in_threadgroup (FM_ME.tid)
#define threadgroup_position_in_grid (threadgroup_position_in_grid_)
#define threads_per_threadgroup (threads_per_threadgroup_)
#define thread_index_in_simdgroup (FM_ME.lane)
#define simdgroup_index_in_threadgroup (FM_ME.simd)
static void dispatch_(void (*body)(), uint3 grid, uint3 group) {
  const size_t STACK = 64 * 1024; fm_body = body;
  group = {std::min(group.x, grid.x), std::min(group.y, grid.y), std::min(group.z, grid.z)};
  threads_per_threadgroup_ = group; threads_per_grid_ = grid;
  uint3 num = {(grid.x + group.x - 1) / group.x, (grid.y + group.y - 1) / group.y, (grid.z + group.z - 1) / group.z};
  std::vector<char*> stacks;
  for (uint gz = 0; gz < num.z; ++gz) for (uint gy = 0; gy < num.y; ++gy) for (uint gx = 0; gx < num.x; ++gx) {
    threadgroup_position_in_grid_ = {gx, gy, gz}; fm_fibers.clear();
    // dispatchThreads: threadgroups at the edge of the grid are smaller
    uint sx = std::min(group.x, grid.x - gx * group.x), sy = std::min(group.y, grid.y - gy * group.y), sz = std::min(group.z, grid.z - gz * group.z);
    uint i = 0;
    for (uint z = 0; z < sz; ++z) for (uint y = 0; y < sy; ++y) for (uint x = 0; x < sx; ++x, ++i) {
      Fiber f; if (stacks.size() <= i) stacks.push_back((char*)aligned_alloc(64, STACK)); f.stack = stacks[i];
      f.done = false; f.tid = {x, y, z}; f.lane = i % 32; f.simd = i / 32;
      void** top = (void**)(f.stack + STACK - 64); *--top = nullptr; *--top = (void*)fm_entry; for (int r = 0; r < 6; ++r) *--top = nullptr; f.sp = top; fm_fibers.push_back(f);
    }
    fm_size = i; if (fm_size > 2048) { fprintf(stderr, "threadgroup too large\n"); abort(); }
    bool live = true;
    while (live) { live = false; for (fm_current = 0; fm_current < fm_size; ++fm_current) { Fiber& f = fm_fibers[fm_current]; if (!f.done) { fm_switch(&fm_main, f.sp); live |= !f.done; } } }
  }
  for (char* s : stacks) free(s);
}
