// Runs a CUDA kernel on a CPU, thread by thread: what `unet_step.cu` needs of CUDA C++ and of hopper_ptx.cuh.
//
// Each CUDA thread is a fiber with a stack of its own. A fiber runs until it must wait: for the other lanes of its warp
// (shuffle, tensor core), for a barrier, for a word that another block writes. Blocks and warps take turns in an order
// drawn from a seed, so a missing barrier, a bulk copy that is not waited for, or a wait that never ends shows here;
// memory that nobody wrote is NaN. Copies arrive late. What it cannot show: time, and a weaker memory order than a CPU's.
#pragma once
#define HOPPER_PTX  // this file is in its place
#define CUDA_ON_CPU
#include <sys/mman.h>
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>
#define DEV inline
#define UNROLL
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) uint8_t* name = on_cpu::current->block->shared.data()
#define threadIdx (on_cpu::current->index)
#define blockIdx (on_cpu::current->block->index)

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Dim { unsigned x; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline void mbar_settle(uint64_t* bar);

namespace on_cpu {
struct Block;
struct Warp {
  int arrived = 0;
  uint64_t round = 0;
  uint32_t value[32];
  float* d[32];
  uint4 a[32];
  uint32_t b[32][2];
};
struct Fiber {
  ucontext_t context;
  Dim index;
  Block* block;
  Warp* warp;
  bool done = false, polled = false;
  const uint64_t* waits_for = nullptr;  // until it is no longer `round`
  uint64_t round = 0;
};
struct Copy { void* to; const void* from; uint32_t bytes; uint64_t* bar; };
struct Barrier { int arrived = 0; uint64_t round = 0; };
struct Block {
  Dim index;
  std::vector<uint8_t> shared;
  std::vector<Warp> warps;
  Barrier barriers[2];
  std::vector<Copy> copies;
};
inline thread_local Fiber* current;
inline thread_local ucontext_t scheduler;
inline thread_local std::function<void()>* body;

#if defined(__x86_64__)  // swapcontext makes a system call each time; this is the same in eleven instructions
inline thread_local void* scheduler_stack;
extern "C" void on_cpu_switch(void** save, void* to);
asm(R"(.text
.weak on_cpu_switch
on_cpu_switch:
 push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
 mov %rsp, (%rdi); mov %rsi, %rsp
 pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret)");
#define FIBER_STACK(f) (*reinterpret_cast<void**>(&(f)->context))
inline void leave() { on_cpu_switch(&FIBER_STACK(current), scheduler_stack); }
inline void enter(Fiber* f) { current = f; on_cpu_switch(&scheduler_stack, FIBER_STACK(f)); }
#else
inline void leave() { swapcontext(&current->context, &scheduler); }
inline void enter(Fiber* f) { current = f; swapcontext(&scheduler, &f->context); }
#endif
inline void start() { (*body)(); current->done = true; leave(); }
inline void prepare(Fiber* f, char* stack, size_t size) {
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(stack + size) - 1;  // a function starts 8 bytes off a multiple of 16
  *--top = reinterpret_cast<void*>(+[] { start(); });
  FIBER_STACK(f) = top - 6;
#else
  getcontext(&f->context);
  f->context.uc_stack = {stack, 0, size};
  makecontext(&f->context, start, 0);
#endif
}
inline void wait_for_change(const uint64_t& round) { current->waits_for = &round, current->round = round, leave(); }
template <class Last> void warp_meets(Last last) {  // `last` runs once, when all 32 lanes are there
  Warp& w = *current->warp;
  if (++w.arrived < 32) return wait_for_change(w.round);
  last(w), w.arrived = 0, w.round++;
}
inline void block_meets(int which, int threads) {
  Barrier& bar = current->block->barriers[which];
  if (++bar.arrived < threads) return wait_for_change(bar.round);
  bar.arrived = 0, bar.round++;
}

// 1 where every fiber finished; 0 where nobody can go on.
inline int run(int blocks, int threads, int shared_bytes, unsigned seed, std::function<void()> kernel) {
  constexpr size_t STACK = 16384;
  std::mt19937 random(seed);
  std::vector<Block> grid(blocks);
  std::vector<Fiber> fibers(size_t(blocks) * threads);
  const size_t bytes = fibers.size() * STACK;
  char* stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) return 0;
  body = &kernel;
  for (int i = 0; i < blocks; i++) {
    grid[i].index = {unsigned(i)}, grid[i].shared.assign(shared_bytes, 0xff), grid[i].warps.resize(threads / 32);
    for (int k = 0; k < threads; k++) {
      Fiber& f = fibers[size_t(i) * threads + k];
      f.index = {unsigned(k)}, f.block = &grid[i], f.warp = &grid[i].warps[k / 32];
      prepare(&f, stacks + (size_t(i) * threads + k) * STACK, STACK);
    }
  }
  std::vector<int> order(blocks), warps(threads / 32);
  std::iota(order.begin(), order.end(), 0), std::iota(warps.begin(), warps.end(), 0);
  size_t left = fibers.size();
  int idle = 0;
  const int slow = int(random() % warps.size());  // one warp of each block comes behind the others
  while (left && idle < 2000) {
    idle++;
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      if (random() % 4 == 0) continue;  // some blocks lag behind
      Block& block = grid[i];
      for (size_t c = 0; c < block.copies.size();) {  // any order, some later
        if (random() % 2) { c++; continue; }
        const Copy copy = block.copies[c];
        block.copies.erase(block.copies.begin() + c);
        memcpy(copy.to, copy.from, copy.bytes);
        *copy.bar -= uint64_t(copy.bytes) << 32;
        mbar_settle(copy.bar), idle = 0;
      }
      for (int k = 0; k < threads; k++) fibers[size_t(i) * threads + k].polled = false;
      for (bool moved = true; moved;) {
        moved = false;
        std::shuffle(warps.begin(), warps.end(), random);
        for (int w : warps) {
          if (w == slow && random() % 8) continue;
          for (int k = w * 32; k < w * 32 + 32; k++) {
            Fiber& f = fibers[size_t(i) * threads + k];
            if (f.done || f.polled || (f.waits_for && *f.waits_for == f.round)) continue;
            f.waits_for = nullptr;
            enter(&f);
            left -= f.done;
            if (!f.polled) moved = true, idle = 0;
          }
        }
      }
    }
  }
  munmap(stacks, bytes);
  return left == 0;
}
}  // namespace on_cpu

// A barrier in shared memory: bits 0-7 arrivals wanted, 8-15 still missing, 16 parity, 32-63 bytes still missing.
inline void mbar_settle(uint64_t* bar) {
  if ((*bar >> 8 & 0xff) == 0 && *bar >> 32 == 0) *bar = (*bar ^ 1 << 16) + ((*bar & 0xff) << 8);
}
DEV void mbar_init(uint64_t* bar, uint32_t arrivals) { *bar = arrivals | arrivals << 8; }
DEV void mbar_init_done() {}
DEV void mbar_expect(uint64_t* bar, uint32_t bytes) { *bar += (uint64_t(bytes) << 32) - (1 << 8), mbar_settle(bar); }
DEV void mbar_arrive(uint64_t* bar) { *bar -= 1 << 8, mbar_settle(bar); }
DEV bool mbar_try_wait(uint64_t* bar, uint32_t parity) { return (*bar >> 16 & 1) != parity; }
DEV uint64_t policy_evict_first() { return 0; }
DEV uint64_t policy_evict_last() { return 0; }
DEV void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* bar, uint64_t) {
  if (uintptr_t(to) % 16 || uintptr_t(from) % 16 || bytes % 16) fprintf(stderr, "misaligned bulk copy\n"), abort();
  on_cpu::current->block->copies.push_back({to, from, bytes, bar});
}
DEV void here_and_now(float&) {}
DEV uint32_t cycles() { static uint32_t count = 0; return ++count; }
DEV void spin() { on_cpu::current->polled = true, on_cpu::leave(); }
DEV float load_relaxed(const float* p) { return *const_cast<const volatile float*>(p); }
template <int N> void load_relaxed(float (&v)[N], const float* p) {
  if (uintptr_t(p) % (4 * N)) fprintf(stderr, "misaligned load\n"), abort();
  for (int i = 0; i < N; i++) v[i] = load_relaxed(p + i);
}
DEV void store_relaxed(float* p, float v) { *const_cast<volatile float*>(p) = v; }
DEV void store_relaxed(float4* p, float4 v) { *p = v; }
DEV void add_release(uint32_t* p) { ++*p; }
DEV uint32_t load_acquire(const uint32_t* p) { return *const_cast<const volatile uint32_t*>(p); }
DEV uint32_t load_acquire_block(const uint32_t* p) { return load_acquire(p); }
DEV void store_release_block(uint32_t* p, uint32_t v) { *const_cast<volatile uint32_t*>(p) = v; }
DEV void fence_gpu() {}
template <int THREADS> DEV void meet() { on_cpu::block_meets(1, THREADS); }
DEV void __syncwarp() { on_cpu::warp_meets([](on_cpu::Warp&) {}); }
DEV void __syncthreads() { on_cpu::block_meets(0, int(on_cpu::current->block->warps.size()) * 32); }
DEV bool elected() { return threadIdx.x % 32 == 0; }

inline uint32_t __float_as_uint(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }
template <class T> T shuffle(T v, std::function<int(int)> from) {
  static_assert(sizeof(T) == 4);
  const int lane = threadIdx.x % 32;
  memcpy(&on_cpu::current->warp->value[lane], &v, 4);
  on_cpu::warp_meets([&](on_cpu::Warp& w) {
    uint32_t old[32];
    memcpy(old, w.value, sizeof old);
    for (int i = 0; i < 32; i++) w.value[i] = old[from(i)];
  });
  memcpy(&v, &on_cpu::current->warp->value[lane], 4);
  return v;
}
template <class T> T __shfl_xor_sync(uint32_t, T v, int mask) { return shuffle(v, [mask](int i) { return i ^ mask; }); }
template <class T> T __shfl_sync(uint32_t, T v, int lane) { return shuffle(v, [lane](int) { return lane; }); }
template <class T> T __ldg(const T* p) { return *p; }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline void sincospif(float v, float* s, float* c) { *s = float(std::sin(M_PI * v)), *c = float(std::cos(M_PI * v)); }

inline uint16_t round_bf16(float v) {
  const uint32_t u = __float_as_uint(v);
  return v != v ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float widen_bf16(uint16_t v) { return __uint_as_float(uint32_t(v) << 16); }
inline float widen_f16(uint16_t v) { _Float16 h; memcpy(&h, &v, 2); return float(h); }
inline uint16_t round_f16(float v) { const _Float16 h = _Float16(v); uint16_t u; memcpy(&u, &h, 2); return u; }
inline float tf32(uint32_t v) { return __uint_as_float(v & 0xffffe000u); }  // what the tensor cores look at

// PTX ISA, fragments of mma.m16n8k8 and m16n8k16. PER values a register; at(register, part) its value.
template <int PER, class At> void mma(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1, At at) {
  on_cpu::Warp& mine = *on_cpu::current->warp;
  const int lane = threadIdx.x % 32;
  mine.d[lane] = d, mine.a[lane] = a, mine.b[lane][0] = b0, mine.b[lane][1] = b1;
  on_cpu::warp_meets([&](on_cpu::Warp& w) {
    float rows[16][8 * PER], columns[8 * PER][8];
    for (int i = 0; i < 32; i++)
      for (int part = 0; part < PER; part++) {
        const int g = i / 4, k = i % 4 * PER + part;
        rows[g][k] = at(w.a[i].x, part), rows[g + 8][k] = at(w.a[i].y, part);
        rows[g][k + 4 * PER] = at(w.a[i].z, part), rows[g + 8][k + 4 * PER] = at(w.a[i].w, part);
        columns[k][g] = at(w.b[i][0], part), columns[k + 4 * PER][g] = at(w.b[i][1], part);
      }
    for (int i = 0; i < 32; i++)
      for (int c = 0; c < 4; c++) {
        float sum = w.d[i][c];
        for (int k = 0; k < 8 * PER; k++) sum += rows[i / 4 + c / 2 * 8][k] * columns[k][i % 4 * 2 + c % 2];
        w.d[i][c] = sum;
      }
  });
}
DEV void mma_tf32(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  mma<1>(d, a, b0, b1, [](uint32_t v, int) { return tf32(v); });
}
DEV void mma_bf16(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  mma<2>(d, a, b0, b1, [](uint32_t v, int part) { return widen_bf16(uint16_t(v >> 16 * part)); });
}
DEV void mma_f16(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  mma<2>(d, a, b0, b1, [](uint32_t v, int part) { return widen_f16(uint16_t(v >> 16 * part)); });
}
