// Prefill attention in products of bfloat16: a tile of keys and values, packed once for all rows that share it.
//
// Keys, in pairs of columns, and values, in pairs of keys, become right factors; queries and weights are left ones as
// they lie. Quantised caches are packed as the integers (or e4m3) that they hold, which bfloat16 holds exactly: a key's
// scale multiplies its scores, a value's its weights. Weights are rounded to bfloat16 relative to the largest score so
// far, which depends on their row alone. Tiles are whole, zeros where no key or column is.
#pragma once

#include "pair_tiles.h"
#include "prefill_tiles.h"

#ifdef __AVX512BF16__

namespace {

static_assert(MAX_HEAD_DIM % TILE_COLUMNS == 0, "full tiles of columns have no remainder");
static_assert(PREFILL_TILE % TILE_COLUMNS == 0, "nor have those of keys");

// E: what the cache stores.
template <class E>
class PackedKeys {
 public:
  PackedKeys(int64_t dim, float factor) : head_dim(dim), padded_dim(round_up(dim, TILE_COLUMNS)), scale(factor) {}

  void load(const ContextReader<E>& context, const KeyTile& keys) {
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS) {
      for (int64_t i = 0; i < PREFILL_TILE; i += TILE_ROWS)
        pack_tile(key_tile(d, i), [&](int row) { return pairs_of(context.k, keys, i + row, d); });
      for (int64_t i = 0; i < PREFILL_TILE; i += 2)
        pack_values(pairs_of(context.v, keys, i, d), pairs_of(context.v, keys, i + 1, d), value_tile(i, d));
    }
    if constexpr (QUANTISED<E>)
      for (int64_t i = 0; i < PREFILL_TILE; i++) {
        key_scales[i] = keys.has(i) ? scale * context.k_scales[keys.places[i].scale] : 0.f;
        value_scales[i] = keys.has(i) ? context.v_scales[keys.places[i].scale] : 0.f;
      }
  }

  // The part of TILE_COLUMNS columns from d on and TILE_ROWS keys from i on.
  bf16* key_tile(int64_t d, int64_t i) { return k + d * PREFILL_TILE + i * TILE_COLUMNS; }

  // Keys i and i + 1 in the part of TILE_COLUMNS keys, and LANES columns from d on, that they lie in.
  bf16* value_tile(int64_t i, int64_t d) {
    return v + i / TILE_COLUMNS * TILE_COLUMNS * padded_dim + d * TILE_COLUMNS + i % TILE_COLUMNS * LANES;
  }

  // What products of queries with keys i .. i + LANES are to be multiplied by.
  Vec key_factors(int64_t i) const {
    if constexpr (QUANTISED<E>) return ::load(key_scales + i);
    return fill(scale);
  }

  // What weights of keys i .. i + LANES are to be multiplied by.
  Vec value_factors(int64_t i) const {
    if constexpr (QUANTISED<E>) return ::load(value_scales + i);
    return fill(1.f);
  }

 private:
  const int64_t head_dim, padded_dim;
  const float scale;
  alignas(64) float key_scales[PREFILL_TILE], value_scales[PREFILL_TILE];
  alignas(64) bf16 k[PREFILL_TILE * MAX_HEAD_DIM];  // tile after tile: [pairs of columns, keys, 2]
  alignas(64) bf16 v[PREFILL_TILE * MAX_HEAD_DIM];  // tile after tile: [pairs of keys, columns, 2]

  // TILE_COLUMNS columns from d on of key i, or zeros.
  Vec pairs_of(const E* rows, const KeyTile& keys, int64_t i, int64_t d) const {
    return keys.has(i) ? load_pairs_of(rows + keys.places[i].row + d, head_dim - d) : Vec{};
  }

  // TILE_COLUMNS columns of two keys, a pair in each lane.
  void pack_values(Vec even, Vec odd, bf16* to) const {
    const PairsOfRows pairs = interleave(even, odd);
    __builtin_memcpy(to, &pairs.low, sizeof pairs.low);
    __builtin_memcpy(to + TILE_ROWS * TILE_COLUMNS, &pairs.high, sizeof pairs.high);
  }
};

// What all products of packed keys share. E: what the cache stores; ROWS: that are multiplied at once. Rows of a tile
// that are no query's hold whatever they held: no product mixes rows.
template <class E, int ROWS_AT_ONCE>
class PackedProducts {
 public:
  static constexpr int ROWS = ROWS_AT_ONCE;
  static_assert(MAX_ROWS % ROWS == 0, "full tiles of rows have no remainder");

  PackedProducts(int64_t dim, int64_t rows, float factor)
      : head_dim(dim), padded_dim(round_up(dim, TILE_COLUMNS)), tile(dim, factor) {
    __builtin_memset(acc, 0, round_up(rows, ROWS) * padded_dim * sizeof(float));
  }

  void read_query(int64_t r, const bf16* from) {
    for (int64_t d = 0; d < padded_dim; d += TILE_COLUMNS)
      store(reinterpret_cast<float*>(q + r * padded_dim + d), load_pairs_of(from + d, head_dim - d));
  }

  void load_keys(const ContextReader<E>& context, const KeyTile& keys) { tile.load(context, keys); }

  void rescale(int64_t r, float factor) {
    for (int64_t d = 0; d < padded_dim; d += LANES) store(sums(r) + d, load(sums(r) + d) * factor);
  }

  float* scores(int64_t r) { return scored + r % ROWS * PREFILL_TILE; }

  // Row r's weights of keys i .. i + LANES, as a left factor.
  void store_weights(int64_t r, int64_t i, Vec some) {
    store_normal(weights + r % ROWS * PREFILL_TILE + i, some * tile.value_factors(i));
  }

  float* sums(int64_t r) { return acc + r * padded_dim; }

 protected:
  const int64_t head_dim, padded_dim;
  PackedKeys<E> tile;
  alignas(64) float acc[MAX_ROWS * MAX_HEAD_DIM];  // [rows, padded_dim]
  alignas(64) float scored[ROWS * PREFILL_TILE];   // [ROWS, PREFILL_TILE]
  alignas(64) bf16 q[MAX_ROWS * MAX_HEAD_DIM];     // [rows, padded_dim]
  alignas(64) bf16 weights[ROWS * PREFILL_TILE];   // [ROWS, PREFILL_TILE]
};

}  // namespace

#endif
