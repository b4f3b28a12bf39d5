// The products of prefill attention in float32: keys and values are widened once a tile, keys transposed, so that both
// are small matrix products without horizontal sums.
#pragma once

#include "matmul.h"
#include "prefill_tiles.h"

namespace {

constexpr int MAX_PADDED_DIM = MAX_HEAD_DIM + MATMUL_COLUMNS;
static_assert(PREFILL_TILE % MATMUL_COLUMNS == 0, "score tiles have no remainder");
static_assert(MAX_ROWS % MATMUL_ROWS == 0, "full tiles of rows have no remainder");

// E: what the cache stores.
template <class E>
class VectorProducts {
 public:
  static constexpr int ROWS = MATMUL_ROWS;  // that are multiplied at once

  VectorProducts(int64_t dim, int64_t rows, float factor)
      : head_dim(dim), padded_dim(round_up(dim, MATMUL_COLUMNS)), scale(factor) {
    __builtin_memset(acc, 0, rows * padded_dim * sizeof(float));
  }

  template <class T>
  void read_query(int64_t r, const T* from) {
    widen(q + r * padded_dim, from, scale);
  }

  void load_keys(const ContextReader<E>& context, const KeyTile& keys) {
    hidden = keys.hidden;
    for (int64_t i = hidden; i < keys.count; i++)
      widen(v + i * padded_dim, context.v + keys.places[i].row, scale_of<E>(context.v_scales, keys.places[i]));
    for (int64_t i = hidden / LANES * LANES; i < keys.count; i += LANES) transpose_keys(context, keys, i);
  }

  // Scores of rows [first, end) with the tile's first `count` keys.
  void score(int64_t first, int64_t end, int64_t count) {
    multiply(q + first * padded_dim, padded_dim, k, PREFILL_TILE, scores(first), PREFILL_TILE,
             end - first, round_up(count, MATMUL_COLUMNS), head_dim, false);
  }

  // Adds the tile's first `count` values times rows [first, end) of weights, which `scores` have become.
  void add_values(int64_t first, int64_t end, int64_t count) {
    multiply(scores(first) + hidden, PREFILL_TILE, v + hidden * padded_dim, padded_dim,
             acc + first * padded_dim, padded_dim, end - first, padded_dim, max(0, count - hidden), true);
  }

  void rescale(int64_t r, float factor) {
    for (int64_t d = 0; d < padded_dim; d += LANES) store(sums(r) + d, load(sums(r) + d) * factor);
  }

  float* scores(int64_t r) { return scored + r * PREFILL_TILE; }

  // Row r's weights of keys i .. i + LANES: in place of its scores.
  void store_weights(int64_t r, int64_t i, Vec weights) { store(scores(r) + i, weights); }

  float* sums(int64_t r) { return acc + r * padded_dim; }

 private:
  int64_t head_dim, padded_dim, hidden;
  float scale;
  alignas(64) float q[MAX_ROWS * MAX_PADDED_DIM];       // [rows, padded_dim], scaled
  alignas(64) float acc[MAX_ROWS * MAX_PADDED_DIM];     // [rows, padded_dim]
  alignas(64) float scored[MAX_ROWS * PREFILL_TILE];    // [rows, PREFILL_TILE]: scores, then weights
  alignas(64) float k[MAX_PADDED_DIM * PREFILL_TILE];   // [head_dim, PREFILL_TILE]: transposed
  alignas(64) float v[PREFILL_TILE * MAX_PADDED_DIM];   // [PREFILL_TILE, padded_dim]

  // to[0 .. padded_dim) = from[0 .. head_dim) * factor, then zeros.
  template <class T>
  void widen(float* to, const T* from, float factor) const {
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store(to + d, load(from + d) * factor);
    for (; d < padded_dim; d += LANES) store(to + d, load_first(from + d, max(0, head_dim - d)) * factor);
  }

  // LANES keys from `first` on as columns of `k`, which has room for whole vectors both ways; for those that the tile
  // does not have, whose scores are not used, others of it.
  void transpose_keys(const ContextReader<E>& context, const KeyTile& keys, int64_t first) {
    for (int64_t d = 0; d < head_dim; d += LANES) {
      const int64_t n = min(LANES, head_dim - d);
      Vec rows[LANES];
      for (int i = 0; i < LANES; i++) {
        const Place place = keys.places[max(keys.hidden, min(first + i, keys.count - 1))];
        rows[i] = load_some(context.k + place.row + d, n) * scale_of<E>(context.k_scales, place);
      }
      transpose(rows);
      for (int i = 0; i < LANES; i++) store(k + (d + i) * PREFILL_TILE + first, rows[i]);
    }
  }
};

}  // namespace
