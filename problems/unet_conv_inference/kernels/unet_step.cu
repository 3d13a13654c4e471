// One denoising step of the 1-D U-Net, or all of them, in one launch: 128 blocks that stay, one a multiprocessor.
//
// What a step must do is read 320 MB of weights; the arithmetic is nothing, and so are the activations (16 KB). Two things
// take time: the weights' way from memory, and the 29 times that every block needs what the others just computed.
// The kernel keeps the two apart. plan.py says who computes what and packing.py how the weights lie; read them first.
//
//     device memory                    a block: 10 warps, 227 KB of shared memory
//   +--------------+  bulk copies  +----------------------------------------------------------------------+
//   | this block's |-------------->| warp 8, producer     ring of 8 KB chunks: weights of this phase and  |
//   | own stream   |   never waits |                      the next ones, 170 KB, 5 us of memory bandwidth |
//   | of weights   |   for a phase |          | full / empty mbarriers                                    |
//   +--------------+               |          v                                                           |
//   | workspace,   |  poll         | warps 0-7, a phase:                                                  |
//   | two sets of  |-------------->|   1 add the 8 slices' sums of the product before, + bias             |
//   | partial sums |               |   2 GroupNorm of this slice's group, Mish, FiLM, residual            |
//   |              |               |   3 into shared memory as the operand, high and low half of each     |
//   |              |   publish     |   4 tensor cores: the warps share the steps through K                |
//   |              |<--------------|   5 add the warps' sums                                              |
//   |              |   clear       |   6 while the others finish: residual conv, FiLM rows for later      |
//   |              |<--------------| warp 9, janitor: makes the other set "not yet there" again           |
//   +--------------+               +----------------------------------------------------------------------+
//
// Exchange. A block publishes sums with plain stores, and readers poll the very words they want until each holds
// something else than NOT_YET, a NaN that no instruction makes (arithmetic gives 0x7fffffff). No flag, no fence, no
// counter: what arrives is the data, one trip instead of three. Each word stands for itself, so their order does not matter.
// A word may be polled for a second time only after it was cleared, so there are two sets: while step e fills set e % 2,
// the janitor clears the other one. It starts when all blocks have read the last of step e - 1 (counter `read`), and step
// e + 1 starts when all janitors are done (counter `cleared`): two barriers of the whole grid, both off the path.
// A sum that never comes (a fault) is given up after some seconds: NOT_YET is a NaN, so the result says so.
//
// Precision. An operand x is the sum of a high and a low half (10 + 10 bits of tf32, 8 + 8 of bf16, 11 + 11 of f16). With 4
// positions they are columns 0-3 and 4-7 of one instruction, so the low half costs nothing. Float32 weights are split the
// same way in registers, so a float32 step has float32's accuracy, not TF32's.
#ifndef HOPPER_PTX
#include "hopper_ptx.cuh"
#endif

namespace unet {
constexpr int SLICES = 8, BLOCKS = 128, WARPS = 8, THREADS = WARPS * 32, ALL_THREADS = THREADS + 64;
constexpr int FRAGMENT = 512, CHUNK = 8192, PER_CHUNK = CHUNK / FRAGMENT, ELEMENTS = 512, MOST_CHUNKS = 32;
enum Mark { BEGIN, SUMS, OPERAND, MULTIPLIED, PUBLISHED, END, MARKS };
#ifdef UNET_TRACE
constexpr bool TRACE = true;
#else
constexpr bool TRACE = false;
#endif
constexpr uint32_t NOT_YET = 0xffffffffu, PATIENCE = 1u << 22;
enum Kind { EMBEDDING, CONDITION, FIRST, PARTS, LAST };
struct alignas(16) Phase {  // kernels/phase.py says what each is
  int kind, in_offset, in_channels, in_columns, params, norm, mish, film, residual, keep, concat, concat_channels;
  int pad, operand_rows, stride, blocks, taps, step, transposed, rows, tiles, columns, out_offset, out_channels, out_columns;
  int fragment, residual_out, residual_fragment, residual_in, residual_params, film_tiles, film_first, film_fragment;
  int unused[3];  // a multiple of 16 bytes
};
struct Shared {  // byte offsets
  int operand, condition, kept, sums, stats, x, first, last, phases, flags, barriers, ring, ring_chunks;
};
struct Args {
  const uint8_t* stream;       // [BLOCKS][chunks] of CHUNK bytes
  const Phase* phases;
  float* workspace;            // [2][set_elements]
  uint32_t* counters;          // epoch, read, cleared: 0 at the very start, never reset
  const float4* params;        // of the channels of each phase's input: bias, norm weight, norm bias
  const float *first, *last, *last_bias, *film_bias, *frequencies;
  const float *film_table, *noise, *coefficients;  // sampling: [steps][film_rows], [steps][T][D], [steps][5]
  const void *sample, *cond;   // [T][D], [cond_dim], as `values` says
  const void* timestep;        // one number on the device, float32 or int64
  void* out;                   // [T][D]
  uint32_t* trace;             // with -DUNET_TRACE: [BLOCKS][phases][MARKS] cycles in the last step
  int values;                  // 0 float32, 1 bfloat16, 2 float16
  int timestep_is_int64, phase_count, chunks, steps, sampling, resident_chunks;
  int set_elements, film_offset, film_rows, eps_offset;
  int action_dim, horizon, kernel_size, cond_dim, step_dim, condition_blocks, first_channels;
  Shared shared;
};

struct Float32 {  // weights and operands as high and low tf32
  static constexpr int ELEMENT = 1;
  DEV static void store(uint8_t* operand, int plane_words, int word0, int channel, float v) {
    const float high = __uint_as_float(__float_as_uint(v) & 0xffffe000u);
    float* at = reinterpret_cast<float*>(operand) + word0 + channel;
    at[0] = high, at[plane_words] = v - high;
  }
  DEV static void mma(float (&d)[4], float (&low)[4], uint4 w, uint32_t b0, uint32_t b1) {
    auto high = [](uint32_t v) { return v & 0xffffe000u; };
    auto rest = [](uint32_t v) { return __float_as_uint(__uint_as_float(v) - __uint_as_float(v & 0xffffe000u)); };
    mma_tf32(d, make_uint4(high(w.x), high(w.y), high(w.z), high(w.w)), b0, b1);
    mma_tf32(low, make_uint4(rest(w.x), rest(w.y), rest(w.z), rest(w.w)), b0, b1);
  }
};
template <class Type> struct Half {  // weights as they are, operands as high and low half
  static constexpr int ELEMENT = 2;
  DEV static void store(uint8_t* operand, int plane_words, int word0, int channel, float v) {
    const uint16_t high = Type::round(v);
    uint16_t* at = reinterpret_cast<uint16_t*>(operand) + 2 * word0 + channel;
    at[0] = high, at[2 * plane_words] = Type::round(v - Type::widen(high));
  }
  DEV static void mma(float (&d)[4], float (&)[4], uint4 w, uint32_t b0, uint32_t b1) { Type::mma(d, w, b0, b1); }
};
struct Bf16 {
  DEV static uint16_t round(float v) { return round_bf16(v); }
  DEV static float widen(uint16_t v) { return widen_bf16(v); }
  DEV static void mma(float (&d)[4], uint4 w, uint32_t b0, uint32_t b1) { mma_bf16(d, w, b0, b1); }
};
struct F16 {
  DEV static uint16_t round(float v) { return round_f16(v); }
  DEV static float widen(uint16_t v) { return widen_f16(v); }
  DEV static void mma(float (&d)[4], uint4 w, uint32_t b0, uint32_t b1) { mma_f16(d, w, b0, b1); }
};

DEV bool not_yet(float v) { return __float_as_uint(v) == NOT_YET; }
DEV float mish(float v) {  // x tanh(log(1 + e^x)); beyond 20 the fraction is 1
  const float e = __expf(fminf(v, 20.f)), n = e * (e + 2.f);
  return v * __fdividef(n, n + 2.f);
}
DEV float read(const void* from, int i, int values) {
  if (values == 0) return static_cast<const float*>(from)[i];
  const uint16_t v = static_cast<const uint16_t*>(from)[i];
  return values == 1 ? widen_bf16(v) : widen_f16(v);
}
DEV void write(void* to, int i, int values, float v) {
  if (values == 0) static_cast<float*>(to)[i] = v;
  else static_cast<uint16_t*>(to)[i] = values == 1 ? round_bf16(v) : round_f16(v);
}
DEV int log2_of(int power) { return 31 - __clz(power); }
// Looks again, for some seconds; after the first wait in vain nobody waits any more.
struct Patience {
  uint32_t* broken;
  uint32_t looks = 0;
  DEV bool again() {
    spin();
    if (++looks < PATIENCE && (looks & 1023u || !load_acquire_block(broken))) return true;
    store_release_block(broken, 1);
    return false;
  }
};
DEV void wait_for(uint64_t* bar, uint32_t parity) {
  while (!mbar_try_wait(bar, parity)) spin();
}

// Warp 8: the block's stream into the ring, chunk after chunk, for all steps; it knows of no phases. One thread's.
struct Producer {
  const Args& p;
  uint8_t* ring;
  uint64_t *full, *empty;
  int slot = 0, step = 0, chunk = 0;
  uint32_t parity = 1;  // a fresh barrier counts as one whose round before is over
  uint64_t once = policy_evict_first(), often = policy_evict_last();
  DEV bool done() { return step == p.steps; }
  DEV void next() {
    while (!mbar_try_wait(empty + slot, parity)) spin();
    mbar_expect(full + slot, CHUNK);
    const uint8_t* from = p.stream + (size_t(blockIdx.x) * p.chunks + chunk) * CHUNK;
    bulk_copy(ring + slot * CHUNK, from, CHUNK, full + slot, chunk < p.resident_chunks ? often : once);
    if (++slot == p.shared.ring_chunks) slot = 0, parity ^= 1;
    if (++chunk == p.chunks) chunk = 0, step++;
  }
};

// Warp 9: see "Exchange". flags: [0] steps that this block has finished, [1] steps that may start, [2] broken.
DEV void clean(const Args& p, uint32_t* flags, uint32_t epoch) {
  const int lane = threadIdx.x % 32;
  auto wait_until = [&](uint32_t* counter, uint32_t arrivals) {
    Patience patience{flags + 2};
    while (int(load_acquire(counter) - arrivals) < 0 && patience.again());
  };
  auto finished = [&](uint32_t steps) {
    Patience patience{flags + 2};
    while (load_acquire_block(flags) < steps && patience.again());
  };
  uint32_t *read = p.counters + 1, *cleared = p.counters + 2;
  for (int step = 0; step < p.steps; step++, epoch++) {
    if (step) {
      finished(step);
      if (lane == 0) add_release(read);
    }
    if (lane == 0) wait_until(read, BLOCKS * epoch);
    __syncwarp();
    float4* set = reinterpret_cast<float4*>(p.workspace + size_t((epoch + 1) % 2) * p.set_elements);
    const float word = __uint_as_float(NOT_YET);
    for (int i = blockIdx.x * 32 + lane; i < p.set_elements / 4; i += BLOCKS * 32)
      store_relaxed(set + i, make_float4(word, word, word, word));
    fence_gpu();
    __syncwarp();
    if (lane == 0) {
      add_release(cleared);
      wait_until(cleared, BLOCKS * (epoch + 1));
      store_release_block(flags + 1, step + 1);
    }
  }
  finished(p.steps);
  if (lane == 0) {
    add_release(read);
    if (blockIdx.x == 0) *p.counters = epoch;  // every block has read it: all of them have cleared a set since
  }
}

// Where a warp stands in the stream. All 8 warps pass every chunk, whether they need it or not.
struct Cursor {
  uint64_t *full, *empty;
  int slots, slot = 0, chunk = 0;
  uint32_t parity = 0;
  bool here = false;  // the chunk has arrived
  DEV void arrive() {
    if (!here) wait_for(full + slot, parity), here = true;
  }
  DEV void pass(int target) {  // give back the chunks before; each one's arrival is waited for, or a round would be lost
    if (chunk == target) return;
    __syncwarp();  // all lanes have read theirs
    do {
      arrive();
      if (threadIdx.x % 32 == 0) mbar_arrive(empty + slot);
      if (++slot == slots) slot = 0, parity ^= 1;
      here = false;
    } while (++chunk != target);
  }
  DEV void seek(int target) {
    pass(target);
    arrive();
  }
};

// The parts of a block's shared memory, and what its 256 computing threads know.
template <class W> struct Block {
  const Args& p;
  uint8_t* smem;
  int thread, warp, lane, slice, row_part, step = 0, stream_chunk = 0, products = 0, phase_number = 0;
  float* set;
  Cursor cursor;
  uint32_t* flags;

  DEV void mark(Mark at) {
    if (TRACE && thread == 0) p.trace[(blockIdx.x * p.phase_count + phase_number) * MARKS + at] = cycles();
  }
  DEV float* floats(int offset) { return reinterpret_cast<float*>(smem + offset); }
  DEV float& kept(int slot, int element) { return floats(p.shared.kept)[slot * ELEMENTS + element]; }

  DEV float timestep() {
    return p.timestep_is_int64 ? float(*static_cast<const long long*>(p.timestep)) : *static_cast<const float*>(p.timestep);
  }

  // What the eight slices published, added up: V is a float or two. All are asked for at once, and only those that are
  // missing are asked for again.
  template <class V> DEV void add_slices(float (&v)[sizeof(V) / 4], const float* from, int stride, bool mine) {
    constexpr int N = sizeof(V) / 4;
    uint32_t missing = mine ? 0xff : 0;
    float part[SLICES][N] = {};
    Patience patience{flags + 2};
    while (missing) {
      UNROLL for (int i = 0; i < SLICES; i++)
        if (missing >> i & 1) load_relaxed(part[i], from + i * stride);
      uint32_t most = 0;  // NOT_YET is the largest of all words
      UNROLL for (int i = 0; i < SLICES; i++)
        UNROLL for (int k = 0; k < N; k++) most = max(most, __float_as_uint(part[i][k]));
      if (most != NOT_YET) break;
      UNROLL for (int i = 0; i < SLICES; i++) {
        bool here = true;
        UNROLL for (int k = 0; k < N; k++) here = here && !not_yet(part[i][k]);
        if (here) missing &= ~(1u << i);
      }
      if (!patience.again()) break;
    }
    UNROLL for (int k = 0; k < N; k++) {
      UNROLL for (int half = SLICES / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) part[i][k] += part[i + half][k];
      v[k] = part[0][k];
    }
  }
  // Of a product's [channels][columns] the two elements of this slice that the thread owns.
  DEV void gather(float (&v)[2], int offset, int channels, int columns) {
    const int count = channels / SLICES * columns;
    add_slices<float2>(v, set + offset + slice * count + 2 * thread, channels * columns, 2 * thread < count);
  }

  // The input of `ph`: v[0], v[1] are the thread's neighbouring elements of [channels of the slice][columns].
  DEV void input(const Phase& ph, float (&v)[2]) {
    const int columns = ph.in_columns, shift = log2_of(columns), own = ph.in_channels / SLICES;
    const int element = 2 * thread;
    const bool mine = element < own * columns;
    const int here = min(64, max(0, own * columns - 64 * warp));  // elements that this warp's threads own
    float per_count = __fdividef(1.f, float(own * columns)), per_here = __fdividef(1.f, float(max(1, here)));
    here_and_now(per_count);  // before the wait
    const int channel[2] = {element >> shift, (element + 1) >> shift};
    float4 param[2] = {};
    const float* film = p.sampling ? p.film_table + size_t(step) * p.film_rows : set + p.film_offset;
    film += ph.film + slice * own;
    const bool filmed = ph.film >= 0 && mine;
    float scale[2], move[2];
    auto load_film = [&] {
      UNROLL for (int i = 0; i < 2; i++)
        scale[i] = load_relaxed(film + channel[i]), move[i] = load_relaxed(film + ph.in_channels + channel[i]);
    };
    if (filmed) load_film();  // asked for before the sums, looked at after them
    if (mine && ph.kind != EMBEDDING) {
      UNROLL for (int i = 0; i < 2; i++) param[i] = __ldg(p.params + ph.params + slice * own + channel[i]);
    }
    float residual[2] = {};
    if (ph.kind == FIRST) {
      first_conv(ph, mine, v, residual, channel, element & (columns - 1));
    } else if (ph.kind == EMBEDDING) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int at = slice * own + element + i, half = ph.in_channels / 2;
        float sine = 0, cosine = 0;
        if (mine) sincospif(timestep() * p.frequencies[at < half ? at : at - half], &sine, &cosine);
        v[i] = at < half ? sine : cosine;
      }
    } else {
      gather(v, ph.in_offset, ph.in_channels, columns);
      UNROLL for (int i = 0; i < 2; i++) v[i] += param[i].x;
    }
    mark(SUMS);
    if (ph.norm) {
      float mean, rstd;
      statistics(v, own * columns, here, per_count, per_here, mean, rstd);
      UNROLL for (int i = 0; i < 2; i++) v[i] = (v[i] - mean) * rstd * param[i].y + param[i].z;
    }
    if (ph.mish) {
      UNROLL for (int i = 0; i < 2; i++) v[i] = mish(v[i]);
    }
    if (filmed) {
      auto missing = [&] { return not_yet(scale[0]) || not_yet(scale[1]) || not_yet(move[0]) || not_yet(move[1]); };
      Patience patience{flags + 2};
      while (!p.sampling && missing() && patience.again()) load_film();
      UNROLL for (int i = 0; i < 2; i++) v[i] = scale[i] * v[i] + move[i];
    }
    if (!mine) return void(v[0] = v[1] = 0);
    if (ph.residual) v[0] += kept(0, element), v[1] += kept(0, element + 1);
    const bool first = ph.kind == FIRST;
#pragma unroll 1
    for (int slot = 0; ph.keep >> slot; slot++)
      if (ph.keep >> slot & 1)
        kept(slot, element) = first ? residual[0] : v[0], kept(slot, element + 1) = first ? residual[1] : v[1];
  }

  // The network's first convolution has two input channels: cheaper computed by each slice for itself than exchanged.
  DEV void first_conv(const Phase& ph, bool mine, float (&v)[2], float (&residual)[2], const int (&channel)[2], int column) {
    v[0] = v[1] = 0;
    if (!mine) return;
    const int taps = p.kernel_size, dim = p.action_dim, width = dim * (taps + 1) + 2, T = ph.in_columns;
    const float *w = floats(p.shared.first) + channel[0] * width, *x = floats(p.shared.x);
    v[0] = v[1] = w[width - 2], residual[0] = residual[1] = w[width - 1];
#pragma unroll 1
    for (int d = 0; d < dim; d++) {
      const float* row = x + d * (T + taps - 1) + column;  // taps / 2 zeros before the first position
#pragma unroll 5
      for (int j = 0; j < taps; j++)
        v[0] = fmaf(w[d * taps + j], row[j], v[0]), v[1] = fmaf(w[d * taps + j], row[j + 1], v[1]);
      UNROLL for (int i = 0; i < 2; i++) residual[i] = fmaf(w[dim * taps + d], row[i + taps / 2], residual[i]);
    }
    float* seen = set + ph.in_offset + (slice * (ph.in_channels / SLICES) + channel[0]) * T + column;
    if (row_part == 0) store_relaxed(seen, v[0]), store_relaxed(seen + 1, v[1]);  // for who looks at layers
  }

  // Mean and 1 / standard deviation of the slice's `count` elements, by all 256 threads; `here` of them are this warp's.
  // Each warp sums squares around a value of its own, so that a large mean costs no digits; then the warps' means and
  // squares are put together.
  DEV void statistics(
      const float (&v)[2], int count, int here, float per_count, float per_here, float& mean, float& rstd) {
    float4* stats = reinterpret_cast<float4*>(smem + p.shared.stats);  // of each warp: mean, sum of squares, elements
    if (here) {
      const float pivot = __shfl_sync(~0u, v[0], 0);
      const bool mine = 2 * lane < here;
      const float a = mine ? v[0] - pivot : 0.f, b = mine ? v[1] - pivot : 0.f;
      float sum = a + b, squares = a * a + b * b;
      UNROLL for (int o = 16; o; o /= 2) {
        sum += __shfl_xor_sync(~0u, sum, o);
        squares += __shfl_xor_sync(~0u, squares, o);
      }
      const float off = sum * per_here;
      if (lane == 0) stats[warp] = make_float4(pivot + off, squares - sum * off, float(here), 0.f);
    }
    meet<THREADS>();
    float4 part[WARPS];
    float total = 0, squares = 0;
    UNROLL for (int i = 0; i < WARPS; i++)
      if (64 * i < count) part[i] = stats[i], total += part[i].x * part[i].z;
    mean = total * per_count;
    UNROLL for (int i = 0; i < WARPS; i++)
      if (64 * i < count) squares += part[i].y + (part[i].x - mean) * (part[i].x - mean) * part[i].z;
    rstd = rsqrtf(squares * per_count + 1e-5f);
  }

  // The operand: position n of channel c in row n + pad, high halves, then low halves; rows around it and channels past
  // the last are zero.
  DEV void clear_operand(const Phase& ph) {
    uint4* words = reinterpret_cast<uint4*>(smem + p.shared.operand);
    const int count = ph.operand_rows * ph.stride / 2;
#pragma unroll 1
    for (int i = thread; i < count; i += THREADS) words[i] = make_uint4(0, 0, 0, 0);
  }
  DEV void store_operand(const Phase& ph, int channel0, int count, float v0, float v1) {
    const int shift = log2_of(ph.in_columns);
    if (2 * thread >= count * ph.in_columns) return;
    UNROLL for (int i = 0; i < 2; i++) {
      const int element = 2 * thread + i, row = (element & (ph.in_columns - 1)) + ph.pad;
      W::store(smem + p.shared.operand, ph.operand_rows * ph.stride, row * ph.stride, channel0 + (element >> shift), i ? v1 : v0);
    }
  }

  // What a block multiplies, and where its outputs go: output (row, column) to out[(channel + row) * out_columns +
  // column * up + odd], if there is such a channel.
  struct Product {
    const uint8_t* operand;
    int plane_words, stride, row_step, row0, columns, blocks, steps, fragment, tiles;
    float* out;
    int channel, channels, out_columns, up, odd;
    const float* bias;
  };
  enum Job { MAIN, RESIDUAL, FILM };
  DEV Product describe(const Phase& ph, int job) {
    if (job >= FILM) {  // rows of all FiLM linears, 16 a block and round
      const int words = p.condition_blocks * 16, row0 = ((ph.film_first + job - FILM) * BLOCKS + int(blockIdx.x)) * 16;
      return {smem + p.shared.condition, words, 0, 0, 0, 1, p.condition_blocks, p.condition_blocks,
              ph.film_fragment + (job - FILM) * 2 * p.condition_blocks, 1,
              set + p.film_offset, row0, row0 + 16, 1, 1, 0, p.film_bias};
    }
    const bool main = job == MAIN;
    const int first_row = row_part * ph.tiles * 16, odd = main && ph.transposed && first_row >= ph.out_channels;
    const int up = main ? 1 + ph.transposed : 1, out_columns = ph.columns * up;
    float* out = set + (main ? ph.out_offset : ph.residual_out) + slice * ph.out_channels * out_columns;
    return {smem + p.shared.operand, ph.operand_rows * ph.stride, ph.stride, main ? ph.step : 1, main ? odd : ph.pad,
            ph.columns, ph.blocks, main ? ph.taps * ph.blocks : ph.blocks, main ? ph.fragment : ph.residual_fragment,
            ph.tiles, out, first_row - (odd ? ph.out_channels : 0), ph.out_channels, out_columns, up, odd, nullptr};
  }
  // acc += weights [TILES * 16 rows x K] operand [K x columns], this warp's steps through K. HALVES: of 8 columns; with
  // none, high and low half of up to 4 columns share one instruction.
  template <int TILES, int HALVES> DEV void multiply(
      float (&acc)[TILES][HALVES ? HALVES : 1][4], const Product& q) {
    constexpr int N = HALVES ? HALVES : 1;
    const int g = lane / 4, t = lane % 4;
    float low[TILES][N][4] = {};
    const int column = HALVES ? g : min(g % 4, q.columns - 1);
    const int word = (column * q.row_step + q.row0) * q.stride + 4 * t + (!HALVES && g >= 4 ? q.plane_words : 0);
    const uint8_t *column_at = q.operand + 4 * word, *ring = smem + p.shared.ring;
    const int next_columns = 4 * 8 * q.row_step * q.stride, low_plane = 4 * q.plane_words;
    int tap = 0, block = warp;
#pragma unroll 1
    for (int k = warp; k < q.steps; k += WARPS, block += WARPS) {
      while (block >= q.blocks) block -= q.blocks, tap++;
      const uint8_t* at = column_at + 4 * (tap * q.stride + block * 16);
      uint4 b[HALVES ? 2 * HALVES : 1];  // high, low of each 8 columns
      UNROLL for (int n = 0; n < N; n++) {
        b[n] = *reinterpret_cast<const uint4*>(at + n * next_columns);
        if (HALVES) b[N + n] = *reinterpret_cast<const uint4*>(at + n * next_columns + low_plane);
      }
      const int f = q.fragment + k * TILES * 2;
      cursor.seek(stream_chunk + f / PER_CHUNK);
      const uint8_t* weights = ring + cursor.slot * CHUNK + f % PER_CHUNK * FRAGMENT + lane * 16;
      UNROLL for (int m = 0; m < TILES; m++) {
        const uint4 w0 = *reinterpret_cast<const uint4*>(weights + m * 2 * FRAGMENT);
        const uint4 w1 = *reinterpret_cast<const uint4*>(weights + m * 2 * FRAGMENT + FRAGMENT);
        UNROLL for (int n = 0; n < N; n++) {
          W::mma(acc[m][n], low[m][n], w0, b[n].x, b[n].y);
          W::mma(acc[m][n], low[m][n], w1, b[n].z, b[n].w);
          if (HALVES) W::mma(acc[m][n], low[m][n], w0, b[N + n].x, b[N + n].y);
          if (HALVES) W::mma(acc[m][n], low[m][n], w1, b[N + n].z, b[N + n].w);
        }
      }
    }
    cursor.pass(stream_chunk + (q.fragment + q.steps * TILES * 2) / PER_CHUNK);  // room for what comes, at once
    UNROLL for (int m = 0; m < TILES; m++)
      UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int c = 0; c < 4; c++) acc[m][n][c] += low[m][n][c];
  }

  // Multiplies, adds the warps' sums, publishes.
  template <int TILES, int HALVES> DEV void product(const Product& q) {
    constexpr int N = HALVES ? HALVES : 1;
    float acc[TILES][N][4] = {};
    multiply<TILES, HALVES>(acc, q);
    const int g = lane / 4, t = lane % 4, warps = min(WARPS, q.steps);
    float* sums = floats(p.shared.sums) + products++ % 2 * WARPS * THREADS;  // in turns: one meeting a product is enough
    UNROLL for (int m = 0; m < TILES; m++)
      UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int c = 0; c < 4; c++) {
          float v = acc[m][n][c];
          if (!HALVES) v += __shfl_xor_sync(~0u, v, 2);  // columns 4-7 are the low halves' products
          const int row = m * 16 + g + c / 2 * 8, column = n * 8 + 2 * t + c % 2;
          if (warp < warps && column < q.columns) sums[warp * THREADS + row * q.columns + column] = v;
        }
  }
  DEV void publish(const Product& q) {
    meet<THREADS>();
    const float* sums = floats(p.shared.sums) + (products - 1) % 2 * WARPS * THREADS + thread;
    const int row = q.channel + (thread >> log2_of(q.columns)), column = thread & (q.columns - 1);
    if (thread >= q.tiles * 16 * q.columns || row >= q.channels) return;
    float v = q.bias ? q.bias[row] : 0.f;
    UNROLL for (int i = 0; i < WARPS; i++)
      if (i < q.steps) v += sums[i * THREADS];
    store_relaxed(q.out + row * q.out_columns + column * q.up + q.odd, v);
  }
  DEV void compute(const Product& q, int job) {
    if (q.columns <= 4) {
      if (q.tiles == 1) product<1, 0>(q);
      else if (q.tiles == 2) product<2, 0>(q);
      else product<4, 0>(q);
    } else if (q.columns == 8) {
      if (q.tiles == 1) product<1, 1>(q);
      else product<2, 1>(q);
    } else {
      product<1, 2>(q);
    }
    if (job == MAIN) mark(MULTIPLIED);
    publish(q);
    if (job == MAIN) mark(PUBLISHED);
  }

  // The condition, mish(step features, global condition), in all blocks: the operand of all FiLM rows.
  DEV void condition(const Phase& ph) {
    const int words = p.condition_blocks * 16;
#pragma unroll 2
    for (int k = ph.in_channels + thread; k < words * W::ELEMENT; k += THREADS) {
      const int i = k - ph.in_channels;
      W::store(smem + p.shared.condition, words, 0, k, i < p.cond_dim ? mish(read(p.cond, i, p.values)) : 0.f);
    }
#pragma unroll 1
    for (int k = thread; k < ph.in_channels; k += THREADS) {  // the step's features, which are still on their way
      float v[1];
      const float bias = __ldg(p.params + ph.params + k).x;
      add_slices<float>(v, set + ph.in_offset + k, ph.in_channels, true);
      W::store(smem + p.shared.condition, words, 0, k, mish(v[0] + bias));
    }
    meet<THREADS>();
  }

  // The last convolution, 256 channels to 2: eight blocks have a slice each.
  DEV void last_conv(const Phase& ph, const float (&v)[2]) {
    const int columns = ph.in_columns, own = ph.in_channels / SLICES, channel = 2 * thread >> log2_of(columns);
    const int warps = (own * columns + 63) / 64;
    float* sums = floats(p.shared.sums) + products++ % 2 * WARPS * THREADS;
    for (int d = 0; d < p.action_dim; d++) {
      const float w = channel < own ? floats(p.shared.last)[d * own + channel] : 0.f;
      float a = w * v[0], b = w * v[1];
      for (int o = columns / 2; o < 32; o *= 2) a += __shfl_xor_sync(~0u, a, o), b += __shfl_xor_sync(~0u, b, o);
      if (2 * lane < columns) {
        float* at = sums + warp * THREADS + d * columns + 2 * lane;
        at[0] = a, at[1] = b;
      }
    }
    meet<THREADS>();
    const int outputs = p.action_dim * columns;
    if (thread < outputs) {
      float sum = 0;
      for (int i = 0; i < warps; i++) sum += sums[i * THREADS + thread];
      store_relaxed(set + p.eps_offset + slice * outputs + thread, sum);
    }
  }
  // The step's result, in every block, so that the next step needs no further exchange. unet1d.denoise, in its order.
  DEV void finish() {
    const int T = p.horizon, outputs = p.action_dim * T;
    if (thread < outputs) {
      const int channel = thread >> log2_of(T), at = (thread & (T - 1)) * p.action_dim + channel;
      const float bias = p.last_bias[channel];
      float sum[1], c[5], noise = 0;
      if (p.sampling) {  // asked for before the wait
        UNROLL for (int i = 0; i < 5; i++) c[i] = p.coefficients[step * 5 + i];
        noise = p.noise[step * outputs + at];
      }
      add_slices<float>(sum, set + p.eps_offset + thread, outputs, p.sampling || blockIdx.x == 0);
      float result = sum[0] + bias;
      if (p.sampling) {
        float& x = floats(p.shared.x)[channel * (T + p.kernel_size - 1) + p.kernel_size / 2 + (thread & (T - 1))];
        const float start = (x - c[0] * result) / c[1];
        const float clipped = start != start ? start : fminf(fmaxf(start, -1.f), 1.f);  // NaN stays
        result = x = c[2] * clipped + c[3] * x + c[4] * noise;
      }
      if (blockIdx.x == 0 && step == p.steps - 1) write(p.out, at, p.values, result);
    }
    meet<THREADS>();
  }

  DEV void phase(const Phase& ph) {
    if (ph.kind == LAST && row_part) return;
    int job = ph.kind == CONDITION ? FILM : MAIN;
    Product q = describe(ph, job);  // before the wait, not after it
    if (ph.kind == CONDITION) {
      condition(ph);
    } else {
      clear_operand(ph);
      float v[2];
      input(ph, v);
      if (ph.kind == LAST) return last_conv(ph, v);
      if (!ph.norm) meet<THREADS>();  // the operand is cleared; statistics() met already
      const int own = ph.in_channels / SLICES;
      store_operand(ph, 0, own, v[0], v[1]);
      if (ph.concat >= 0) {
        const int element = 2 * thread;
        store_operand(ph, own, ph.concat_channels / SLICES, kept(ph.concat, element), kept(ph.concat, element + 1));
      }
      meet<THREADS>();
    }
    mark(OPERAND);
#pragma unroll 1
    while (job < FILM + ph.film_tiles) {  // only the first of them is waited for at once
      if (job != RESIDUAL || ph.residual_out >= 0) compute(q, job);
      q = describe(ph, ++job);
    }
    if (ph.residual_in >= 0) {
      float v[2];
      gather(v, ph.residual_in, ph.out_channels, ph.columns);
      const int element = 2 * thread, own = ph.out_channels / SLICES, shift = log2_of(ph.columns);
      if (element < own * ph.columns) {
        UNROLL for (int i = 0; i < 2; i++)
          kept(0, element + i) = v[i] + __ldg(p.params + ph.residual_params + slice * own + (element + i >> shift)).x;
      }
    }
  }

  DEV void run(uint32_t epoch) {
    const Phase* phases = reinterpret_cast<const Phase*>(smem + p.shared.phases);
    for (step = 0; step < p.steps; step++, epoch++) {
      set = p.workspace + size_t(epoch % 2) * p.set_elements;
      if (step) {
        Patience patience{flags + 2};
        while (load_acquire_block(flags + 1) < uint32_t(step) && patience.again());
      }
      for (phase_number = 0; phase_number < p.phase_count; phase_number++) {
        const Phase ph = phases[phase_number];  // into registers, once
        mark(BEGIN);
        phase(ph);
        mark(END);
      }
      finish();
      stream_chunk += p.chunks;
      cursor.pass(stream_chunk);
      if (thread == 0) store_release_block(flags, step + 1);
    }
  }
};

template <class W> __global__ void __launch_bounds__(ALL_THREADS, 1) unet_step(const __grid_constant__ Args p) {
  DYNAMIC_SHARED(smem);
  uint64_t *full = reinterpret_cast<uint64_t*>(smem + p.shared.barriers), *empty = full + MOST_CHUNKS;
  uint32_t* flags = reinterpret_cast<uint32_t*>(smem + p.shared.flags);
  const int thread = threadIdx.x, slice = blockIdx.x % SLICES;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const uint32_t epoch = *p.counters;
  Producer producer{p, smem + p.shared.ring, full, empty};
  if (warp == WARPS && elected()) {  // the first weights are on their way before anything else
    for (int i = 0; i < p.shared.ring_chunks; i++) mbar_init(full + i, 1), mbar_init(empty + i, WARPS);
    mbar_init_done();
    for (int i = 0; i < p.shared.ring_chunks && !producer.done(); i++) producer.next();
  }
  if (thread < 4) flags[thread] = 0;
  auto fetch = [&](int to, const void* from, int words) {
    for (int i = thread; i < words; i += ALL_THREADS)
      reinterpret_cast<uint32_t*>(smem + to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  };
  const int own = p.first_channels / SLICES, width = p.action_dim * (p.kernel_size + 1) + 2;
  fetch(p.shared.phases, p.phases, p.phase_count * int(sizeof(Phase) / 4));
  fetch(p.shared.first, p.first + slice * own * width, own * width);
  for (int d = 0; d < p.action_dim; d++)
    fetch(p.shared.last + 4 * d * own, p.last + d * p.first_channels + slice * own, own);
  float* x = reinterpret_cast<float*>(smem + p.shared.x);  // rows of T positions with zeros around them
  const int row = p.horizon + p.kernel_size - 1;
  for (int i = thread; i < p.action_dim * row; i += ALL_THREADS) {
    const int d = i / row, at = i % row - p.kernel_size / 2;
    x[i] = at >= 0 && at < p.horizon ? read(p.sample, at * p.action_dim + d, p.values) : 0.f;
  }
  __syncthreads();
  if (warp == WARPS) {
    if (elected())  // the same thread each time
      while (!producer.done()) producer.next();
    return;
  }
  if (warp == WARPS + 1) return clean(p, flags, epoch);
  Block<W> block{p, smem, thread, warp, thread % 32, slice, int(blockIdx.x) / SLICES, 0, 0, 0, 0, nullptr,
                 Cursor{full, empty, p.shared.ring_chunks}, flags};
  block.run(epoch);
}
}  // namespace unet

#ifndef CUDA_ON_CPU
// weights: 0 float32, 1 bfloat16, 2 float16, as `args.stream` was packed. Asynchronous, on `stream`. Returns 0 or a CUDA
// error. Cooperative: the launch fails where the blocks cannot all be there at once, instead of waiting for ever.
extern "C" int unet_step_launch(const unet::Args* args, int weights, int shared_bytes, cudaStream_t stream) {
  using namespace unet;
  void (*const kernels[])(Args) = {unet_step<Float32>, unet_step<Half<Bf16>>, unet_step<Half<F16>>};
  const auto chosen = kernels[weights];
  if (const int e = cudaFuncSetAttribute(chosen, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) return e;
  cudaLaunchAttribute together{cudaLaunchAttributeCooperative};
  together.val.cooperative = 1;
  const cudaLaunchConfig_t c{dim3(BLOCKS), dim3(ALL_THREADS), size_t(shared_bytes), stream, &together, 1};
  return int(cudaLaunchKernelEx(&c, chosen, *args));
}
// Bytes of `Args` and of `Phase`: the caller's own must be the same.
extern "C" int unet_step_sizes(int which) { return which ? int(sizeof(unet::Phase)) : int(sizeof(unet::Args)); }
#endif
