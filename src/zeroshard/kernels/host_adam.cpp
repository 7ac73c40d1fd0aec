// Adam and AdamW on the host in one pass over memory: a plain C interface, no headers of torch.
//
// Work goes in tiles that stay in the first-level cache: what is not fp32 in memory is widened into a local buffer, the
// arithmetic runs on fp32, and the results are narrowed again. fp32 states are read and written in place, once.
// Each operation is rounded by itself, in the order of `tiled.py`: compile with -ffp-contract=off, so that none are fused.
// Sums, products, quotients and roots are the processor's, correctly rounded, so that all processors have the same bits.

#include "host_kernels.h"

namespace {

constexpr int64_t BLOCK = 256;         // elements that share one scale
constexpr int64_t TILE = 2 * BLOCK;    // elements; all local buffers of a tile fit the first-level cache
constexpr int64_t SHARE = 256 * TILE;  // elements that a thread takes at a time
constexpr int64_t CHUNK = 64, AHEAD = 384;  // elements between fetches, and how far these are ahead of the arithmetic
#if defined(__AVX512F__)
constexpr bool FETCHES = false;  // vectors of 64 bytes keep enough lines on their way; fetches would only delay them
#else
constexpr bool FETCHES = true;
#endif

}  // namespace

extern "C" {

// A vector of n values: fp32; bf16 or fp16; bf16 and an int16 remainder; or 8-bit codes and a scale per block.
struct Values {
  void* data;
  void* rest;  // remainders, or scales
};

// The map of an 8-bit kind: the value of each code, the boundary above it, and the lowest code for the upper half of a
// float's bits, from which at most one boundary has to be crossed.
struct Map {
  const float* values;
  const float* bounds;
  const uint8_t* lowest;
};

struct Update {
  int64_t n;
  const void* gradient;
  void* out;
  Values master, exp_avg, exp_avg_sq;              // read
  Values new_master, new_exp_avg, new_exp_avg_sq;  // written; may be those that are read; null for `out` alone
  Map signed_map, unsigned_map;
  int32_t gradient_kind, master_kind, exp_avg_kind, exp_avg_sq_kind, out_kind;
  float factor, decay, l2, beta1, weight1, beta2, weight2, eps, step_size;
};

}  // extern "C"

namespace {

// bits = (hi << 16) + lo, with lo signed: the value is exact and hi is it rounded to bf16, exact ties away from zero.
void join(const uint16_t* hi, const int16_t* lo, float* into, int64_t n) {
  INDEPENDENT
  for (int64_t i = 0; i < n; i++)
    into[i] = from_bits((static_cast<uint32_t>(hi[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo[i])));
}

void split(const float* from, uint16_t* hi, int16_t* lo, int64_t n) {
  INDEPENDENT
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = from[i] != from[i] ? 0x7FC00000u : to_bits(from[i]);  // no NaN may round to a number
    hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lo[i] = static_cast<int16_t>(bits & 0xFFFFu);
  }
}

void decode(const uint8_t* codes, const float* scales, const Map& map, float* into, int64_t n) {
  const float* const table = map.values;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t stop = start + BLOCK < n ? start + BLOCK : n;
    const float scale = scales[start / BLOCK];
    INDEPENDENT
    for (int64_t i = start; i < stop; i++) into[i] = table[codes[i]] * scale;
  }
}

void encode(float* values, uint8_t* codes, float* scales, const Map& map, int64_t n) {
  const float* const bounds = map.bounds;
  const uint8_t* const lowest = map.lowest;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t stop = start + BLOCK < n ? start + BLOCK : n;
    uint32_t largest = 0;  // as bits, an order in which NaN is above all
    for (int64_t i = start; i < stop; i++) {
      const uint32_t size = to_bits(values[i]) & 0x7FFFFFFFu;
      largest = size > largest ? size : largest;
    }
    const float scale = from_bits(largest), divisor = largest ? scale : 1.0f;
    scales[start / BLOCK] = scale;
    for (int64_t i = start; i < stop; i++) values[i] /= divisor;
    for (int64_t i = start; i < stop; i++) {
      const unsigned code = lowest[to_bits(values[i]) >> 16];
      codes[i] = static_cast<uint8_t>(code + (values[i] > bounds[code]));
    }
  }
}

struct Buffers {
  alignas(64) float gradient[TILE], master[TILE], exp_avg[TILE], exp_avg_sq[TILE];
  alignas(64) uint16_t out[TILE];
};

inline const Map& map_of(const Update& u, int32_t kind) { return kind == SIGNED ? u.signed_map : u.unsigned_map; }

// Elements [i, i + n) as fp32: where they lie if they are that, else in the buffer.
const float* load(const Update& u, const Values& values, int32_t kind, float* buffer, int64_t i, int64_t n) {
  if (kind == FP32) return at<float>(values.data, i);
  if (kind == BF16) widen_bf16(at<uint16_t>(values.data, i), buffer, n);
  if (kind == SPLIT) join(at<uint16_t>(values.data, i), at<int16_t>(values.rest, i), buffer, n);
  if (kind >= SIGNED)
    decode(at<uint8_t>(values.data, i), at<float>(values.rest, i / BLOCK), map_of(u, kind), buffer, n);
  return buffer;
}

// Where the new values go as fp32: to their place if they are kept as that, else to the buffer.
float* place(const Values& values, int32_t kind, float* buffer, int64_t i) {
  return kind == FP32 && values.data ? at<float>(values.data, i) : buffer;
}

void store(const Update& u, const Values& values, int32_t kind, float* buffer, int64_t i, int64_t n) {
  if (!values.data) return;
  if (kind == BF16) narrow_bf16(buffer, at<uint16_t>(values.data, i), n);
  if (kind == SPLIT) split(buffer, at<uint16_t>(values.data, i), at<int16_t>(values.rest, i), n);
  if (kind >= SIGNED)
    encode(buffer, at<uint8_t>(values.data, i), at<float>(values.rest, i / BLOCK), map_of(u, kind), n);
}

const float* load_gradient(const Update& u, float* buffer, int64_t i, int64_t n) {
  if (u.gradient_kind == FP32) return static_cast<const float*>(u.gradient) + i;
  const uint16_t* from = static_cast<const uint16_t*>(u.gradient) + i;
  widen_fp16(from, buffer, n);
  return buffer;
}

void write_out(const Update& u, const float* master, uint16_t* buffer, int64_t i, int64_t n) {
  if (u.out_kind == NONE) return;
  if (u.out_kind == FP16) narrow_fp16(master, buffer, n);
  stream(buffer, at<uint16_t>(u.out, i), n);
}

struct State {
  const float *p, *m, *v;
  float *new_p, *new_m, *new_v;
};

inline float widened(float value) { return value; }
inline float widened(uint16_t bf16) { return from_bits(static_cast<uint32_t>(bf16) << 16); }

// L2: weight decay goes into the gradient. SLOW: beta1 is at least a half, and the mean starts from itself; else from the
// gradient. OUT: the new parameters, of which the gradient is bf16 or fp32, go to `out` as bf16 in the same loop, which
// saves a round trip through the first-level cache of each.
template <bool L2, bool SLOW, bool OUT, typename G>
void adam(const Update& update, const State& state, const G* gradient, Buffers& b, int64_t n) {
  const Update u = update;  // copies, so that no store can change them
  const float *const p = state.p, *const m = state.m, *const v = state.v;
  float *const new_p = state.new_p, *const new_m = state.new_m, *const new_v = state.new_v;
  uint16_t* const out = b.out;
  const auto step = [=](int64_t i) {
    float g = widened(gradient[i]) * u.factor;
    if (L2) g = g + p[i] * u.l2;
    const float mean = SLOW ? m[i] + (g - m[i]) * u.weight1 : g + (m[i] - g) * u.beta1;
    const float square = v[i] * u.beta2 + g * u.weight2 * g;
    const float changed = p[i] * u.decay - mean * u.step_size / (__builtin_sqrtf(square) + u.eps);
    new_m[i] = mean;
    new_v[i] = square;
    new_p[i] = changed;
    if (OUT) out[i] = to_bf16(changed);
  };
  int64_t i = 0;
  for (; i + CHUNK <= n; i += CHUNK) {
    for (int64_t k = i + AHEAD; FETCHES && k < i + AHEAD + CHUNK; k += 16) {  // a line of 64 bytes
      __builtin_prefetch(p + k, 1);
      __builtin_prefetch(m + k, 1);
      __builtin_prefetch(v + k, 1);
      if (sizeof(G) * (k - i) % 64 == 0) __builtin_prefetch(gradient + k);
    }
    INDEPENDENT
    for (int64_t k = i; k < i + CHUNK; k++) step(k);
  }
  INDEPENDENT
  for (int64_t k = i; k < n; k++) step(k);
}

template <bool OUT, typename G>
void adam(const Update& u, const State& s, const G* gradient, Buffers& b, int64_t n) {
  const bool slow = u.beta1 >= 0.5f;
  const auto run = u.l2 != 0.0f ? (slow ? adam<true, true, OUT, G> : adam<true, false, OUT, G>)
                                : (slow ? adam<false, true, OUT, G> : adam<false, false, OUT, G>);
  run(u, s, gradient, b, n);
}

void update_tile(const Update& u, Buffers& b, int64_t i, int64_t n) {
  State s;
  s.p = load(u, u.master, u.master_kind, b.master, i, n);
  s.m = load(u, u.exp_avg, u.exp_avg_kind, b.exp_avg, i, n);
  s.v = load(u, u.exp_avg_sq, u.exp_avg_sq_kind, b.exp_avg_sq, i, n);
  s.new_p = place(u.new_master, u.master_kind, b.master, i);
  s.new_m = place(u.new_exp_avg, u.exp_avg_kind, b.exp_avg, i);
  s.new_v = place(u.new_exp_avg_sq, u.exp_avg_sq_kind, b.exp_avg_sq, i);
  const bool out = u.out_kind == BF16;
  if (u.gradient_kind == BF16) {
    const uint16_t* gradient = static_cast<const uint16_t*>(u.gradient) + i;
    out ? adam<true>(u, s, gradient, b, n) : adam<false>(u, s, gradient, b, n);
  } else {
    const float* gradient = load_gradient(u, b.gradient, i, n);
    out ? adam<true>(u, s, gradient, b, n) : adam<false>(u, s, gradient, b, n);
  }
  store(u, u.new_master, u.master_kind, b.master, i, n);
  store(u, u.new_exp_avg, u.exp_avg_kind, b.exp_avg, i, n);
  store(u, u.new_exp_avg_sq, u.exp_avg_sq_kind, b.exp_avg_sq, i, n);
  write_out(u, s.new_p, b.out, i, n);
}

// The memory traffic of an update with fp32 states and no arithmetic: what the benchmark holds the update against.
void move_tile(const Update& u, Buffers& b, int64_t i, int64_t n) {
  const uint16_t* g = static_cast<const uint16_t*>(u.gradient) + i;
  const uint32_t *p = at<uint32_t>(u.master.data, i), *m = at<uint32_t>(u.exp_avg.data, i);
  const uint32_t* v = at<uint32_t>(u.exp_avg_sq.data, i);
  uint32_t *new_p = at<uint32_t>(u.new_master.data, i), *new_m = at<uint32_t>(u.new_exp_avg.data, i);
  uint32_t* new_v = at<uint32_t>(u.new_exp_avg_sq.data, i);
  const uint32_t mask = to_bits(u.factor);
  INDEPENDENT
  for (int64_t k = 0; k < n; k++) {
    new_p[k] = p[k] ^ mask;
    new_m[k] = m[k] ^ mask;
    new_v[k] = v[k] ^ mask;
    b.out[k] = static_cast<uint16_t>(g[k] ^ mask);
  }
  stream(b.out, at<uint16_t>(u.out, i), n);
}

template <void (*Tile)(const Update&, Buffers&, int64_t, int64_t)>
void share(const void* work, int64_t number) {
  const Update& update = *static_cast<const Update*>(work);
  Buffers buffers;
  const int64_t start = number * SHARE, stop = start + SHARE < update.n ? start + SHARE : update.n;
  for (int64_t i = start; i < stop; i += TILE) Tile(update, buffers, i, i + TILE < stop ? TILE : stop - i);
}

template <void (*Tile)(const Update&, Buffers&, int64_t, int64_t)>
void run(const Update* update, int threads) {
  crew().run(share<Tile>, update, (update->n + SHARE - 1) / SHARE, threads);
}

}  // namespace

extern "C" {

void zeroshard_adam(const Update* update, int32_t threads) { run<update_tile>(update, threads); }

void zeroshard_traffic(const Update* update, int32_t threads) { run<move_tile>(update, threads); }

}  // extern "C"
