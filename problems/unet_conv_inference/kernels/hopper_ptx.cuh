// The instructions that CUDA C++ has no words for, one function each, and nothing else: what unet_step.cu needs of a
// Hopper GPU. tests/problems/cuda_on_cpu.h has the same functions for a CPU, so that the kernel's own text is tested
// where there is no GPU.
#ifndef HOPPER_PTX
#define HOPPER_PTX
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

DEV uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Barriers in shared memory that count arrivals, and bytes of bulk copies.
DEV void mbar_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
DEV void mbar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
DEV void mbar_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
DEV void mbar_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
DEV bool mbar_try_wait(uint64_t* bar, uint32_t parity) {
  uint32_t ok;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(ok) : "r"(shared_address(bar)), "r"(parity) : "memory");
  return ok;
}
DEV uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEV uint64_t policy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEV void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* bar, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(policy) : "memory");
}
DEV bool elected() {  // one thread of the warp; with lane == 0 instead, ptxas puts a loop around every bulk copy
  uint32_t ok;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ok)::"memory");
  return ok;
}

// Words that other blocks write while this one runs. Relaxed: each word stands for itself (see "Exchange").
DEV float load_relaxed(const float* p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DEV void load_relaxed(float (&v)[1], const float* p) { v[0] = load_relaxed(p); }
DEV void load_relaxed(float (&v)[2], const float* p) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "l"(p) : "memory");
}
DEV void store_relaxed(float* p, float v) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }
DEV void store_relaxed(float4* p, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Counters of all blocks.
DEV void add_release(uint32_t* p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
DEV uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Flags between warps of a block.
DEV uint32_t load_acquire_block(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
DEV void store_release_block(uint32_t* p, uint32_t v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}
template <int THREADS> DEV void meet() {  // these threads of the block, not all of it
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
DEV void here_and_now(float& v) { asm volatile("" : "+f"(v)); }  // computed at this place, not where it is used
DEV uint32_t cycles() { return uint32_t(clock64()); }
DEV void spin() {}  // between two looks at what is not there yet

// d [16 x 8] += a [16 x k] b [k x 8]: 32 bytes of k. Thread 4 g + t holds rows g, g + 8 of a and d, column g of b.
#define MMA(SHAPE, TYPE)                                                                                             \
  asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1))
DEV void mma_tf32(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) { MMA("m16n8k8", "tf32"); }
DEV void mma_bf16(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) { MMA("m16n8k16", "bf16"); }
DEV void mma_f16(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) { MMA("m16n8k16", "f16"); }
#undef MMA

DEV uint16_t round_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
DEV uint16_t round_f16(float v) { return __half_as_ushort(__float2half_rn(v)); }
DEV float widen_bf16(uint16_t v) { return __uint_as_float(uint32_t(v) << 16); }
DEV float widen_f16(uint16_t v) { return __half2float(__ushort_as_half(v)); }
#endif
