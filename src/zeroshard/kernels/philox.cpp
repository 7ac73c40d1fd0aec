// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11, section 3.3) over the elements of rows: a plain C interface.
//
// The counter of a block is (its number's lower half, upper half, row, step); word w of block b is element 4 b + w of
// the row. Blocks are computed side by side, so that the compiler makes vectors of them.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t MANY = 64, FEW = 32;  // blocks side by side; fewer make short runs cheap, and 16 are no vectors

// Words of the blocks from `block` on, 4 of each.
template <int64_t COUNT>
void draw(uint32_t* out, uint64_t block, uint32_t row, uint32_t step, uint32_t key0, uint32_t key1) {
  uint32_t w[4][COUNT];
  for (int64_t i = 0; i < COUNT; ++i) {
    w[0][i] = uint32_t(block + uint64_t(i));
    w[1][i] = uint32_t((block + uint64_t(i)) >> 32);
    w[2][i] = row;
    w[3][i] = step;
  }
  for (int round = 0; round < 10; ++round) {
    for (int64_t i = 0; i < COUNT; ++i) {
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
  for (int64_t i = 0; i < COUNT; ++i)
    for (int word = 0; word < 4; ++word) out[4 * i + word] = w[word][i];
}

// Words of `count` elements of one row, from element `first` on.
void fill(uint32_t* out, uint64_t first, int64_t count, uint32_t row, uint32_t step, uint32_t key0, uint32_t key1) {
  uint64_t block = first / 4;
  int64_t skipped = int64_t(first % 4);
  while (count > 0) {
    if (skipped == 0 && count >= 4 * MANY) {
      draw<MANY>(out, block, row, step, key0, key1);
      block += MANY;
      out += 4 * MANY;
      count -= 4 * MANY;
      continue;
    }
    uint32_t words[4 * FEW];
    draw<FEW>(words, block, row, step, key0, key1);
    const int64_t taken = std::min(count, 4 * FEW - skipped);
    std::memcpy(out, words + skipped, size_t(taken) * sizeof(uint32_t));
    block += FEW;
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
