// y[M,N] = x[M,K] . (w[N,K] * s[N])^T on Hopper (sm_90a): x, y bf16, w fp8 e4m3fn, s fp32, fp32 accumulation.
//
// The product is computed transposed. The tensor cores take their A operand from registers and B from shared memory,
// so A is w (fp8 -> bf16 in registers on the way, no bf16 copy of w anywhere) and B is x, as the copy engine left it.
// A block makes 128 rows of w x 256 tokens: two consumer warpgroups of 64 rows each (128 accumulators a thread), and one
// producer thread that keeps the copy engine STAGES steps of 64 k ahead, over output tiles too, so that a tile's epilogue
// runs while the next tile's data arrives. Two blocks with the same tokens form a cluster, each fetches half of the
// x tile and multicasts it to both; this halves the x traffic out of L2 (24 rather than 40 KB a step and block).
//
// To add to y instead of writing it, the copy engine adds on its way out. Rows of w may lie further apart than K.
//
// Not a number (codes 0x7f, 0xff) is read as +-480: quantised weights have none (a row that is not finite has a scale of NaN).
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>

namespace float8_gemm {

constexpr int ROWS = 128, TOKENS = 256, BK = 64, STAGES = 4, THREADS = 384;
constexpr int CL = 2;           // blocks in a cluster
constexpr int TOKEN_GROUP = 8;  // token tiles that go through w together
constexpr int X_STAGE = TOKENS * BK * 2, W_STAGE = ROWS * BK;            // bytes
constexpr int W_AT = STAGES * X_STAGE, Y_AT = W_AT + STAGES * W_STAGE;   // offsets in shared memory; x is at 0
constexpr int Y_HALF = TOKENS * 64 * 2;                                  // a warpgroup's output tile: 256 tokens x 64 rows
constexpr int BAR_AT = Y_AT + 2 * Y_HALF;
constexpr int SMEM = BAR_AT + STAGES * 16 + 1024;                        // 1024: the base is aligned by hand
static_assert(SMEM <= 232448, "more shared memory than a block can have");

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  uint32_t ok;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  } while (!ok);
}
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ uint32_t at_rank(uint32_t address, uint32_t rank) {  // the same shared address in that block
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
__device__ __forceinline__ void mbar_arrive_cluster(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, int c0, int c1, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(bar) : "memory");
}
__device__ __forceinline__ void load_tile_multicast(uint32_t to, const CUtensorMap* map, int c0, int c1, uint32_t bar, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(bar), "h"(mask) : "memory");
}
__device__ __forceinline__ void store_tile(const CUtensorMap* map, int c0, int c1, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
               "cp.async.bulk.commit_group;" ::"l"(map), "r"(c0), "r"(c1), "r"(from) : "memory");
}
__device__ __forceinline__ void add_tile(const CUtensorMap* map, int c0, int c1, uint32_t from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];\n"
               "cp.async.bulk.commit_group;" ::"l"(map), "r"(c0), "r"(c1), "r"(from) : "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// d[64 rows x 256 tokens] (+)= a[64 x 16] . b[256 x 16]^T; not the old d where keep is 0
__device__ __forceinline__ void wgmma(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,"
      "%122,%123,%124,%125,%126,%127}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;\n}"
      : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80), D16(96), D16(112)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// r holds two e4m3 codes in the high bytes of its halves. Their bits, moved to a bf16's place (seeemmm -> s0000eeeemmm0000),
// read 2^120 times too small because of the other exponent bias; the product puts that right, exactly, subnormals too.
__device__ __forceinline__ uint32_t to_bf16x2(uint32_t r) {
  uint32_t v = (r & 0x80008000u) | ((r >> 4) & 0x07f007f0u), out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(v), "r"(0x7b807b80u));
  return out;
}

// A thread's part of A for 16 k: of rows g and g+8 the elements k = 2t, 2t+1 and 2t+8, 2t+9, so 2 bytes of each 8 of a row.
// The tile's rows are 64 bytes, its 16-byte chunks exclusive-ored with bits 1-2 of the row by the copy engine: no bank
// conflicts.
__device__ __forceinline__ void load_raw(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(r[0]) : "r"(at));
  asm volatile("ld.shared.u16 %0, [%1+512];" : "=r"(r[1]) : "r"(at));
  asm volatile("ld.shared.u16 %0, [%1+8];" : "=r"(r[2]) : "r"(at));
  asm volatile("ld.shared.u16 %0, [%1+520];" : "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void convert(uint32_t (&a)[4], const uint32_t (&r)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = to_bf16x2(__byte_perm(r[i], 0, 0x1404));
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<uint32_t&>(v);
}
__device__ __forceinline__ void store_transposed(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// Output tile `tile`: a cluster's CL*128 rows and 256 tokens. Neighbours in time share rows and have the next tokens, up to
// TOKEN_GROUP token tiles, so that a wave of 66 clusters reads all of w once and x from L2.
struct Tiles {
  int token_tiles, row_tiles;
  __device__ int count() const { return token_tiles * row_tiles; }
  __device__ void locate(int tile, int& row_tile, int& token_tile) const {
    const int group = tile / (TOKEN_GROUP * row_tiles), rest = tile - group * TOKEN_GROUP * row_tiles;
    const int width = min(token_tiles - group * TOKEN_GROUP, TOKEN_GROUP);
    row_tile = rest / width;
    token_tile = group * TOKEN_GROUP + rest - row_tile * width;
  }
};

template <bool GATED>
__global__ void __cluster_dims__(CL, 1, 1) __launch_bounds__(THREADS, 1)
kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
       const float* __restrict__ scale, int M, int N, int K, int add) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t smem = (static_cast<uint32_t>(__cvta_generic_to_shared(smem_raw)) + 1023) & ~1023u;
  const uint32_t full = smem + BAR_AT, empty = full + STAGES * 8;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const Tiles tiles{(M + TOKENS - 1) / TOKENS, (N + CL * ROWS - 1) / (CL * ROWS)};
  const int first = blockIdx.x / CL, step = gridDim.x / CL, steps_k = K / BK;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbar_init(full + i * 8, 1);          // the producer's own arrival, and the bytes it expects
      mbar_init(empty + i * 8, 8 * CL);    // each consumer warp of each block that this stage's x went to
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");

  if (threadIdx.x < 128) {  // producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      int stage = 0, phase = 0;
      for (int tile = first; tile < tiles.count(); tile += step) {
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        const int row = (row_tile * CL + rank) * ROWS, token = token_tile * TOKENS;
        for (int k = 0; k < steps_k; k++) {
          const uint32_t bar = full + stage * 8, xs = smem + stage * X_STAGE;
          mbar_wait(empty + stage * 8, phase ^ 1);
          mbar_expect(bar, X_STAGE + W_STAGE);  // always whole boxes: what lies outside a matrix arrives as zeros
          load_tile(smem + W_AT + stage * W_STAGE, &w_map, k * BK, row, bar);
          load_tile_multicast(xs + rank * (X_STAGE / 2), &x_map, k * BK, token + rank * (TOKENS / 2), bar, 3);
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
      }
    }
  } else {  // consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t w_at = smem + W_AT + (group * 64 + warp * 16 + g) * BK + ((g / 2 % 4) << 4) + 2 * t;
    const uint32_t release = at_rank(empty, lane < CL ? lane : 0);  // lane i frees a stage in block i of the cluster
    const uint32_t y_half = smem + Y_AT + group * Y_HALF;
    // x tile: 128-byte rows in 1024-byte groups of 8, 128-byte swizzle; the next 16 k are 32 bytes on
    const uint64_t x_desc = (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | (smem >> 4);
    int left = 0;  // steps of k to do, over all tiles
    for (int tile = first; tile < tiles.count(); tile += step) left += steps_k;

    float d[128];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    uint32_t a[4][4], raw[4];
    int stage = 0, phase = 0;
    if (left) {
      mbar_wait(full, 0);
      load_raw(raw, w_at);
    }
    for (int tile = first; tile < tiles.count(); tile += step) {
      int row_tile, token_tile;
      tiles.locate(tile, row_tile, token_tile);
      const int row = (row_tile * CL + rank) * ROWS + group * 64, my_row = row + warp * 16 + g;
      const float s0 = row < N ? __ldg(scale + my_row) : 0.f, s1 = row < N ? __ldg(scale + my_row + 8) : 0.f;  // N % 64 == 0

      for (int k = 0; k < steps_k; k++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {  // 16 k: at most 4 products in flight, and a[j] belongs to the one 4 back
          wgmma_wait<3>();
          if (j == 3 && k > 0 && lane < CL) mbar_arrive_cluster(release + (stage ? stage - 1 : STAGES - 1) * 8);  // all of k-1 is done
          convert(a[j], raw);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          wgmma(d, a[j], x_desc + ((stage * X_STAGE + j * 32) >> 4), j > 0 || k > 0);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          if (j < 3) {  // fetch the next 16 k's bytes while the products run
            load_raw(raw, (w_at ^ ((j + 1) << 4)) + stage * W_STAGE);
          } else {
            if (++stage == STAGES) stage = 0, phase ^= 1;
            if (--left) {  // of the next tile, when this one ends
              mbar_wait(full + stage * 8, phase);
              load_raw(raw, w_at + stage * W_STAGE);
            }
          }
        }
      }
      wgmma_wait<0>();
      if (lane < CL) mbar_arrive_cluster(release + (stage ? stage - 1 : STAGES - 1) * 8);
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");  // no use of d moves above the wait

      // Epilogue. d[4j..4j+3] are (row g, token 8j+2t), (g, 8j+2t+1), (g+8, 8j+2t), (g+8, 8j+2t+1) of the warp's 16 rows:
      // scale, round, transpose into token-major shared memory (swizzled as the store's box is), store by the copy engine.
      if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the last tile has left
      asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
      if constexpr (GATED) {  // rows g: gate, rows g+8: up; 32 results of the warpgroup a token, 64 bytes
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
          uint32_t h[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float v[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
              const float gate = d[4 * (j + i) + c] * s0, up = d[4 * (j + i) + 2 + c] * s1;
              v[c] = __fdividef(gate, 1.f + __expf(-gate)) * up;
            }
            h[i] = pack(v[0], v[1]);
          }
          const int token = j * 8 + lane;  // lanes 8i..8i+7 hold the addresses of token block j+i
          store_transposed(y_half + token * 64 + ((warp ^ (token / 2 % 4)) << 4), h[0], h[1], h[2], h[3]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 32; j += 2) {
          const float* e = d + 4 * j;
          const int token = j * 8 + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
          store_transposed(y_half + token * 128 + ((chunk ^ (token % 8)) << 4), pack(e[0] * s0, e[1] * s0), pack(e[2] * s1, e[3] * s1),
                           pack(e[4] * s0, e[5] * s0), pack(e[6] * s1, e[7] * s1));
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
      if (threadIdx.x % 128 == 0 && row < N) {
        if (!GATED && add) add_tile(&y_map, row, token_tile * TOKENS, y_half);
        else store_tile(&y_map, GATED ? row / 2 : row, token_tile * TOKENS, y_half);
      }
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  // a block's barriers must outlive the other's arrivals on them
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

using Encode = decltype(&cuTensorMapEncodeTiled);

inline bool make_map(Encode encode, CUtensorMap* map, CUtensorMapDataType type, int bytes, const void* p, uint64_t columns, uint64_t rows,
                     uint64_t pitch_elements, uint32_t box_columns, uint32_t box_rows, CUtensorMapSwizzle swizzle) {
  cuuint64_t size[2] = {columns, rows}, pitch[1] = {pitch_elements * bytes};
  cuuint32_t box[2] = {box_columns, box_rows}, one[2] = {1, 1};
  CUresult r = encode(map, type, 2, const_cast<void*>(p), size, pitch, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) fprintf(stderr, "cuTensorMapEncodeTiled: error %d\n", int(r));
  return r == CUDA_SUCCESS;
}

template <bool GATED>
int launch(void* y, const void* x, const void* w, const float* s, int M, int N, int K, int pitch, int add, cudaStream_t stream) {
  static Encode encode = nullptr;
  static int blocks = 0;
  if (!encode) {  // once: the driver's entry point, the number of multiprocessors, the shared memory limit
    cudaDriverEntryPointQueryResult found;
    void* f = nullptr;
    int device = 0;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess || !f) return -2;
    if (cudaGetDevice(&device) != cudaSuccess) return -3;
    if (cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return -3;
    if (cudaFuncSetAttribute(kernel<GATED>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM) != cudaSuccess) return -4;
    encode = reinterpret_cast<Encode>(f);
  }
  if (M < 1 || N % ROWS || K % BK || K < BK || pitch < K || pitch % 16 || (GATED && add)) return -1;
  CUtensorMap x_map, w_map, y_map;
  const int out = GATED ? N / 2 : N;
  if (!make_map(encode, &x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x, K, M, K, BK, TOKENS / 2, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !make_map(encode, &w_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, w, K, N, pitch, BK, ROWS, CU_TENSOR_MAP_SWIZZLE_64B) ||
      !make_map(encode, &y_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y, out, M, out, GATED ? 32 : 64, TOKENS,
                GATED ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B)) return -5;
  const int tiles = (M + TOKENS - 1) / TOKENS * ((N + CL * ROWS - 1) / (CL * ROWS));
  const int grid = CL * (tiles < blocks / CL ? tiles : blocks / CL);
  kernel<GATED><<<grid, THREADS, SMEM, stream>>>(x_map, w_map, y_map, s, M, N, K, add);
  return int(cudaGetLastError());
}

}  // namespace float8_gemm

// y: M x N (gated: M x N/2) bf16, x: M x K bf16, w: N x K e4m3fn, s: N fp32, all dense but w, whose rows begin `pitch` elements
// apart (% 16 == 0); 16-byte aligned; N % 128 == 0, K % 64 == 0. add: to what y holds (not gated).
// gated: w's rows are 8 gate rows, 8 up rows, 8 gate rows, ...; y = silu(gate) * up. Returns 0, a CUDA error, or one of its own (< 0).
extern "C" int float8_gemm_launch(void* y, const void* x, const void* w, const float* s, int M, int N, int K, int pitch, int gated, int add,
                                  cudaStream_t stream) {
  return gated ? float8_gemm::launch<true>(y, x, w, s, M, N, K, pitch, add, stream)
               : float8_gemm::launch<false>(y, x, w, s, M, N, K, pitch, add, stream);
}
