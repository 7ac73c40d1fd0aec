// Adafactor on the host (1804.04235, Algorithms 4 and 5): a plain C interface, no headers of torch.
//
// Of a matrix the gradient is read three times, and no less will do: the second moment needs all its squares, the size of
// the update the second moment, and the change that size. The weights are read with the second, and changed in the third.
// The second pass goes backwards, so that it begins, and the third after it, with what caches still hold.
// Work goes in tiles. Sums are in fp64, of groups that are added in fp32, in an order that follows from the shape alone,
// and every other operation is rounded by itself: results have the same bits on every processor, with any number of
// threads.

#include "host_kernels.h"

#include <array>
#include <cmath>
#include <type_traits>

namespace {

constexpr int64_t SEGMENT = 1024;  // elements of a row at a time
constexpr int64_t NARROW = 2048;   // columns, whose sums fit the first-level cache
constexpr int64_t ROWS = 4;        // at a time of wider matrices, so that the sums of columns are read less often

}  // namespace

extern "C" {

// A stack of matrices that are updated one after the other, or of vectors, each a single row.
struct Adafactor {
  int64_t stack, rows, columns, tile_rows, tile_columns;
  const void* gradient;
  float* weights;
  float* row_moments;     // [stack, rows]; null for vectors
  float* column_moments;  // [stack, columns]; of vectors the second moments themselves
  float* momentum;        // null for none
  void* out;              // new weights; null for none
  double* scratch;        // of `scratch_of` in host_adafactor.py
  int32_t gradient_kind, out_kind, scaled;
  float factor, beta1, weight1;
  double weight2, eps1, eps2, threshold, rate, weight_decay;
};

}  // extern "C"

namespace {

using Float8 = float __attribute__((vector_size(32)));
using Double8 = double __attribute__((vector_size(64)));
using Bits8 = uint32_t __attribute__((vector_size(32)));
using Half8 = uint16_t __attribute__((vector_size(16)));

template <typename V, typename T>
inline V read(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Gradients times the factor, one by one and eight at a time.
struct FromFp32 {
  const float* from;
  float factor;
  float operator[](int64_t i) const { return from[i] * factor; }
  Float8 eight(int64_t i) const { return read<Float8>(from + i) * factor; }
};

struct FromBf16 {
  const uint16_t* from;  // bf16
  float factor;
  float operator[](int64_t i) const { return from_bits(static_cast<uint32_t>(from[i]) << 16) * factor; }
  Float8 eight(int64_t i) const {
    const Bits8 bits = __builtin_convertvector(read<Half8>(from + i), Bits8) << 16;
    return reinterpret_cast<Float8>(bits) * factor;
  }
};

struct Plain {
  const float* x;
  float operator[](int64_t i) const { return x[i]; }
  Float8 eight(int64_t i) const { return read<Float8>(x + i); }
};

// Gradients times the factors of a row and of columns: the update before it is clipped.
template <typename G>
struct Product {
  G g;
  float row;
  const float* columns;
  float operator[](int64_t i) const { return g[i] * row * columns[i]; }
  Float8 eight(int64_t i) const { return g.eight(i) * row * read<Float8>(columns + i); }
};

struct Lanes {
  Float8 sums[4] = {};
  double rest = 0;

  double total() const {
    Double8 all = {};
    for (const Float8& sum : sums) all += __builtin_convertvector(sum, Double8);
    return ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7])) + rest;
  }
};

struct Nothing {
  float operator[](int64_t) const { return 0; }
  Float8 eight(int64_t) const { return Float8{}; }
};

// The sums of the squares of n numbers in R rows x and y: in fp32 within a lane of at most 64 numbers, in fp64 beyond.
// What is read side by side is on its way from memory at the same time.
template <int R, typename X, typename Y>
inline void squares(const X* x, const Y* y, double* sums, int64_t n) {
  Lanes lanes[2];
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int k = 0; k < 4; k++)
      for (int r = 0; r < R; r++) {
        const Float8 first = x[r].eight(i + 8 * k), second = y[r].eight(i + 8 * k);
        lanes[0].sums[k] += first * first;
        lanes[1].sums[k] += second * second;
      }
  for (; i < n; i++)
    for (int r = 0; r < R; r++) {
      lanes[0].rest += static_cast<double>(x[r][i]) * x[r][i];
      lanes[1].rest += static_cast<double>(y[r][i]) * y[r][i];
    }
  sums[0] += lanes[0].total(), sums[1] += lanes[1].total();
}

// The sums of the squares of each of R rows, which are added to those of columns too.
template <int R, typename X>
inline void squares_by_side(const X* rows, double* columns, double* sums, int64_t n) {
  Lanes lanes[R];
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int k = 0; k < 4; k++) {
      Float8 down = {};
      for (int r = 0; r < R; r++) {
        const Float8 value = rows[r].eight(i + 8 * k), square = value * value;
        lanes[r].sums[k] += square;
        down += square;
      }
      double* const place = columns + i + 8 * k;
      const Double8 sum = read<Double8>(place) + __builtin_convertvector(down, Double8);
      std::memcpy(place, &sum, sizeof sum);
    }
  for (; i < n; i++)
    for (int r = 0; r < R; r++) {
      const double square = static_cast<double>(rows[r][i]) * rows[r][i];
      lanes[r].rest += square;
      columns[i] += square;
    }
  for (int r = 0; r < R; r++) sums[r] += lanes[r].total();
}

template <typename T>
inline T mixed(T kept, T given, T weight) {  // as torch's lerp
  return weight < 0.5f ? kept + (given - kept) * weight : given - (given - kept) * (1 - weight);
}

// An update under way: the places of its scratch, and the numbers that one pass leaves for the next.
struct Work {
  explicit Work(const Adafactor& of) : a(of) {
    blocks = (a.rows + a.tile_rows - 1) / a.tile_rows, chunks = (a.columns + a.tile_columns - 1) / a.tile_columns;
    sizes = a.scratch;
    column_parts = sizes + 2 * tiles();
    row_parts = column_parts + blocks * a.columns;
    column_factors = reinterpret_cast<float*>(row_parts + chunks * a.rows);
    row_factors = column_factors + a.columns;
  }

  int64_t tiles() const { return blocks * chunks; }

  const Adafactor a;
  int64_t blocks, chunks;
  double* sizes;                        // squares of update and of weights: [tiles, 2]; all that vectors have
  double *column_parts, *row_parts;     // squares of the gradient: [blocks, columns], [chunks, rows]
  float *column_factors, *row_factors;  // whose product is 1/sqrt(V)
  float decay = 1, size = 1;
};

template <int R>
using Count = std::integral_constant<int, R>;

struct Tile {
  Tile(const Work& w, int64_t number) : block(number / w.chunks), chunk(number % w.chunks) {
    row = block * w.a.tile_rows, column = chunk * w.a.tile_columns;
    last_row = row + w.a.tile_rows < w.a.rows ? row + w.a.tile_rows : w.a.rows;
    last_column = column + w.a.tile_columns < w.a.columns ? column + w.a.tile_columns : w.a.columns;
  }

  // Calls `visit` with the number of rows, row, column and length of each segment.
  template <typename Visit>
  void each(Visit visit) const {
    const auto from = [&](auto count, int64_t first) {
      constexpr int64_t length = count == 1 ? SEGMENT : SEGMENT / 2;
      for (; first + count <= last_row; first += count)
        for (int64_t k = column; k < last_column; k += length)
          visit(count, first, k, k + length < last_column ? length : last_column - k);
      return first;
    };
    from(Count<1>{}, last_column - column > NARROW ? from(Count<ROWS>{}, row) : row);
  }

  int64_t block, chunk, row, last_row, column, last_column;
};

// Calls `visit` with n elements of R rows of the gradient, from a row and a column on.
template <int R, typename Visit>
inline void open(const Adafactor& a, int64_t row, int64_t column, int64_t n, Visit visit) {
  const int64_t first = row * a.columns + column;
  if (a.gradient_kind == BF16) {
    FromBf16 rows[R];
    for (int r = 0; r < R; r++) rows[r] = {static_cast<const uint16_t*>(a.gradient) + first + r * a.columns, a.factor};
    visit(rows);
    return;
  }
  alignas(64) float buffers[R][SEGMENT];
  FromFp32 rows[R];
  for (int r = 0; r < R; r++) {
    const int64_t i = first + r * a.columns;
    rows[r] = {static_cast<const float*>(a.gradient) + i, a.factor};
    if (a.gradient_kind == FP16) {
      widen_fp16(static_cast<const uint16_t*>(a.gradient) + i, buffers[r], n);
      rows[r].from = buffers[r];
    }
  }
  visit(rows);
}

// Squares of the gradient, by rows and columns.
void add_up(const void* work, int64_t number) {
  const Work& w = *static_cast<const Work*>(work);
  const Tile t(w, number);
  double *const sums = w.row_parts + t.chunk * w.a.rows, *const columns = w.column_parts + t.block * w.a.columns;
  for (int64_t i = t.column; i < t.last_column; i++) columns[i] = 0;
  for (int64_t row = t.row; row < t.last_row; row++) sums[row] = 0;
  t.each([&](auto count, int64_t row, int64_t column, int64_t n) {
    constexpr int R = decltype(count)::value;
    open<R>(w.a, row, column, n, [&](const auto* g) { squares_by_side<R>(g, columns + column, sums + row, n); });
  });
}

// The means of rows and columns, and their factors (Algorithm 4, lines 5 to 7).
void change_moments(Work& w) {
  const Adafactor& a = w.a;
  double sum = 0;
  for (int64_t i = 0; i < a.rows; i++) {
    double squares = 0;
    for (int64_t chunk = 0; chunk < w.chunks; chunk++) squares += w.row_parts[chunk * a.rows + i];
    a.row_moments[i] = static_cast<float>(mixed<double>(a.row_moments[i], squares / a.columns + a.eps1, a.weight2));
    sum += a.row_moments[i];
  }
  for (int64_t i = 0; i < a.rows; i++)
    w.row_factors[i] = static_cast<float>(1 / std::sqrt(a.row_moments[i] / (sum / a.rows)));
  for (int64_t block = 1; block < w.blocks; block++)
    for (int64_t i = 0; i < a.columns; i++) w.column_parts[i] += w.column_parts[block * a.columns + i];
  for (int64_t i = 0; i < a.columns; i++) {
    const double mean = w.column_parts[i] / a.rows + a.eps1;
    a.column_moments[i] = static_cast<float>(mixed<double>(a.column_moments[i], mean, a.weight2));
    w.column_factors[i] = static_cast<float>(1 / std::sqrt(static_cast<double>(a.column_moments[i])));
  }
}

// Squares of R rows of an update, and of the weights where they scale the step.
template <int R, typename U>
void measure(const Adafactor& a, const U* update, int64_t first, double* sums, int64_t n) {
  if (a.scaled) {
    Plain weights[R];
    for (int r = 0; r < R; r++) weights[r] = {a.weights + first + r * a.columns};
    squares<R>(update, weights, sums, n);
  } else {
    squares<R>(update, std::array<Nothing, R>{}.data(), sums, n);
  }
}

void measure(const void* work, int64_t claimed) {
  const Work& w = *static_cast<const Work*>(work);
  const int64_t number = w.tiles() - 1 - claimed;
  double sums[2] = {};
  Tile(w, number).each([&](auto count, int64_t row, int64_t column, int64_t n) {
    constexpr int R = decltype(count)::value;
    open<R>(w.a, row, column, n, [&](const auto* g) {
      Product<std::decay_t<decltype(*g)>> update[R];
      for (int r = 0; r < R; r++) update[r] = {g[r], w.row_factors[row + r], w.column_factors + column};
      measure<R>(w.a, update, row * w.a.columns + column, sums, n);
    });
  });
  std::memcpy(w.sizes + 2 * number, sums, sizeof sums);
}

// The same of a vector, whose second moments are changed before (Algorithm 5).
void measure_vector(const void* work, int64_t number) {
  const Work& w = *static_cast<const Work*>(work);
  const float eps = static_cast<float>(w.a.eps1), weight = static_cast<float>(w.a.weight2);
  double sums[2] = {};
  Tile(w, number).each([&](auto, int64_t row, int64_t column, int64_t n) {
    alignas(64) float update[SEGMENT];
    float* const second = w.a.column_moments + column;
    open<1>(w.a, row, column, n, [&](const auto* rows) {
      const auto g = *rows;
      INDEPENDENT
      for (int64_t i = 0; i < n; i++) {
        second[i] = mixed(second[i], g[i] * g[i] + eps, weight);
        update[i] = g[i] / __builtin_sqrtf(second[i]);
      }
    });
    const Plain plain{update};
    measure<1>(w.a, &plain, column, sums, n);
  });
  std::memcpy(w.sizes + 2 * number, sums, sizeof sums);
}

// The step size, clipped by the size of the update (lines 1, 2 and 8).
void choose_size(Work& w) {
  const Adafactor& a = w.a;
  double update = 0, weights = 0;
  for (int64_t number = 0; number < w.tiles(); number++)
    update += w.sizes[2 * number], weights += w.sizes[2 * number + 1];
  const double elements = static_cast<double>(a.rows) * a.columns;
  double size = a.rate;
  if (a.scaled) {
    const double scale = std::sqrt(weights / elements);
    size *= scale < a.eps2 ? a.eps2 : scale;
  }
  w.decay = static_cast<float>(1 - a.weight_decay * size);
  const double beyond = std::sqrt(update / elements) / a.threshold;
  w.size = static_cast<float>(beyond < 1 ? size : size / beyond);
  if (a.row_moments)
    for (int64_t i = 0; i < a.rows; i++) w.row_factors[i] *= w.size;
}

// Change n weights in each of R rows by an update, through the momentum if there is one. OUT: they go to `rounded` as
// bf16 too.
template <bool MOMENTUM, bool OUT, int R, typename U>
void change(const Work& w, int64_t first, const U* given, uint16_t (*rounded)[SEGMENT], int64_t n) {
  const float decay = w.decay, beta1 = w.a.beta1, weight1 = w.a.weight1;
  const int64_t apart = w.a.columns;
  float *const weights = w.a.weights + first, *const momentum = w.a.momentum + (MOMENTUM ? first : 0);
  U update[R];  // copies, so that no store can change them
  std::memcpy(update, given, sizeof update);
  INDEPENDENT
  for (int64_t i = 0; i < n; i++)
    for (int r = 0; r < R; r++) {
      const int64_t k = r * apart + i;
      float by = update[r][i];
      if (MOMENTUM) by = momentum[k] = momentum[k] * beta1 + by * weight1;
      const float changed = weights[k] * decay - by;
      weights[k] = changed;
      if (OUT) rounded[r][i] = to_bf16(changed);
    }
}

template <int R, typename U>
void change(const Work& w, int64_t first, const U* update, int64_t n) {
  alignas(64) uint16_t rounded[R][SEGMENT];
  const bool out = w.a.out_kind == BF16;
  const auto run = w.a.momentum ? (out ? change<true, true, R, U> : change<true, false, R, U>)
                                : (out ? change<false, true, R, U> : change<false, false, R, U>);
  run(w, first, update, rounded, n);
  for (int r = 0; r < R && w.a.out_kind != NONE; r++) {
    const int64_t i = first + r * w.a.columns;
    if (w.a.out_kind == FP16) narrow_fp16(w.a.weights + i, rounded[r], n);
    if (w.a.out_kind == FP32) std::memcpy(at<float>(w.a.out, i), w.a.weights + i, n * sizeof(float));
    else stream(rounded[r], at<uint16_t>(w.a.out, i), n);
  }
}

// New weights (lines 9 and 10).
void apply(const void* work, int64_t number) {
  const Work& w = *static_cast<const Work*>(work);
  Tile(w, number).each([&](auto count, int64_t row, int64_t column, int64_t n) {
    constexpr int R = decltype(count)::value;
    open<R>(w.a, row, column, n, [&](const auto* g) {
      Product<std::decay_t<decltype(*g)>> update[R];
      for (int r = 0; r < R; r++) update[r] = {g[r], w.row_factors[row + r], w.column_factors + column};
      change<R>(w, row * w.a.columns + column, update, n);
    });
  });
}

template <typename G>
struct Quotient {
  G g;
  const float* second;
  float size;
  float operator[](int64_t i) const { return g[i] / __builtin_sqrtf(second[i]) * size; }
};

void apply_vector(const void* work, int64_t number) {
  const Work& w = *static_cast<const Work*>(work);
  Tile(w, number).each([&](auto, int64_t row, int64_t column, int64_t n) {
    open<1>(w.a, row, column, n, [&](const auto* g) {
      const Quotient<std::decay_t<decltype(*g)>> update{*g, w.a.column_moments + column, w.size};
      change<1>(w, column, &update, n);
    });
  });
}

void update(const Adafactor& a, int threads) {
  Work w(a);
  Crew& all = crew();
  if (a.row_moments) {
    all.run(add_up, &w, w.tiles(), threads);
    change_moments(w);
    all.run(measure, &w, w.tiles(), threads);
  } else {
    all.run(measure_vector, &w, w.tiles(), threads);
  }
  choose_size(w);
  all.run(a.row_moments ? apply : apply_vector, &w, w.tiles(), threads);
}

}  // namespace

extern "C" {

void zeroshard_adafactor(const Adafactor* all, int32_t threads) {
  Adafactor a = *all;
  const int64_t n = a.rows * a.columns;
  for (int64_t number = 0; number < a.stack; number++) {
    a.gradient = at<char>(const_cast<void*>(all->gradient), number * n * (a.gradient_kind == FP32 ? 4 : 2));
    a.weights = all->weights + number * n;
    if (a.row_moments) a.row_moments = all->row_moments + number * a.rows;
    a.column_moments = all->column_moments + number * a.columns;
    if (a.momentum) a.momentum = all->momentum + number * n;
    if (a.out) a.out = at<char>(all->out, number * n * (a.out_kind == FP32 ? 4 : 2));
    update(a, threads);
  }
}

}  // extern "C"
