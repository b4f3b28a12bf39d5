// The products of prefill attention on AMX: bfloat16 queries, keys, weights and values, float32 sums.
//
// Keys, in pairs of columns, and values, in pairs of keys, are packed once a tile as right factors; queries and weights
// are left ones as they lie. Quantised caches are packed as the integers (or e4m3) that they hold, which bfloat16 holds
// exactly: a key's scale multiplies its scores, a value's its weights. Weights are rounded to bfloat16 relative to the
// largest score so far, which depends on their row alone. Tiles are whole, zeros where no key or column is.
#pragma once

#include "amx_tiles.h"
#include "prefill_tiles.h"

#ifdef HAVE_AMX

namespace {

static_assert(MAX_ROWS % TILE_ROWS == 0, "full tiles of rows have no remainder");
static_assert(MAX_HEAD_DIM % TILE_COLUMNS == 0, "nor have those of columns");
static_assert(PREFILL_TILE == 4 * TILE_ROWS && PREFILL_TILE == 2 * TILE_COLUMNS, "scores and weights are written out");

// E: what the cache stores. Rows of a tile that are no query's hold whatever they held: no product mixes rows.
template <class E>
class AmxProducts {
 public:
  static constexpr int ROWS = TILE_ROWS;  // that are multiplied at once

  AmxProducts(int64_t dim, int64_t rows, float factor)
      : head_dim(dim), padded_dim(round_up(dim, TILE_COLUMNS)), scale(factor) {
    __builtin_memset(acc, 0, round_up(rows, TILE_ROWS) * padded_dim * sizeof(float));
  }

  void read_query(int64_t r, const bf16* from) {
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS)
      store(reinterpret_cast<float*>(q + r * padded_dim + d), load_pairs_of(from + d, head_dim - d));
  }

  void load_keys(const ContextReader<E>& context, const KeyTile& keys) {
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS)
      for (int64_t first = 0; first < PREFILL_TILE; first += TILE_ROWS)
        pack_tile(key_tile(d, first), [&](int i) {
          return keys.has(first + i) ? load_pairs_of(context.k + keys.places[first + i].row + d, head_dim - d) : Vec{};
        });
    for (int64_t d = 0; d < padded_dim; d += LANES)
      for (int64_t i = 0; i < PREFILL_TILE; i += 2)
        store(reinterpret_cast<float*>(value_tile(i, d) + i % TILE_COLUMNS * LANES), pair_of_values(context, keys, i, d));
    for (int64_t i = 0; i < PREFILL_TILE; i++) {
      key_factors[i] = keys.has(i) ? scale * scale_of<E>(context.k_scales, keys.places[i]) : 0.f;
      value_factors[i] = keys.has(i) ? scale_of<E>(context.v_scales, keys.places[i]) : 0.f;
    }
  }

  // Scores of rows [first, end), at most ROWS, with all keys of the tile.
  void score(int64_t first, int64_t end, int64_t) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS) {
      load_tile<4>(q + first * padded_dim + d, padded_dim * sizeof(bf16));
      add_scores<0>(d), add_scores<1>(d), add_scores<2>(d), add_scores<3>(d);
    }
    store_scores<0>(first), store_scores<1>(first), store_scores<2>(first), store_scores<3>(first);
    for (int64_t r = first; r < end; r++)
      for (int64_t i = 0; i < PREFILL_TILE; i += LANES)
        store(scores(r) + i, load(scores(r) + i) * load(key_factors + i));
  }

  // Adds all values of the tile times rows [first, end), at most ROWS, of weights, which `scores` have become.
  void add_values(int64_t first, int64_t end, int64_t count) {
    if (count == 0) return;
    for (int64_t r = first; r < end; r++)
      for (int64_t i = 0; i < PREFILL_TILE; i += LANES) round_weights(r, i, weights + (r - first) * PREFILL_TILE + i);
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

  void rescale(int64_t r, float factor) {
    for (int64_t d = 0; d < padded_dim; d += LANES) store(sums(r) + d, load(sums(r) + d) * factor);
  }

  float* scores(int64_t r) { return scored + r * PREFILL_TILE; }
  float* sums(int64_t r) { return acc + r * padded_dim; }

 private:
  TileRegisters registers;
  int64_t head_dim, padded_dim;
  float scale;
  alignas(64) float key_factors[PREFILL_TILE], value_factors[PREFILL_TILE];
  alignas(64) float acc[MAX_ROWS * MAX_HEAD_DIM];       // [rows, padded_dim]
  alignas(64) float scored[MAX_ROWS * PREFILL_TILE];    // [rows, PREFILL_TILE]: scores, then weights
  alignas(64) bf16 q[MAX_ROWS * MAX_HEAD_DIM];          // [rows, padded_dim]
  alignas(64) bf16 weights[TILE_ROWS * PREFILL_TILE];   // [ROWS, PREFILL_TILE]
  alignas(64) bf16 k[PREFILL_TILE * MAX_HEAD_DIM];      // tile after tile: [pairs of columns, keys, 2]
  alignas(64) bf16 v[PREFILL_TILE * MAX_HEAD_DIM];      // tile after tile: [pairs of keys, columns, 2]

  // Of TILE_COLUMNS columns from d on, TILE_ROWS keys from `first` on.
  bf16* key_tile(int64_t d, int64_t first) { return k + d * PREFILL_TILE + first * TILE_COLUMNS; }

  // Which holds key i and column d, of which a tile has TILE_COLUMNS and LANES.
  bf16* value_tile(int64_t i, int64_t d) {
    return v + i / TILE_COLUMNS * TILE_COLUMNS * padded_dim + d * TILE_COLUMNS;
  }

  // Columns [d, d + LANES) of keys i and i + 1, a pair in each lane.
  Vec pair_of_values(const ContextReader<E>& context, const KeyTile& keys, int64_t i, int64_t d) const {
    const auto bits = [&](int64_t key) {
      const int64_t n = max(0, min(LANES, head_dim - d));
      return keys.has(key) ? (VecUint)load_some(context.v + keys.places[key].row + d, n) : VecUint{};
    };
    return (Vec)(bits(i) >> 16 | bits(i + 1));
  }

  template <int PART>
  void add_scores(int64_t d) {
    load_tile<5 + PART % 2>(key_tile(d, PART * TILE_ROWS), TILE_BYTES);
    multiply_tiles<PART, 4, 5 + PART % 2>();
  }

  template <int PART>
  void store_scores(int64_t first) {
    store_tile<PART>(scores(first) + PART * TILE_ROWS, PREFILL_TILE * sizeof(float));
  }

  template <int SUMS, int WEIGHTS>
  void add_products(int64_t key, int64_t d) {
    load_tile<6 + SUMS>(value_tile(key, d), TILE_BYTES);
    multiply_tiles<SUMS, WEIGHTS, 6 + SUMS>();
  }

  // LANES weights of row r from key i on. In halves: Bochs 3.0 mistakes the instruction that rounds two vectors.
  void round_weights(int64_t r, int64_t i, bf16* to) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)(load(scores(r) + i) * load(value_factors + i)));
    __builtin_memcpy(to, &rounded, sizeof rounded);
  }
};

}  // namespace

#endif
