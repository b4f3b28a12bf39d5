// The products of prefill attention on AMX: bfloat16 queries, keys, weights and values, float32 sums.
#pragma once

#include "amx_tiles.h"
#include "prefill_packed.h"

#ifdef HAVE_AMX

namespace {

static_assert(PREFILL_TILE == 4 * TILE_ROWS && PREFILL_TILE == 2 * TILE_COLUMNS, "scores and weights are written out");

// E: what the cache stores.
template <class E>
class AmxProducts : public PackedProducts<E, TILE_ROWS> {
  using Base = PackedProducts<E, TILE_ROWS>;
  using Base::padded_dim, Base::tile, Base::scored, Base::q, Base::weights;

 public:
  using Base::Base, Base::scores, Base::sums;

  // Scores of rows [first, end), at most ROWS, with all keys of the tile.
  void score(int64_t first, int64_t end, int64_t) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS) {
      load_tile<4>(q + first * padded_dim + d, padded_dim * sizeof(bf16));
      add_scores<0>(d), add_scores<1>(d), add_scores<2>(d), add_scores<3>(d);
    }
    store_scores<0>(), store_scores<1>(), store_scores<2>(), store_scores<3>();
    for (int64_t r = first; r < end; r++)
      for (int64_t i = 0; i < PREFILL_TILE; i += LANES)
        store(scores(r) + i, load(scores(r) + i) * tile.key_factors(i));
  }

  // Adds all values of the tile times rows [first, end), at most ROWS, of weights.
  void add_values(int64_t first, int64_t, int64_t count) {
    if (count == 0) return;
    load_tile<4>(weights, PREFILL_TILE * sizeof(bf16));
    load_tile<5>(weights + TILE_COLUMNS, PREFILL_TILE * sizeof(bf16));
    const int64_t row_bytes = padded_dim * sizeof(float);
    for (int64_t d = 0; d < padded_dim; d += 2 * LANES) {
      load_tile<0>(sums(first) + d, row_bytes);
      load_tile<1>(sums(first) + d + LANES, row_bytes);
      add_products<0, 4>(0, d), add_products<1, 4>(0, d + LANES);
      add_products<0, 5>(TILE_COLUMNS, d), add_products<1, 5>(TILE_COLUMNS, d + LANES);
      store_tile<0>(sums(first) + d, row_bytes);
      store_tile<1>(sums(first) + d + LANES, row_bytes);
    }
  }

 private:
  TileRegisters registers;

  template <int PART>
  void add_scores(int64_t d) {
    load_tile<5 + PART % 2>(tile.key_tile(d, PART * TILE_ROWS), TILE_BYTES);
    multiply_tiles<PART, 4, 5 + PART % 2>();
  }

  template <int PART>
  void store_scores() {
    store_tile<PART>(scored + PART * TILE_ROWS, PREFILL_TILE * sizeof(float));
  }

  template <int SUMS, int WEIGHTS>
  void add_products(int64_t key, int64_t d) {
    load_tile<6 + SUMS>(tile.value_tile(key, d), TILE_BYTES);
    multiply_tiles<SUMS, WEIGHTS, 6 + SUMS>();
  }
};

}  // namespace

#endif
