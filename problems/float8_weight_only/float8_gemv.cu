// y[m,n] = sum_k w[n,k] x[m,k] * s[n] for few tokens (M <= 8) on Hopper: w e4m3fn [N,K], read once; s fp32; x, y bf16.
// A launch lasts 5 to 30 us and is a link in a chain, so two things count: how many bytes are on their way at any
// time, and how little happens between the arrival of x (griddepcontrol.wait) and y.
//
// Weights land in shared memory, not in registers: 227 KB a multiprocessor can be on their way. A block is 16 rows of
// w, 66 KB of K = 4096, so three are resident. N = 4096 is 256 blocks, two a multiprocessor: while they compute, the
// third place already holds weights of the next launch. Before it waits for x, a block asks for as many weights as its
// buffers hold. Blocks are short and many on purpose: the hardware's scheduler balances them. The warps of a block
// split K. Each has a ring of its own (D stages of 8 steps of 64 k), which one of its threads fills (a bulk copy of up
// to 512 bytes a row and stage) and only it waits for. The block meets once, to add up.
//
// Tensor cores do the sums (mma m16n8k16; A is 16 rows of w, e4m3 -> f16, exact and one instruction for two elements).
// The order of k in a product is free as long as A and B agree: thread (g, t) reads 16 neighbouring bytes of rows g and
// g+8 at k = 64 step + 16 t. Word j of them is its part of A in product j, so its B is x[64 step + 16 t + 4 j ..+3].
// M = 1: B's column g is x of step g of the stage: a thread loads and converts 16 neighbours of x once for all 8 steps.
//   Of step i's sums only column i means anything; columns do not mix, the others are dropped. The warp scales its x by
//   a power of two, the largest magnitude to 2^14..2^15: exact where |x| is at least 2^-31 of the largest, else off by
//   at most 2^-39 of it, in bf16's whole range; NaN and Inf stay.
// M = 2..8: columns are tokens. A small kernel makes f16 rows of x first, scaled by a power of two a token.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define FOUR(v) "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)

namespace float8_gemv {
using bf16 = __nv_bfloat16;
struct Args {
  bf16* y; const bf16* x; const uint8_t* w; const float* s; const bf16 *norm, *residual; float eps; int M, N, K;
  __half* half; float* half_scale;  // M > 1: x as f16 [M,K], and what each token of it is to be multiplied by
};
DEV void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV void wait_for_last_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV uint4 load16(const void* p) {  // stays on its side of the wait; ptxas moves read-only loads (ld.global.nc) across
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : FOUR(v) : "l"(p) : "memory");
  return v;
}
DEV uint4 load_shared(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : FOUR(v) : "r"(at) : "memory");
  return v;
}
DEV void mbar_wait(uint32_t bar, uint32_t parity) {
  uint32_t ok;
  do asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                  : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  while (!ok);
}
DEV void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
DEV bool elected() {  // one thread of the warp; with lane == 0 instead, ptxas puts a loop around every bulk copy
  uint32_t ok;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ok)::"memory");
  return ok;
}
DEV uint32_t mul_bf16x2(uint32_t a, uint32_t b) { asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); return a; }
DEV uint32_t mul_f16x2(uint32_t a, uint32_t b) { asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); return a; }
template <int H> DEV uint32_t widen(uint32_t v) {  // of four e4m3 the low two (H = 0) or the high two (1), as f16
  asm("{\n.reg .b16 h<2>;\nmov.b32 {h0, h1}, %0;\ncvt.rn.f16x2.e4m3x2 %0, h%1;\n}" : "+r"(v) : "n"(H));
  return v;
}
DEV void mma(float (&d)[4], uint32_t w, uint32_t w8, uint32_t b0, uint32_t b1) {  // rows g, g + 8: 4 e4m3 of each
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(widen<0>(w)), "r"(widen<0>(w8)), "r"(widen<1>(w)), "r"(widen<1>(w8)), "r"(b0), "r"(b1));
}
DEV uint32_t word(const uint4& u, int i) { return i == 0 ? u.x : i == 1 ? u.y : i == 2 ? u.z : u.w; }
DEV uint32_t word(const uint4 (&v)[2], int i) { return word(v[i / 4], i % 4); }
DEV float low(uint32_t two_bf16) { return __uint_as_float(two_bf16 << 16); }
DEV float high(uint32_t two_bf16) { return __uint_as_float(two_bf16 & 0xffff0000u); }
DEV uint32_t to_f16x2(uint32_t v) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high(v)), "f"(low(v)));
  return v;
}
DEV uint32_t two(int biased) { return biased * 0x00800080u; }                    // 2^(biased - 127), as two bf16
DEV float power(int biased) { return __uint_as_float(uint32_t(biased) << 23); }  // and as a float
// Of the warp's largest magnitude the biased exponent; 255 where there is a NaN or Inf.
DEV int largest_exponent(const uint4 (&v)[2]) {
  uint32_t m = 0;
  UNROLL for (int i = 0; i < 8; i++) m = __vmaxu2(m, word(v, i) & 0x7fff7fffu);
  return int(__reduce_max_sync(~0u, max(m >> 16, m & 0xffffu)) >> 7);
}
constexpr int ROWS = 16;
// In a stage, row r's 512 bytes are at r % 2 * ODD + r / 2 * 512. Even and odd rows differ by 64 modulo 128, so that
// the 8 threads of one phase of a 16-byte load (64 bytes each of 2 neighbouring rows) touch every bank once.
constexpr int ODD = 4096 + 64, STAGE = 8192 + 128;
template <int W, int D, bool MULTI> struct Shape {  // offsets in shared memory; the rings are at 0
  static constexpr int BAR = W * D * STAGE, RED = BAR + W * D * 8, SQUARES = RED + W * ROWS * (MULTI ? 8 : 1) * 4;
  static constexpr int SCALES = SQUARES + W * 4, SMEM = SCALES + ROWS * 4;
  static constexpr int BLOCKS = 233472 / (SMEM + 1024);  // that a multiprocessor holds
  static_assert(SMEM <= 232448 && BLOCKS * W <= 64, "more than a multiprocessor has");
};
// W: warps of a block. D: stages of a warp's ring. MULTI: M = 2..8 tokens, else one.
template <int W, int D, bool MULTI, bool NORM, bool RESIDUAL, bool GATED>
__global__ void __launch_bounds__(W * 32, Shape<W, D, MULTI>::BLOCKS) kernel(const __grid_constant__ Args p) {
  using S = Shape<W, D, MULTI>;
  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(smem));
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int K = p.K, row0 = blockIdx.x * ROWS, all = K / 64;
  const int first = all * warp / W, steps = all * (warp + 1) / W - first, stages = (steps + 7) / 8;
  const uint32_t ring = base + warp * D * STAGE, bar = base + S::BAR + warp * D * 8;
  float *red = (float*)(smem + S::RED), *squared = (float*)(smem + S::SQUARES), *scales = (float*)(smem + S::SCALES);
  const uint8_t* w_warp = p.w + size_t(row0) * K + size_t(first) * 64;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  auto fill = [&](int i) {  // ask for stage i of this warp's part of K
    const int n = min(8, steps - 8 * i), slot = i % D;
    if (!elected()) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(bar + slot * 8), "r"(n * 64 * ROWS) : "memory");
    const uint8_t* from = w_warp + i * 512;
    uint32_t to = ring + slot * STAGE;
#pragma unroll 4
    for (int r = 0; r < ROWS; r += 2, from += 2 * size_t(K), to += 512) {
      bulk_copy(to, from, n * 64, bar + slot * 8, policy);
      bulk_copy(to + ODD, from + K, n * 64, bar + slot * 8, policy);
    }
  };
  auto arrived = [&](int i) { mbar_wait(bar + i % D * 8, i / D & 1); };
  auto fragment = [&](int i, int s, int h) {  // 16 bytes of row g + 8 h at step s
    return load_shared(ring + i % D * STAGE + (g & 1) * ODD + (h * 4 + (g >> 1)) * 512 + s * 64 + t * 16);
  };
  // Before the wait: weights, scales, norm; no kernel writes them.
  if (lane == 0) {
    for (int i = 0; i < D; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar + i * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  if (threadIdx.x < ROWS)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 ::"r"(base + S::SCALES + threadIdx.x * 4), "l"(p.s + row0 + threadIdx.x) : "memory");
  for (int i = 0; i < D; i++)
    if (i < stages) fill(i);
  allow_next_launch();  // its blocks may come as soon as all of this one's are here and there is room
  constexpr int OUTS = GATED ? ROWS / 2 : ROWS;
  const int out = threadIdx.x, out_row = GATED ? out / 8 * 16 + out % 8 : out;  // M = 1: row of y, of w
  uint4 xr[2], gr[2];
  uint32_t b[8], gain[8], gain_scale = 127;  // x and norm as f16
  const int k_thread = (first + g) * 64 + t * 16;  // M = 1: this thread's 16 k of stage 0, if that step exists
  auto load = [&](uint4 (&to)[2], const bf16* from, int i) {  // of stage i
    to[0] = to[1] = uint4{};
    if (8 * i + g < steps) to[0] = load16(from + k_thread + i * 512), to[1] = load16(from + k_thread + i * 512 + 8);
  };
  auto scale_gain = [&] {  // to f16 below 1
    gain_scale = min(253, max(1, 253 - largest_exponent(gr)));
    UNROLL for (int i = 0; i < 8; i++) gain[i] = to_f16x2(mul_bf16x2(word(gr, i), two(gain_scale)));
  };
  if constexpr (NORM) {
    load(gr, p.norm, 0), scale_gain();
    // Hardly ever true, and harmless: a use that ptxas cannot move below the wait, and scale_gain with it.
    const uint32_t any = gain[0] ^ gain[1] ^ gain[2] ^ gain[3] ^ gain[4] ^ gain[5] ^ gain[6] ^ gain[7];
    if (any == 0xdeadbeef) *(volatile uint32_t*)(squared + warp) = any;
  }
  wait_for_last_launch();  // what the launch before wrote is there now
  if constexpr (!MULTI) {
    load(xr, p.x, 0);
    uint16_t residual = 0;
    if (RESIDUAL && out < OUTS)
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(residual) : "l"(p.residual + blockIdx.x * OUTS + out) : "memory");
    float part[2] = {}, squares = 0;  // of rows g and g + 8
    for (int i = 0; i < stages; i++) {
      const int n = min(8, steps - 8 * i);
      const int x_scale = min(253, 268 - largest_exponent(xr));
      float stage_squares = 0;
      UNROLL for (int j = 0; j < 8; j++) {
        const uint32_t v = mul_bf16x2(word(xr, j), two(x_scale));
        b[j] = to_f16x2(v);
        if constexpr (NORM) {
          stage_squares = fmaf(low(v), low(v), fmaf(high(v), high(v), stage_squares));
          b[j] = mul_f16x2(b[j], gain[j]);  // the one rounding: 2^-11
        }
      }
      const float x_unit = power(254 - x_scale), unit = NORM ? x_unit * power(254 - gain_scale) : x_unit;
      squares += stage_squares * x_unit * x_unit;
      if (i + 1 < stages) load(xr, p.x, i + 1);
      if (NORM && i + 1 < stages) load(gr, p.norm, i + 1);
      arrived(i);
      float sum0 = 0, sum1 = 0;
#pragma unroll (S::BLOCKS * W > 16 ? 1 : 4)  // with 24 warps on a multiprocessor a thread has 80 registers
      for (int s = 0; s < 8; s += 2) {       // two steps at a time: their products do not wait for each other
        const uint4 a[2] = {fragment(i, s, 0), fragment(i, s + 1, 0)};
        const uint4 a8[2] = {fragment(i, s, 1), fragment(i, s + 1, 1)};
        float d[4][4] = {};  // two for each step: shorter chains
        UNROLL for (int j = 0; j < 4; j++)
          UNROLL for (int q = 0; q < 2; q++)
            mma(d[q + j % 2 * 2], word(a[q], j), word(a8[q], j), b[2 * j], b[2 * j + 1]);
        // Columns s, s + 1 are thread t = s/2's. Steps past n hold whatever was in memory, and are not looked at.
        if (2 * t == s && s < n) sum0 += d[0][0] + d[2][0], sum1 += d[0][2] + d[2][2];
        if (2 * t == s && s + 1 < n) sum0 += d[1][1] + d[3][1], sum1 += d[1][3] + d[3][3];
      }
      part[0] = fmaf(sum0, unit, part[0]), part[1] = fmaf(sum1, unit, part[1]);
      __syncwarp();  // all have read the stage before it is filled anew
      if (i + D < stages) fill(i + D);
      if (NORM && i + 1 < stages) scale_gain();
    }
    UNROLL for (int h = 0; h < 2; h++) {
      part[h] += __shfl_xor_sync(~0u, part[h], 1);
      part[h] += __shfl_xor_sync(~0u, part[h], 2);
      if (t == 0) red[warp * ROWS + h * 8 + g] = part[h];
    }
    if constexpr (NORM) {
      UNROLL for (int o = 16; o; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
      if (lane == 0) squared[warp] = squares;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");  // the rows' scales
    __syncthreads();
    if (out < OUTS) {
      float v = 0, up = 0, total = 0;
      UNROLL for (int i = 0; i < W; i++) {
        v += red[i * ROWS + out_row];
        if constexpr (GATED) up += red[i * ROWS + out_row + 8];
        if constexpr (NORM) total += squared[i];
      }
      const float r = NORM ? rsqrtf(__fdividef(total, float(K)) + p.eps) : 1.f;
      v *= scales[out_row] * r;
      if constexpr (GATED) v = __fdividef(v, 1 + __expf(-v)) * (up * scales[out_row + 8] * r);
      p.y[blockIdx.x * OUTS + out] = __float2bfloat16(v + low(residual));
    }
  } else {
    const __half* x_thread = p.half + size_t(g < p.M ? g : 0) * K + first * 64 + t * 16;
    float d[4][4] = {};
    uint4 x[4][2];
    auto load_x = [&](int at, int n) {  // 4 steps of this thread's token
      UNROLL for (int s = 0; s < 4; s++) {
        x[s][0] = x[s][1] = uint4{};
        if (g < p.M && s < n)
          x[s][0] = load16(x_thread + (at + s) * 64), x[s][1] = load16(x_thread + (at + s) * 64 + 8);
      }
    };
    for (int i = 0; i < stages; i++) {
      const int n = min(8, steps - 8 * i);
      for (int half = 0; half < 8; half += 4) {
        load_x(8 * i + half, n - half);
        if (half == 0) arrived(i);
        UNROLL for (int s = 0; s < 4; s++)
          if (half + s < n) {
            const uint4 a = fragment(i, half + s, 0), a8 = fragment(i, half + s, 1);
            UNROLL for (int j = 0; j < 4; j++)
              mma(d[j], word(a, j), word(a8, j), word(x[s], 2 * j), word(x[s], 2 * j + 1));
          }
      }
      __syncwarp();
      if (i + D < stages) fill(i + D);
    }
    UNROLL for (int c = 0; c < 4; c++)  // row g + 8 (c / 2), token 2 t + c % 2
      red[(warp * 8 + 2 * t + c % 2) * ROWS + c / 2 * 8 + g] = d[0][c] + d[1][c] + d[2][c] + d[3][c];
    asm volatile("cp.async.wait_all;" ::: "memory");  // the rows' scales
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * p.M; i += W * 32) {
      const int m = i / ROWS, r = i % ROWS;
      float v = 0;
      UNROLL for (int q = 0; q < W; q++) v += red[(q * 8 + m) * ROWS + r];
      const float scale = scales[r] * *(volatile const float*)(p.half_scale + m);  // volatile: read after the wait
      p.y[size_t(m) * p.N + row0 + r] = __float2bfloat16(v * scale);
    }
  }
}
// A block a token: x as f16, scaled by a power of two, largest magnitude 2^14..2^15; and that power's inverse.
__global__ void __launch_bounds__(512) to_half(const __grid_constant__ Args p) {
  __shared__ uint32_t most;
  if (threadIdx.x == 0) most = 0;
  allow_next_launch();
  __syncthreads();
  wait_for_last_launch();
  const bf16* x = p.x + size_t(blockIdx.x) * p.K;
  uint32_t m = 0;
  for (int k = threadIdx.x * 8; k < p.K; k += 4096) {
    const uint4 v = load16(x + k);
    UNROLL for (int i = 0; i < 4; i++) m = __vmaxu2(m, word(v, i) & 0x7fff7fffu);
  }
  m = __reduce_max_sync(~0u, max(m >> 16, m & 0xffffu));
  if (threadIdx.x % 32 == 0) atomicMax(&most, m);
  __syncthreads();
  const int scale = min(253, 268 - int(most >> 7));
  for (int k = threadIdx.x * 8; k < p.K; k += 4096) {
    const uint4 v = load16(x + k);
    auto half = [&](uint32_t two_bf16) { return to_f16x2(mul_bf16x2(two_bf16, two(scale))); };
    *(uint4*)(p.half + size_t(blockIdx.x) * p.K + k) = make_uint4(half(v.x), half(v.y), half(v.z), half(v.w));
  }
  if (threadIdx.x == 0) p.half_scale[blockIdx.x] = power(254 - scale);
}
template <void (*F)(Args)> int start(int blocks, int threads, int smem, const Args& p, cudaStream_t stream) {
  // One carve-out for all kernels of the chain: a multiprocessor changes it only when empty, which ends the overlap.
  static const int e[] = {
      cudaFuncSetAttribute(F, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      cudaFuncSetAttribute(F, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)};
  if (e[0] || e[1]) return e[0] ? e[0] : e[1];
  cudaLaunchAttribute early{cudaLaunchAttributeProgrammaticStreamSerialization};
  early.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t c{dim3(blocks), dim3(threads), size_t(smem), stream, &early, 1};
  return int(cudaLaunchKernelEx(&c, F, p));
}
template <int W, int D, bool MULTI = false, bool NORM = false, bool RESIDUAL = false, bool GATED = false>
int launch(const Args& p, cudaStream_t stream) {
  return start<kernel<W, D, MULTI, NORM, RESIDUAL, GATED>>(p.N / ROWS, W * 32, Shape<W, D, MULTI>::SMEM, p, stream);
}
template <int W, int D> int launch_one(const Args& p, bool gated, cudaStream_t stream) {
  if (p.residual) return p.norm || gated ? -2 : launch<W, D, false, false, true>(p, stream);
  if (p.norm) return gated ? launch<W, D, false, true, false, true>(p, stream) : launch<W, D, false, true>(p, stream);
  return gated ? launch<W, D, false, false, false, true>(p, stream) : launch<W, D>(p, stream);
}
}  // namespace float8_gemv

// y [M,N] (gated: [N/2]) and x [M,K] bf16, w [N,K] e4m3fn, s [N] fp32, norm [K] and residual, as y, bf16; all dense;
// x, w, norm and scratch 16-byte aligned; 1 <= M <= 8, N % 16 == 0, K % 64 == 0.
// M = 1: norm, residual may be null; with norm x is RMS-normalised with this weight and eps first; gated: w's rows are
// 8 gate rows, 8 up rows, and so on, y = silu(gate) * up. Residual goes with neither. scratch is not used.
// M > 1: norm and residual null, gated 0; scratch: M * (2 K + 4) bytes, which what the stream runs next may reuse.
// Returns 0, a CUDA error, -1 (sizes out of range) or -2 (combination not built). One GPU a process: the first used.
extern "C" int float8_gemv_launch(void* y, const void* x, const void* w, const float* s, const void* norm, float eps,
    const void* residual, int gated, void* scratch, int M, int N, int K, cudaStream_t stream) {
  using namespace float8_gemv;
  if (M < 1 || M > 8 || N < ROWS || N % ROWS || K < 64 || K % 64) return -1;
  Args p{(bf16*)y, (const bf16*)x, (const uint8_t*)w, s, (const bf16*)norm, (const bf16*)residual, eps, M, N, K};
  // Which W and D: the fastest of nine, measured on an H200 for the linears of an 8B model.
  if (M == 1 && K > 8192) return launch_one<4, 3>(p, gated, stream);
  if (M == 1) return N <= 16384 ? launch_one<8, 1>(p, gated, stream) : launch_one<2, 2>(p, gated, stream);
  if (norm || residual || gated || !scratch) return -2;
  p.half = (__half*)scratch, p.half_scale = (float*)(p.half + size_t(M) * K);
  if (const int e = start<to_half>(M, 512, 0, p, stream)) return e;
  return K > 8192 || N < 12000 ? launch<8, 1, true>(p, stream) : launch<4, 1, true>(p, stream);
}
