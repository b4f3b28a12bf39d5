// The products of decode attention on AVX512-BF16 over a bfloat16 cache: K is multiplied as it lies, in pairs of
// columns, V in pairs of keys, for which their weights are rounded to bfloat16, as in prefill. Heads are whole vectors.
#pragma once

#include "decode_tile.h"
#include "pair_tiles.h"

#ifdef __AVX512BF16__

namespace {

// G: query heads.
template <int G>
class PairDecodeProducts {
 public:
  PairDecodeProducts(int64_t dim, float factor) : head_dim(dim), scale(factor) {}

  static bool takes(int64_t dim) { return dim % TILE_COLUMNS == 0; }

  void read_query(int g, const bf16* from) { __builtin_memcpy(q[g], from, head_dim * sizeof(bf16)); }

  void score(const bf16* k, const Tile& tile, const Tile& next, float (*scores)[DECODE_TILE]) const {
    int64_t i = 0;
    for (; i < tile.count; i += LANES) {
      Vec sums[G];
      score_keys<1>(k, tile.places + i, next.places + i, sums);
      for (int g = 0; g < G; g++) store(scores[g] + i, sums[g] * scale);
    }
    for (; i < next.count; i++) prefetch_columns(k + next.places[i].row, 0, head_dim);
  }

  // Adds all V of the tile times `weights`, zeros after them, to what was added before, times `factors`.
  void accumulate(const bf16* v, const Tile& tile, const Tile& next, const float (*weights)[DECODE_TILE],
                  const float* factors) {
    alignas(64) bf16 rounded[G][DECODE_TILE];
    for (int g = 0; g < G; g++)
      for (int64_t i = 0; i < tile.count; i += LANES) store_normal(rounded[g] + i, load(weights[g] + i));
    constexpr int CHUNKS = G <= 3 ? 2 : 1;  // of TILE_COLUMNS: sums that hide the latency and fit the registers
    int64_t d = 0;
    for (; d + CHUNKS * TILE_COLUMNS <= head_dim; d += CHUNKS * TILE_COLUMNS)
      add_chunks<CHUNKS>(v, tile, next, rounded, factors, d);
    for (; d < head_dim; d += TILE_COLUMNS) add_chunks<1>(v, tile, next, rounded, factors, d);
  }

  template <class T>
  void store_sums(int g, float factor, T* to) const {
    store_scaled(to, acc[g], factor, head_dim);
  }

 private:
  int64_t head_dim;
  float scale;
  alignas(64) bf16 q[G][MAX_HEAD_DIM];
  alignas(64) float acc[G][MAX_HEAD_DIM] = {};

  // Unscaled scores of every WIDTH-th of LANES keys, added across lanes as `folded` does, but while in registers. As
  // many rows of `next` are fetched meanwhile.
  template <int WIDTH>
  void score_keys(const bf16* k, const Place* places, const Place* next, Vec (&sums)[G]) const {
    if constexpr (WIDTH == LANES / 2) {
      score_two<WIDTH>(k, places, next, sums);
    } else {
      Vec others[G];
      score_keys<2 * WIDTH>(k, places, next, sums);
      score_keys<2 * WIDTH>(k, places + WIDTH, next + WIDTH, others);
      for (int g = 0; g < G; g++) sums[g] = fold<WIDTH>(sums[g], others[g]);
    }
  }

  // Two keys share a query's load.
  template <int WIDTH>
  void score_two(const bf16* k, const Place* places, const Place* next, Vec (&sums)[G]) const {
    Vec dots[G][2] = {};
    for (int64_t d = 0; d < head_dim; d += TILE_COLUMNS) {
      Vec keys[2];
      for (int key = 0; key < 2; key++) {
        prefetch_columns(k + next[key * WIDTH].row, d, d + TILE_COLUMNS);
        keys[key] = load_pairs_of(k + places[key * WIDTH].row + d, TILE_COLUMNS);
      }
      for (int g = 0; g < G; g++) {
        Vec query = load_pairs_of(q[g] + d, TILE_COLUMNS);
        KEEP_IN_REGISTER(query);
        for (int key = 0; key < 2; key++) dots[g][key] = add_pairs(dots[g][key], keys[key], query);
      }
    }
    for (int g = 0; g < G; g++) sums[g] = fold<WIDTH>(dots[g][0], dots[g][1]);
  }

  // Adds up CHUNKS chunks of every V from column d on, two keys at a time; an odd last one comes twice, then weighs 0.
  template <int CHUNKS>
  void add_chunks(const bf16* v, const Tile& tile, const Tile& next, const bf16 (*weights)[DECODE_TILE],
                  const float* factors, int64_t d) {
    Vec added[G][2 * CHUNKS];
    for (int g = 0; g < G; g++)
      for (int c = 0; c < 2 * CHUNKS; c++) added[g][c] = load(acc[g] + d + c * LANES) * factors[g];
    int64_t i = 0;
    for (; i < tile.count; i += 2) {
      for (int key = 0; key < 2; key++) prefetch_columns(v + next.places[i + key].row, d, d + CHUNKS * TILE_COLUMNS);
      const bf16 *even = v + tile.places[i].row + d, *odd = v + tile.places[i + 1].row + d;
      for (int c = 0; c < CHUNKS; c++) {
        const PairsOfRows pairs = interleave(load_pairs_of(even + c * TILE_COLUMNS, TILE_COLUMNS),
                                             load_pairs_of(odd + c * TILE_COLUMNS, TILE_COLUMNS));
        for (int g = 0; g < G; g++) {
          const Vec both = broadcast_pair(weights[g] + i);
          added[g][2 * c] = add_pairs(added[g][2 * c], pairs.low, both);
          added[g][2 * c + 1] = add_pairs(added[g][2 * c + 1], pairs.high, both);
        }
      }
    }
    for (; i < next.count; i++) prefetch_columns(v + next.places[i].row, d, d + CHUNKS * TILE_COLUMNS);
    for (int g = 0; g < G; g++)
      for (int c = 0; c < 2 * CHUNKS; c++) store(acc[g] + d + c * LANES, added[g][c]);
  }
};

}  // namespace

#endif
