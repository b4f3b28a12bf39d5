// Linear layers over bfloat16 or float32 weights in panels (kernels/panels.py has their order in memory).
//
// Lanes are rows of W, and columns are added one after the other, in whatever tile a row of x is: its result depends on
// neither the rows beside it nor the thread, and W, which streams through once, needs no sums across lanes.
#pragma once

#include "gates.h"
#include "ops.h"
#include "panels.h"
#include "parallel.h"
#include "vec.h"

namespace {

// Most rows of x whose sums over a panel share the registers.
constexpr int TILE = LANES == 4 ? 3 : LANES == 8 ? 5 : 8;
constexpr int MAX_TILES = 12;             // of a block of x
constexpr int64_t MAX_DEPTH = 32768;      // library.py sends larger ones to the reference
constexpr int64_t NEAR_FLOATS = 1 << 16;  // of a block of x: half of a small second-level cache
constexpr int64_t MAX_DEPTH_BLOCK = 576;  // columns of one pass: a panel and a tile's x fit a first-level cache
constexpr int PAIR = 2;                   // columns of a step
constexpr int MAX_AT_ONCE = 4;

// Column i of a pair. Of bfloat16, 32 bits hold both columns of a row.
inline void load_column(const bf16* pair, int i, Vec (&column)[VECTORS]) {
  for (int v = 0; v < VECTORS; v++) {
    VecUint both;
    __builtin_memcpy(&both, pair + v * PAIR * LANES, sizeof both);
    column[v] = (Vec)(i == 0 ? both << 16 : both & 0xffff0000);
  }
}
inline void load_column(const float* pair, int i, Vec (&column)[VECTORS]) {
  for (int v = 0; v < VECTORS; v++) column[v] = load(pair + i * PANEL + v * LANES);
}

// What one product of a tile needs.
template <class W>
struct Factors {
  const float* x;
  int64_t x_stride;
  const W* w;
  int64_t panel_stride;
};

// sums[r][p][i] += x row r times row i of panel p, over `steps` of STEP columns each.
template <int STEP, int ROWS, int PANELS, CacheLevel INTO, class W>
inline void multiply_columns(Factors<W> factors, int64_t steps, Fetch& fetch, float* sums) {
  Vec acc[ROWS][PANELS][VECTORS];
  const float* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = factors.x + r * factors.x_stride;
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < VECTORS; v++) acc[r][p][v] = load(sums + (r * PANELS + p) * PANEL + v * LANES);
  }
  constexpr int STEP_BYTES = STEP * PANEL * sizeof(W);
  const W* w = factors.w;
  for (int64_t k = 0; k < steps * STEP; k += STEP, w += STEP * PANEL) {
    for (int p = 1; p < PANELS; p++) fetch.touch<STEP_BYTES, INTO>(p * factors.panel_stride * sizeof(W));
    fetch.advance<STEP_BYTES, INTO>();
    for (int i = 0; i < STEP; i++)
      for (int p = 0; p < PANELS; p++) {
        Vec column[VECTORS];
        load_column(w + p * factors.panel_stride, i, column);
        for (int v = 0; v < VECTORS; v++) KEEP_IN_REGISTER(column[v]);  // else each use loads it again
        for (int r = 0; r < ROWS; r++) {
          Vec element = fill(rows[r][k + i]);
          KEEP_IN_REGISTER(element);
          for (int v = 0; v < VECTORS; v++) acc[r][p][v] += column[v] * element;
        }
      }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < VECTORS; v++) store(sums + (r * PANELS + p) * PANEL + v * LANES, acc[r][p][v]);
}

template <int ROWS, int PANELS, CacheLevel INTO, class W>
void multiply_tile(Factors<W> factors, int64_t columns, bool add, Fetch fetch, float* sums) {
  if (!add) __builtin_memset(sums, 0, ROWS * PANELS * PANEL * sizeof(float));
  const int64_t pairs = columns / PAIR;
  multiply_columns<PAIR, ROWS, PANELS, INTO>(factors, pairs, fetch, sums);
  if (columns % PAIR == 0) return;
  factors.x += pairs * PAIR, factors.w += pairs * PAIR * PANEL;
  multiply_columns<1, ROWS, PANELS, INTO>(factors, 1, fetch, sums);
}

// Panels that a tile multiplies at once: what hides the latency of a multiply-add and, beside a single row, what memory
// is read fastest in (three places at once rather than one: 20 GB/s instead of 16 on a Zen 3 core).
constexpr int panels_at_once(int64_t rows) {
  if (LANES == 4) return 1;
  if (LANES == 16) return rows == 1 ? 4 : 2;
  return rows == 1 ? 3 : rows == 2 ? 2 : 1;
}

// out[i] = sums + bias, for the panel's columns of each row; `bias` and `out` begin with those of the run.
template <class X>
inline void store_sums(const float* sums, int64_t stride, int64_t rows, const PanelRun& run, int64_t panel,
                       const X* bias, X* out, int64_t out_stride) {
  const int64_t before = (panel - run.begin) * PANEL, columns = run.columns(panel);
  for (int64_t j = 0; j < columns; j += LANES) {
    const int64_t n = min(LANES, columns - j);
    const Vec shift = bias == nullptr ? Vec{} : load_some(bias + before + j, n);
    for (int64_t r = 0; r < rows; r++) {
      const Vec totals = load(sums + r * stride + j);
      store_some(out + r * out_stride + before + j, bias == nullptr ? totals : totals + shift, n);
    }
  }
}

// A block of rows of x as float32, against any panels. A thread keeps it while it multiplies.
template <class X, class W>
class PanelBlock {
 public:
  int64_t index = -1;  // which rows of x these are

  PanelBlock() {}  // leaves its memory as it is

  static int64_t max_rows(int64_t depth) { return max(1, min(MAX_TILES, NEAR_FLOATS / (depth * TILE))) * TILE; }
  static int64_t at_once(int64_t rows) { return rows <= TILE ? panels_at_once(rows) : 1; }
  static constexpr int64_t MOST_SUMS = max(MAX_TILES, MAX_AT_ONCE) * TILE * PANEL;  // of max_rows() by at_once() panels

  void take(int64_t which, const X* from, int64_t from_stride, int64_t count, const Weights& weights) {
    const int64_t columns = weights.depth;
    index = which, rows = count, depth = columns, tiles = ceil_div(count, TILE);
    if constexpr (sizeof(X) == sizeof(float)) {
      x = from, stride = from_stride;
    } else {
      x = widened, stride = columns;
      for (int64_t r = 0; r < count; r++)
        for_vectors(columns, [&](int64_t i, int64_t n) {
          store_some(widened + r * stride + i, load_some(from + r * from_stride + i, n), n);
        });
    }
  }

  // out[i, j] = x row i times row j of the run's panels.
  void multiply(const PanelRun& run, const X* bias, X* out, int64_t out_stride) {
    const int64_t several = panels_at_once(ceil_div(rows, tiles)), panel_stride = run.matrix.stride;
    for (int64_t p = run.begin, count; p < run.end; p += count) {
      count = run.end - p < several ? 1 : several;
      add_up(static_cast<const W*>(run.matrix.data) + p * panel_stride, panel_stride, count);
      for (int64_t q = 0; q < count; q++)
        store_sums(sums + q * PANEL, count * PANEL, rows, run, p + q, bias, out, out_stride);
    }
  }

 private:
  int64_t rows, depth, tiles, stride;
  const float* x;
  alignas(64) float widened[TILE * MAX_DEPTH];
  alignas(64) float sums[MAX_TILES * TILE * MAX_AT_ONCE * PANEL];

  int64_t tile_begin(int64_t t) const { return rows * t / tiles; }

  // sums[i][p][j] = x row i times row j of the p-th of `count` panels. Meanwhile each tile fetches its share of the
  // panels after these: a tile alone, which waits for memory, into the second-level cache.
  void add_up(const W* w, int64_t panel_stride, int64_t count) {
    constexpr int64_t COLUMN_BYTES = PANEL * sizeof(W);
    const char* next = reinterpret_cast<const char*>(w + count * panel_stride);
    for (int64_t k = 0; k < depth; k += MAX_DEPTH_BLOCK) {
      const int64_t columns = min(MAX_DEPTH_BLOCK, depth - k);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = tile_begin(t);
        const Fetch fetch{next + (k + columns * t / tiles) * COLUMN_BYTES, PAIR * COLUMN_BYTES / tiles};
        const Factors<W> factors{x + first * stride + k, stride, w + k * PANEL, panel_stride};
        with_constant<TILE>(tile_begin(t + 1) - first, [&](auto width) {
          constexpr int ROWS = decltype(width)::value, SEVERAL = panels_at_once(ROWS);
          const auto multiply = tiles > 1 ? count == 1 ? multiply_tile<ROWS, 1, FIRST_LEVEL, W>
                                                       : multiply_tile<ROWS, SEVERAL, FIRST_LEVEL, W>
                                : count == 1 ? multiply_tile<ROWS, 1, SECOND_LEVEL, W>
                                             : multiply_tile<ROWS, SEVERAL, SECOND_LEVEL, W>;
          multiply(factors, columns, k > 0, fetch, sums + first * count * PANEL);
        });
      }
    }
  }
};

// Block: rows of x that meet any panels, as PanelBlock.
template <class X, class Block>
void multiply_panels(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias, void* out,
                     int threads) {
  if (rows == 0) return;
  const PanelPlan plan(weights, rows, Block::max_rows(weights.depth), Block::at_once(rows), threads);
  parallel_for_with<Block>(plan.items(), threads, [&](auto& block, int64_t item) {
    const int64_t b = plan.block_of(item), first = plan.first_row(b);
    if (block.index != b)
      block.take(b, static_cast<const X*>(x) + first * x_stride, x_stride, plan.first_row(b + 1) - first, weights);
    plan.for_runs(item, [&](const PanelRun& run) {
      block.multiply(run, bias == nullptr ? nullptr : static_cast<const X*>(bias) + run.column,
                     static_cast<X*>(out) + first * plan.columns + run.column, plan.columns);
    });
  });
}

// Whether the weights are a gate's and, behind them, as many rows of up, so that both have the same columns in panels.
inline bool is_gate_and_up(const Weights& weights) {
  const Matrix* matrices = weights.matrices;
  if (weights.count == 1) return matrices[0].rows % (2 * PANEL) == 0;
  return weights.count == 2 && matrices[0].rows == matrices[1].rows;
}

// Multiplies a few columns of both and gates them while they are near, so that what is wider than x and out is nowhere.
template <class X, class Block>
class GatedBlock {
 public:
  Block block;

  // Panels [begin, end) of the gate, at most Block::at_once() of them, and of up.
  void multiply(const PanelPlan& plan, int64_t begin, int64_t end, const X* bias, Gate<X> gate, int64_t rows,
                X* out) {
    const int64_t stride = (end - begin) * PANEL, columns = min(stride, plan.columns - begin * PANEL);
    for (int part = 0; part < 2; part++) {
      const Matrix& matrix = plan.weights.matrices[part % plan.weights.count];
      const int64_t before = plan.weights.count == 1 ? part * plan.panels : 0;
      const PanelRun run{matrix, before + begin, before + end, part * plan.columns + begin * PANEL};
      block.multiply(run, bias == nullptr ? nullptr : bias + run.column, parts[part], stride);
    }
    gate({parts[0], stride}, {parts[1], stride}, {out + begin * PANEL, plan.columns}, rows, columns);
  }

 private:
  alignas(64) X parts[2][Block::MOST_SUMS];
};

// out = activation(x Wgate^T + bias) * (x Wup^T + bias).
template <class X, class Block>
void multiply_gated(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias,
                    Activation activation, void* out, int threads) {
  if (rows == 0) return;
  const int64_t at_once = Block::at_once(rows);
  const PanelPlan plan(weights, rows, Block::max_rows(weights.depth), at_once, threads, 2);
  parallel_for_with<GatedBlock<X, Block>>(plan.items(), threads, [&](auto& gated, int64_t item) {
    const int64_t b = plan.block_of(item), first = plan.first_row(b), count = plan.first_row(b + 1) - first;
    if (gated.block.index != b)
      gated.block.take(b, static_cast<const X*>(x) + first * x_stride, x_stride, count, weights);
    for (int64_t p = plan.first_panel(item); p < plan.end_panel(item); p += at_once)
      gated.multiply(plan, p, min(p + at_once, plan.end_panel(item)), static_cast<const X*>(bias),
                     gate_of<X>(activation), count, static_cast<X*>(out) + first * plan.columns);
  });
}

}  // namespace
