// Linear layers over integer weights (kernels/quantized.py has their meaning and order in memory).
//
// Lanes are rows of W: a panel's columns come in cells of 32 bits, a vector holds one cell of LANES rows, and one
// instruction multiplies it by a cell of x and adds up. W streams through once, in the order in which it lies.
#pragma once

#include "ops.h"
#include "panels.h"
#include "quantized_formats.h"
#include "quantized_rows.h"
#include "vec.h"

namespace {

// Of one item. Its x stays in a cache: the first level, or the second beside panels that fill the first.
constexpr int MAX_ROW_TILES = LANES == 16 ? 14 : 4;

// Panels that a tile multiplies at once: of 32 registers, its sums take 12 as integers and 12 as floats.
constexpr int PANELS = LANES == 16 ? 2 : 1;
constexpr CacheLevel INTO = PANELS > 1 ? SECOND_LEVEL : FIRST_LEVEL;  // what the next ones are fetched

// Adjoining panels.
struct Panels {
  const uint8_t* steps;
  const half* scales;          // [panels, groups, PANEL], or null: 1
  const half* narrow_offsets;  // likewise, or null
  const float* wide_offsets;   // likewise, or null
  int64_t bytes, values;       // from the steps, and from the scales, of one panel to those of the next
  int64_t shift;               // a group of W is 2^shift of x

  bool has_offsets() const { return narrow_offsets != nullptr || wide_offsets != nullptr; }
  Vec offset(int64_t i) const { return wide_offsets != nullptr ? load(wide_offsets + i) : load(narrow_offsets + i); }
};

// Of vectors of integers, or of floats.
template <class V, int ROWS>
using Sums = V[ROWS][PANELS][VECTORS];

// Adds the products of a step. x: its cells of the first row; a group's cells lie between rows.
template <class Format, int ROWS>
inline void multiply_step(const int32_t* x, const uint8_t* step, int64_t panel_bytes, Sums<VecInt, ROWS>& acc) {
  for (int j = 0; j < Format::CELLS; j++) {
    VecInt rows[PANELS][VECTORS];
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < VECTORS; v++) {
        rows[p][v] = Format::cell(step + p * panel_bytes, v, j);
        KEEP_IN_REGISTER(rows[p][v]);
      }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      VecInt columns = fill_int(x[r * QuantizedRows<Format>::GROUP_CELLS + j]);
      KEEP_IN_REGISTER(columns);
      for (int p = 0; p < PANELS; p++)
        for (int v = 0; v < VECTORS; v++) {
          acc[r][p][v] = Format::add_products(acc[r][p][v], rows[p][v], columns);
          KEEP_IN_REGISTER(acc[r][p][v]);
        }
    }
  }
}

// How integers of W become its values.
enum class Scaling { BY_ROW, BY_GROUP, WITH_OFFSETS };

// sums[r][p] += what integers of group g of x and of W stand for.
template <class Format, Scaling SCALING, int ROWS>
inline void add_group(const Sums<VecInt, ROWS>& acc, const XGroup& x, const Panels& panels, int64_t g,
                      Sums<Vec, ROWS>& sums) {
#pragma GCC unroll 16
  for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
      const int64_t at = p * panels.values + (g >> panels.shift) * PANEL + v * LANES;
      const Vec scale = SCALING == Scaling::BY_ROW ? fill(1.f) : load(panels.scales + at);
      const Vec offset = SCALING == Scaling::WITH_OFFSETS ? panels.offset(at) : Vec{};
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Vec& sum = sums[r][p][v];
        sum += __builtin_convertvector(Format::end(acc[r][p][v]), Vec) * (scale * x.scales[r]);
        if (SCALING == Scaling::WITH_OFFSETS) sum += x.totals[r] * offset;
      }
    }
}

// out[r][p] = rows of panel p times row r of x's tile that begins with row `first`.
template <class Format, int ROWS>
__attribute__((noinline))  // else all numbers of rows share one function, which has too few registers: half the speed
void multiply_tile(const QuantizedRows<Format>& x, int64_t first, const Panels& panels, Fetch fetch, float* out) {
  constexpr int64_t GROUP_STEPS = GROUP / STEP_COLUMNS;
  const uint8_t* step = panels.steps;
  Sums<Vec, ROWS> sums = {};
  for (int64_t g = 0; g < x.groups; g++) {
    const XGroup group = x.group(first, ROWS, g);
    const int32_t* cells = group.cells;
    Sums<VecInt, ROWS> acc;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++)
        for (int v = 0; v < VECTORS; v++) acc[r][p][v] = fill_int(group.starts[r]);
    for (int64_t s = min(GROUP_STEPS, x.steps - g * GROUP_STEPS); s > 0; s--) {
      for (int p = 1; p < PANELS; p++) fetch.touch<Format::STEP_BYTES, INTO>(p * panels.bytes);
      fetch.advance<Format::STEP_BYTES, INTO>();
      multiply_step<Format>(cells, step, panels.bytes, acc);
      cells += Format::CELLS, step += Format::STEP_BYTES;
    }
    if (panels.has_offsets()) {
      add_group<Format, Scaling::WITH_OFFSETS>(acc, group, panels, g, sums);
    } else if (panels.scales != nullptr) {
      add_group<Format, Scaling::BY_GROUP>(acc, group, panels, g, sums);
    } else {
      add_group<Format, Scaling::BY_ROW>(acc, group, panels, g, sums);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) store(out + (r * PANELS + p) * PANEL + v * LANES, sums[r][p][v]);
}

// A block of rows of x as integers, against any panels. A thread keeps it while it multiplies.
template <class X, class Format>
class QuantizedBlock {
  static constexpr int64_t MAX_ROWS = MAX_ROW_TILES * ROW_TILE;

 public:
  int64_t index = -1;  // which rows of x these are

  QuantizedBlock() {}  // leaves its memory as it is

  static int64_t max_rows(int64_t depth) { return min(QuantizedRows<Format>::max_rows(depth), MAX_ROWS); }
  static int64_t at_once(int64_t) { return PANELS; }
  static constexpr int64_t MOST_SUMS = MAX_ROWS * PANELS * PANEL;  // of max_rows() by at_once() panels

  void take(int64_t which, const X* from, int64_t from_stride, int64_t count, const Weights& of) {
    index = which, weights = &of;
    rows.pack(from, from_stride, count, of.depth, Format::middle(of.matrices[0].offsets != nullptr));
  }

  // out[i, j] = x row i times row j of the run's panels. Those left over go one at a time, as if each were several.
  void multiply(const PanelRun& run, const X* bias, X* out, int64_t out_stride) const {
    for (int64_t p = run.begin, count; p < run.end; p += count) {
      count = run.end - p < PANELS ? 1 : PANELS;
      Panels panels = panels_from(run.matrix, p);
      const char* next = reinterpret_cast<const char*>(panels.steps) + PANELS * panels.bytes;
      if (count < PANELS) panels.bytes = panels.values = 0;
      const int64_t before = (p - run.begin) * PANEL;
      multiply_few(panels, next, {run.matrix, p, p + count, run.column + before},
                   bias == nullptr ? nullptr : bias + before, out + before, out_stride);
    }
  }

 private:
  QuantizedRows<Format> rows;
  const Weights* weights;

  Panels panels_from(const Matrix& matrix, int64_t index) const {
    const int64_t bytes = ceil_div(weights->depth, STEP_COLUMNS) * Format::STEP_BYTES;
    const int64_t group = max(GROUP, weights->group), values = ceil_div(weights->depth, group) * PANEL;
    const auto* scales = static_cast<const half*>(matrix.scales);
    const bool wide = weights->offsets_dtype == FLOAT32;
    const int64_t at = index * values;
    return {
        static_cast<const uint8_t*>(matrix.data) + index * bytes,
        scales == nullptr ? nullptr : scales + at,
        matrix.offsets == nullptr || wide ? nullptr : static_cast<const half*>(matrix.offsets) + at,
        matrix.offsets == nullptr || !wide ? nullptr : static_cast<const float*>(matrix.offsets) + at,
        bytes,
        values,
        __builtin_ctzll(group / GROUP),
    };
  }

  // At most PANELS of them. Each tile fetches a share of those after them, from `next` on.
  void multiply_few(const Panels& panels, const char* next, const PanelRun& run, const X* bias, X* out,
                    int64_t out_stride) const {
    for (int64_t t = 0; t < rows.tiles; t++) {
      const int64_t first = rows.tile_begin(t), width = rows.tile_begin(t + 1) - first;
      X* to = out + first * out_stride;
      for (int64_t r = 0; r < width; r++) fetch_output(to + r * out_stride);
      alignas(64) float sums[ROW_TILE * PANELS * PANEL];
      const Fetch fetch{next + panels.bytes * t / rows.tiles, Format::STEP_BYTES / rows.tiles};
      with_constant<ROW_TILE>(
          width, [&](auto count) { multiply_tile<Format, decltype(count)::value>(rows, first, panels, fetch, sums); });
      for (int64_t p = run.begin; p < run.end; p++) {
        const int64_t before = (p - run.begin) * PANEL;
        store_panel(run, p, sums + before, width, bias == nullptr ? nullptr : bias + before, to + before, out_stride);
      }
    }
  }

  // Else the stores would wait for their lines of memory.
  static void fetch_output(const X* row) {
    __builtin_prefetch(row, 1);
    __builtin_prefetch(row + PANELS * PANEL - 1, 1);
  }

  // One panel's sums to `width` rows of the output.
  static void store_panel(const PanelRun& run, int64_t panel, const float* sums, int64_t width, const X* bias, X* out,
                          int64_t out_stride) {
    for_vectors(run.columns(panel), [&](int64_t i, int64_t n) {
      const Vec scale = load(run.matrix.row_scales + panel * PANEL + i);
      const Vec shift = bias == nullptr ? Vec{} : load_some(bias + i, n);
      for (int64_t r = 0; r < width; r++)
        store_some(out + r * out_stride + i, load(sums + r * PANELS * PANEL + i) * scale + shift, n);
    });
  }
};

}  // namespace
