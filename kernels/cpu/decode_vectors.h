// The products of decode attention in float32: keys and values are widened as they are read.
#pragma once

#include "decode_tile.h"

namespace {

// E: what the cache stores; G: query heads.
template <class E, int G>
class VectorDecodeProducts {
 public:
  VectorDecodeProducts(int64_t dim, float factor) : head_dim(dim), scale(factor) {}

  template <class T>
  void read_query(int g, const T* from) {
    for (int64_t d = 0; d < head_dim; d += LANES) store(q[g] + d, load_chunk(from, d) * scale);
  }

  void score(const E* k, const Tile& tile, const Tile& next, float (*scores)[DECODE_TILE]) const {
    constexpr int KEYS = G >= 5 ? 1 : 8 / G;
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
      for (i = 0; i < tile.count; i += LANES) store(scores[g] + i, sums_of(lanes[g] + i));
  }

  // Adds all V of the tile times `weights` to what was added before, times `factors`.
  void accumulate(const E* v, const Tile& tile, const Tile& next, const float (*weights)[DECODE_TILE],
                  const float* factors) {
    constexpr int CHUNKS = G == 1 ? 8 : G <= 3 ? 4 : G <= 6 ? 2 : 1;  // sums that hide the latency and fit registers
    int64_t d = 0;
    for (; d + CHUNKS * LANES <= head_dim; d += CHUNKS * LANES) add_chunks<CHUNKS>(v, tile, next, weights, factors, d);
    for (; d < head_dim; d += LANES) add_chunks<1>(v, tile, next, weights, factors, d);
  }

  template <class T>
  void store_sums(int g, float factor, T* to) const {
    store_scaled(to, acc[g], factor, head_dim);
  }

 private:
  int64_t head_dim;
  float scale;
  alignas(64) float q[G][MAX_HEAD_DIM + LANES] = {};  // scaled; zeros past head_dim
  alignas(64) float acc[G][MAX_HEAD_DIM + LANES] = {};

  // Elements d .. d + LANES of a row, zeros past head_dim.
  template <class T>
  Vec load_chunk(const T* p, int64_t d) const {
    return d + LANES <= head_dim ? load(p + d) : load_first(p + d, head_dim - d);
  }

  // Lanes of the scores of KEYS keys at once: enough independent sums to hide the latency of a multiply-add.
  template <int KEYS>
  void score_keys(const E* k, const Place* places, int64_t i, Vec (*lanes)[DECODE_TILE]) const {
    Vec dots[KEYS][G];
    for (int key = 0; key < KEYS; key++)
      for (int g = 0; g < G; g++) dots[key][g] = Vec{};
    for (int64_t d = 0; d < head_dim; d += LANES)
      for (int key = 0; key < KEYS; key++) {
        const Vec chunk = load_chunk(k + places[i + key].row, d);
        for (int g = 0; g < G; g++) dots[key][g] += load(q[g] + d) * chunk;
      }
    for (int key = 0; key < KEYS; key++)
      for (int g = 0; g < G; g++) lanes[g][i + key] = dots[key][g];
  }

  // Adds up CHUNKS chunks of every V from column d on.
  template <int CHUNKS>
  void add_chunks(const E* v, const Tile& tile, const Tile& next, const float (*weights)[DECODE_TILE],
                  const float* factors, int64_t d) {
    Vec added[CHUNKS][G];
    for (int c = 0; c < CHUNKS; c++)
      for (int g = 0; g < G; g++) added[c][g] = load(acc[g] + d + c * LANES) * factors[g];
    for (int64_t i = 0; i < tile.count; i++) {
      if (i < next.count) prefetch_columns(v + next.places[i].row, d, d + CHUNKS * LANES);
      for (int c = 0; c < CHUNKS; c++) {
        const Vec chunk = load_chunk(v + tile.places[i].row, d + c * LANES);
        for (int g = 0; g < G; g++) added[c][g] += chunk * weights[g][i];
      }
    }
    for (int64_t i = tile.count; i < next.count; i++)
      prefetch_columns(v + next.places[i].row, d, d + CHUNKS * LANES);
    for (int c = 0; c < CHUNKS; c++)
      for (int g = 0; g < G; g++) store(acc[g] + d + c * LANES, added[c][g]);
  }
};

}  // namespace
