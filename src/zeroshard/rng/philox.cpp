// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11, section 3.3) over the elements of rows: a plain C interface.
//
// The counter of a block is (its number's lower half, upper half, row, step); word w of block b is element 4 b + w of
// the row. Blocks are computed side by side, so that the compiler makes vectors of them.

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

constexpr int64_t LANES = 64;  // blocks side by side; their words fit the first-level cache

struct Blocks {
  uint32_t words[4][LANES];
};

// `lanes`: a constant, or a count known at run time.
template <typename Lanes>
void philox(Blocks& blocks, Lanes lanes, uint32_t key0, uint32_t key1) {
  uint32_t(&w)[4][LANES] = blocks.words;
  for (int round = 0; round < 10; ++round) {
    for (int64_t i = 0; i < lanes; ++i) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * w[0][i];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * w[2][i];
      const uint32_t new0 = uint32_t(product1 >> 32) ^ w[1][i] ^ key0;
      const uint32_t new2 = uint32_t(product0 >> 32) ^ w[3][i] ^ key1;
      w[1][i] = uint32_t(product1);
      w[3][i] = uint32_t(product0);
      w[0][i] = new0;
      w[2][i] = new2;
    }
    key0 += 0x9E3779B9u;  // the golden ratio
    key1 += 0xBB67AE85u;  // sqrt(3) - 1
  }
}

template <typename Lanes>
void number(Blocks& blocks, Lanes lanes, uint64_t block, uint32_t row, uint32_t step) {
  for (int64_t i = 0; i < lanes; ++i) {
    blocks.words[0][i] = uint32_t(block + uint64_t(i));
    blocks.words[1][i] = uint32_t((block + uint64_t(i)) >> 32);
    blocks.words[2][i] = row;
    blocks.words[3][i] = step;
  }
}

using All = std::integral_constant<int64_t, LANES>;

// Words of `count` elements of one row, from element `first` on.
void fill(uint32_t* out, uint64_t first, int64_t count, uint32_t row, uint32_t step, uint32_t key0, uint32_t key1) {
  Blocks blocks;
  int64_t skipped = int64_t(first % 4);
  for (uint64_t block = first / 4; count > 0; block += LANES) {
    if (skipped == 0 && count >= 4 * LANES) {
      number(blocks, All{}, block, row, step);
      philox(blocks, All{}, key0, key1);
      for (int64_t i = 0; i < LANES; ++i)
        for (int w = 0; w < 4; ++w) out[4 * i + w] = blocks.words[w][i];
      out += 4 * LANES;
      count -= 4 * LANES;
      continue;
    }
    // No more blocks than are needed, in whole vectors of up to 16 words.
    const int64_t lanes = std::min((skipped + count + 63) / 64 * 16, LANES);
    number(blocks, lanes, block, row, step);
    philox(blocks, lanes, key0, key1);
    const int64_t taken = std::min(count, 4 * LANES - skipped);
    for (int64_t n = 0; n < taken; ++n) out[n] = blocks.words[(skipped + n) % 4][(skipped + n) / 4];
    out += taken;
    count -= taken;
    skipped = 0;
  }
}

}  // namespace

// Words [outer, rows, runs, inner] of the rows from `row` on: of each row, runs at distances of `stride` elements, of
// which the first starts at element `first`.
extern "C" void zeroshard_philox(uint32_t* out, int64_t outer, int64_t rows, int64_t runs, int64_t inner, int64_t first,
                                 int64_t stride, uint32_t row, uint32_t step, const uint32_t* key) {
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < runs; ++k, out += inner)
        fill(out, uint64_t(first + (o * runs + k) * stride), inner, row + uint32_t(r), step, key[0], key[1]);
}
