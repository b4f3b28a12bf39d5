// The products of prefill attention on AVX512-BF16: one instruction multiplies 16 pairs and adds each up. Lanes are
// keys in the scores and columns in the sum of values, so that no sum goes across lanes.
#pragma once

#include "prefill_packed.h"

#ifdef __AVX512BF16__

namespace {

constexpr int ROWS_OF_PAIRS = 6;  // with 4 vectors: 24 sums, 4 right factors and a left one fit the 32 registers

// E: what the cache stores.
template <class E>
class PairProducts : public PackedProducts<E, ROWS_OF_PAIRS> {
  using Base = PackedProducts<E, ROWS_OF_PAIRS>;
  using Base::padded_dim, Base::tile, Base::scored, Base::q, Base::weights;

 public:
  using Base::Base, Base::ROWS, Base::sums;

  // Scores of rows [first, end), at most ROWS, with the tile's first `count` keys.
  void score(int64_t first, int64_t, int64_t count) {
    for (int64_t i = 0; i < count; i += VECTORS * LANES)
      with_constant<VECTORS>(ceil_div(count - i, LANES), [&](auto vectors) {
        score_keys<decltype(vectors)::value>(first, i);
      });
  }

  // Adds the tile's first `count` values times rows [first, end), at most ROWS, of weights.
  void add_values(int64_t first, int64_t, int64_t count) {
    int64_t d = 0;
    for (; d + VECTORS * LANES <= padded_dim; d += VECTORS * LANES) add_columns<VECTORS>(first, count, d);
    for (; d < padded_dim; d += TILE_COLUMNS) add_columns<TILE_COLUMNS / LANES>(first, count, d);
  }

 private:
  static constexpr int VECTORS = 4;  // that are multiplied at once

  template <int COUNT>
  void score_keys(int64_t first, int64_t i) {
    Vec products[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < COUNT; j++) products[r][j] = Vec{};
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS)
      multiply(q + first * padded_dim + d, padded_dim, tile.key_tile(d, i), TILE_ROWS, products);
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < COUNT; j++)
        store(scored + r * PREFILL_TILE + i + j * LANES, products[r][j] * tile.key_factors(i + j * LANES));
  }

  template <int COUNT>
  void add_columns(int64_t first, int64_t count, int64_t d) {
    float* to = sums(first) + d;
    Vec added[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < COUNT; j++) added[r][j] = load(to + r * padded_dim + j * LANES);
    for (int64_t i = 0; i < count; i += TILE_COLUMNS)
      multiply(weights + i, PREFILL_TILE, tile.value_tile(i, d), min(TILE_ROWS, ceil_div(count - i, 2)), added);
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < COUNT; j++) store(to + r * padded_dim + j * LANES, added[r][j]);
  }

  // sums[r][j] += pairs of row r of `left`, `stride` apart, times those of the j-th part of `right`.
  template <int COUNT>
  static void multiply(const bf16* left, int64_t stride, const bf16* right, int64_t pairs, Vec (&sums)[ROWS][COUNT]) {
    for (int64_t p = 0; p < pairs; p++, left += 2, right += TILE_COLUMNS) {
      Vec factors[COUNT];
      for (int j = 0; j < COUNT; j++) factors[j] = load_pairs_of(right + j * TILE_ROWS * TILE_COLUMNS, TILE_COLUMNS);
      for (int r = 0; r < ROWS; r++) {
        const Vec pair = broadcast_pair(left + r * stride);
        for (int j = 0; j < COUNT; j++) sums[r][j] = add_pairs(sums[r][j], pair, factors[j]);
      }
    }
  }
};

}  // namespace

#endif
