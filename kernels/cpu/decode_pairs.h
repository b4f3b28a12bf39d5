// The products of decode attention on AVX512-BF16 over a bfloat16 cache: K is multiplied as it lies, in pairs of columns,
// V in pairs of keys, for which their weights are rounded to bfloat16, as in prefill. Heads are whole vectors.
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
    constexpr int KEYS = G >= 7 ? 1 : G >= 3 ? 4 : 8;
    Vec lanes[G][DECODE_TILE];
    int64_t i = 0;
    for (; i + KEYS <= tile.count; i += KEYS) {
      for (int64_t key = i; key < min(i + KEYS, next.count); key++)
        prefetch_columns(k + next.places[key].row, 0, head_dim);
      score_keys<KEYS>(k, tile.places, i, lanes);
    }
    for (int64_t key = i; key < next.count; key++) prefetch_columns(k + next.places[key].row, 0, head_dim);
    for (; i < tile.count; i++) score_keys<1>(k, tile.places, i, lanes);
    for (int g = 0; g < G; g++)
      for (i = 0; i < tile.count; i += LANES) store(scores[g] + i, sums_of(lanes[g] + i) * scale);
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

  const float* sums(int g) const { return acc[g]; }

 private:
  int64_t head_dim;
  float scale;
  alignas(64) bf16 q[G][MAX_HEAD_DIM];
  alignas(64) float acc[G][MAX_HEAD_DIM] = {};

  // Lanes of the scores of KEYS keys at once: enough independent sums to hide the latency of a product.
  template <int KEYS>
  void score_keys(const bf16* k, const Place* places, int64_t i, Vec (*lanes)[DECODE_TILE]) const {
    Vec dots[KEYS][G];
    for (int key = 0; key < KEYS; key++)
      for (int g = 0; g < G; g++) dots[key][g] = Vec{};
    for (int64_t d = 0; d < head_dim; d += TILE_COLUMNS)
      for (int key = 0; key < KEYS; key++) {
        const Vec pairs = load_pairs_of(k + places[i + key].row + d, TILE_COLUMNS);
        for (int g = 0; g < G; g++) dots[key][g] = add_pairs(dots[key][g], pairs, load_pairs_of(q[g] + d, TILE_COLUMNS));
      }
    for (int key = 0; key < KEYS; key++)
      for (int g = 0; g < G; g++) lanes[g][i + key] = dots[key][g];
  }

  // Adds up CHUNKS chunks of every V from column d on, two keys at a time; an odd key's second half is itself, weighing 0.
  template <int CHUNKS>
  void add_chunks(const bf16* v, const Tile& tile, const Tile& next, const bf16 (*weights)[DECODE_TILE],
                  const float* factors, int64_t d) {
    Vec added[G][2 * CHUNKS];
    for (int g = 0; g < G; g++)
      for (int c = 0; c < 2 * CHUNKS; c++) added[g][c] = load(acc[g] + d + c * LANES) * factors[g];
    for (int64_t i = 0; i < tile.count; i += 2) {
      for (int64_t key = i; key < min(i + 2, next.count); key++)
        prefetch_columns(v + next.places[key].row, d, d + CHUNKS * TILE_COLUMNS);
      const bf16 *even = v + tile.places[i].row + d, *odd = v + tile.places[min(i + 1, tile.count - 1)].row + d;
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
    for (int64_t i = round_up(tile.count, 2); i < next.count; i++)
      prefetch_columns(v + next.places[i].row, d, d + CHUNKS * TILE_COLUMNS);
    for (int g = 0; g < G; g++)
      for (int c = 0; c < 2 * CHUNKS; c++) store(acc[g] + d + c * LANES, added[g][c]);
  }
};

}  // namespace

#endif
