// Linear layers of bfloat16 with bfloat16 on AVX512-BF16: one instruction multiplies a pair of columns of 16 rows of W.
//
// Panels hold such pairs, and a pair of x meets them in all lanes: lanes are rows of W, and pairs are added one after
// the other in whatever tile a row of x is, so its result depends on neither the rows beside it nor the thread. The
// instruction takes denormal numbers for 0.
#pragma once

#include "linear_panels.h"
#include "ops.h"
#include "pair_tiles.h"
#include "panels.h"
#include "vec.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t MOST_ROWS = 14;  // of a tile: with two panels, 28 of 32 registers hold sums

// Panels that a tile of so many rows multiplies at once: the more, the more places memory is read from.
constexpr int panels_beside(int64_t rows) { return rows <= 1 ? 4 : rows <= 6 ? 3 : 2; }
static_assert(panels_beside((MOST_ROWS + 1) / 2) == panels_beside(MOST_ROWS), "all tiles of a block have the same");

// Rows of x against any panels. A thread keeps it while it multiplies.
class PairsBlock {
  static constexpr int64_t MAX_ROWS = 14 * MOST_ROWS, NEAR_PAIRS = 1 << 17;  // of x: half of a second-level cache

 public:
  int64_t index = -1;  // which rows of x these are

  PairsBlock() {}  // leaves its memory as it is

  static int64_t max_rows(int64_t depth) {
    return max(1, min(MAX_ROWS / MOST_ROWS, NEAR_PAIRS / (padded_pairs(depth) * MOST_ROWS))) * MOST_ROWS;
  }
  static int64_t at_once(int64_t rows) { return panels_beside(ceil_div(rows, tiles_of(rows))); }
  static constexpr int64_t MOST_SUMS = MAX_ROWS * 2 * PANEL;  // of max_rows() by at_once() panels

  // Copies x tile after tile: [steps of LANES pairs, rows of the tile, LANES pairs].
  void take(int64_t which, const bf16* from, int64_t from_stride, int64_t count, const Weights& weights) {
    index = which, rows = count, depth = weights.depth, tiles = tiles_of(count);
    for (int64_t t = 0; t <= tiles; t++) begins[t] = rows * t / tiles;
    fetched_per_step = STEP_BYTES / tiles;
    float* to = x;
    for (int64_t t = 0; t < tiles; t++)
      for (int64_t k = 0, end = begins[t + 1]; k < weights.depth; k += TILE_COLUMNS)
        for (int64_t r = begins[t]; r < end; r++, to += LANES)
          store(to, load_pairs_of(from + r * from_stride + k, weights.depth - k));
  }

  // out[i, j] = x row i times row j of the run's panels.
  void multiply(const PanelRun& run, const bf16* bias, bf16* out, int64_t out_stride) const {
    const int64_t several = at_once(rows), stride = run.matrix.stride;
    for (int64_t p = run.begin, count; p < run.end; p += count) {
      count = run.end - p < several ? 1 : several;
      const bf16* w = static_cast<const bf16*>(run.matrix.data) + p * stride;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t width = begins[t + 1] - begins[t];
        bf16* to = out + begins[t] * out_stride;
        for (int64_t r = 0; r < width; r++)  // what is written when the tile is done
          __builtin_prefetch(to + r * out_stride + (p - run.begin) * PANEL, 1);
        alignas(64) float sums[MAX_SUMS];
        multiply_tile(t, w, stride, count, sums);
        for (int64_t q = 0; q < count; q++)
          store_sums(sums + q * PANEL, count * PANEL, width, run, p + q, bias, to, out_stride);
      }
    }
  }

 private:
  static constexpr int64_t MAX_PAIRS = max(NEAR_PAIRS, MOST_ROWS * MAX_DEPTH / PAIR);
  static_assert(MAX_DEPTH % TILE_COLUMNS == 0, "the greatest depth needs no zeros behind it");
  static constexpr int64_t MAX_SUMS = MOST_ROWS * 2 * PANEL;
  static constexpr int STEP_BYTES = PAIR * PANEL * sizeof(bf16);  // of a panel

  int64_t rows, depth, tiles, fetched_per_step;
  int64_t begins[MAX_ROWS / MOST_ROWS + 1];  // of the tiles, and the end: no divisions between tiles
  alignas(64) float x[MAX_PAIRS];  // pairs of bfloat16

  static int64_t padded_pairs(int64_t depth) { return round_up(depth, TILE_COLUMNS) / PAIR; }
  static int64_t tiles_of(int64_t rows) { return ceil_div(rows, MOST_ROWS); }

  // sums[i][q] = row i of tile t times the q-th of `count` panels. Meanwhile its share of the panels after these is
  // fetched: by one tile or two, which wait for memory, into the second-level cache.
  void multiply_tile(int64_t t, const bf16* w, int64_t stride, int64_t count, float* sums) const {
    const Fetch fetch{reinterpret_cast<const char*>(w + count * stride) + depth / PAIR * fetched_per_step * t,
                      fetched_per_step};
    const float* from = x + begins[t] * padded_pairs(depth);
    with_constant<MOST_ROWS>(begins[t + 1] - begins[t], [&](auto width) {
      constexpr int ROWS = decltype(width)::value, SEVERAL = panels_beside(ROWS);
      const auto multiply = tiles > 2 ? count == 1 ? &PairsBlock::multiply_pairs<ROWS, 1, FIRST_LEVEL>
                                                   : &PairsBlock::multiply_pairs<ROWS, SEVERAL, FIRST_LEVEL>
                            : count == 1 ? &PairsBlock::multiply_pairs<ROWS, 1, SECOND_LEVEL>
                                         : &PairsBlock::multiply_pairs<ROWS, SEVERAL, SECOND_LEVEL>;
      (this->*multiply)(from, w, stride, fetch, sums);
    });
  }

  template <int ROWS, int PANELS, CacheLevel INTO>
  void multiply_pairs(const float* from, const bf16* w, int64_t stride, Fetch fetch, float* sums) const {
    Vec acc[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)  // one by one, else GCC keeps them in memory
      for (int p = 0; p < PANELS; p++) acc[r][p] = Vec{};
    for (int64_t pairs = ceil_div(depth, PAIR); pairs > 0; pairs -= LANES, from += ROWS * LANES)
      for (int64_t k = 0; k < min(LANES, pairs); k++, w += PAIR * PANEL) {
        for (int p = 1; p < PANELS; p++) fetch.touch<STEP_BYTES, INTO>(p * stride * sizeof(bf16));
        fetch.advance<STEP_BYTES, INTO>();
        Vec columns[PANELS];
        for (int p = 0; p < PANELS; p++) {
          columns[p] = load_pairs_of(w + p * stride, TILE_COLUMNS);
          KEEP_IN_REGISTER(columns[p]);  // else each use loads it again
        }
        for (int r = 0; r < ROWS; r++) {
          Vec pair = fill(from[r * LANES + k]);
          KEEP_IN_REGISTER(pair);
          for (int p = 0; p < PANELS; p++) acc[r][p] = add_pairs(acc[r][p], columns[p], pair);
        }
      }
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) store(sums + (r * PANELS + p) * PANEL, acc[r][p]);
  }
};

}  // namespace

#endif
