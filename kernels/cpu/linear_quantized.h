// Linear layers over integer weights (kernels/quantized.py has their meaning and order in memory).
//
// Lanes are rows of W: a panel's columns come in cells of 32 bits, a vector holds one cell of LANES rows, and one
// instruction multiplies it by a cell of x and adds up. W streams through once, in the order in which it lies.
#pragma once

#include "ops.h"
#include "panels.h"
#include "parallel.h"
#include "quantized_formats.h"
#include "quantized_rows.h"
#include "vec.h"

namespace {

constexpr int ROW_TILE = 4;   // most rows of x whose sums share the registers
constexpr int MAX_ROW_TILES = 4;  // of one item: its x stays in a first-level cache

// Where a panel lies.
struct Panel {
  const uint8_t* steps;
  int64_t bytes;               // of its steps
  const half* scales;          // [groups, PANEL], or null: 1
  const half* narrow_offsets;  // likewise, or null
  const float* wide_offsets;   // likewise, or null
  const float* row_scales;

  bool has_offsets() const { return narrow_offsets != nullptr || wide_offsets != nullptr; }
  Vec offset(int64_t i) const { return wide_offsets != nullptr ? load(wide_offsets + i) : load(narrow_offsets + i); }
};

// Adds the products of a step.
template <class Format, int ROWS>
inline void multiply_step(const typename Format::Value* values, int64_t stride, const uint8_t* step,
                          VecInt (*acc)[VECTORS]) {
  for (int j = 0; j < Format::CELLS; j++) {
    VecInt rows[VECTORS];
    for (int v = 0; v < VECTORS; v++) rows[v] = Format::cell(step, v, j);
    for (int r = 0; r < ROWS; r++) {
      const VecInt columns = load_cell(values + r * stride + j * (STEP_COLUMNS / Format::CELLS));
      for (int v = 0; v < VECTORS; v++) {
        acc[r][v] = Format::add_products(acc[r][v], rows[v], columns);
        KEEP_IN_REGISTER(acc[r][v]);
      }
    }
  }
}

// sums[r][v] = panel times x row first + r. Group g of x belongs to group g >> groups_shift of W.
template <class Format, int ROWS>
void multiply_panel(const QuantizedRows<typename Format::Value>& x, int64_t first, int64_t groups_shift,
                    const Panel& panel, Fetch fetch, Vec (*sums)[VECTORS]) {
  const auto* values = x.values + first * x.stride;
  const float* scales = x.scales + first * x.groups;
  const float* totals = x.totals + first * x.groups;
  const int32_t* starts = x.starts + first * x.groups;
  const uint8_t* step = panel.steps;
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = Vec{};
  for (int64_t g = 0; g < x.groups; g++) {
    VecInt acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) acc[r][v] = fill_int(starts[r * x.groups + g]);
    const int64_t end = min(x.stride, (g + 1) * x.group);
    for (int64_t k = g * x.group; k < end; k += STEP_COLUMNS, step += Format::STEP_BYTES) {
      multiply_step<Format, ROWS>(values + k, x.stride, step, acc);
      fetch.advance<Format::STEP_BYTES>();
    }
    const int64_t at = (g >> groups_shift) * PANEL;
    Vec scale[VECTORS], offset[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      scale[v] = panel.scales != nullptr ? load(panel.scales + at + v * LANES) : fill(1.f);
      offset[v] = panel.has_offsets() ? panel.offset(at + v * LANES) : Vec{};
    }
    for (int r = 0; r < ROWS; r++) {
      const Vec x_scale = fill(scales[r * x.groups + g]), x_total = fill(totals[r * x.groups + g]);
      for (int v = 0; v < VECTORS; v++) {
        const Vec products = __builtin_convertvector(Format::sums(acc[r][v]), Vec) * x_scale;
        sums[r][v] += products * scale[v];
        sums[r][v] += x_total * offset[v];
      }
    }
  }
}

template <class Format>
constexpr decltype(&multiply_panel<Format, 1>) MULTIPLY_ROWS[ROW_TILE] = {
    multiply_panel<Format, 1>, multiply_panel<Format, 2>, multiply_panel<Format, 3>, multiply_panel<Format, 4>};

template <class X>
inline void store_panel(const Vec* sums, const float* row_scales, const X* bias, X* out, int64_t columns) {
  for (int64_t v = 0; v * LANES < columns; v++) {
    const int64_t n = min(LANES, columns - v * LANES);
    Vec totals = sums[v] * load(row_scales + v * LANES);
    if (bias != nullptr) totals += load_some(bias + v * LANES, n);
    store_some(out + v * LANES, totals, n);
  }
}

inline Panel panel_of(const Weights& weights, const Matrix& matrix, int64_t index, int64_t step_bytes,
                      int64_t groups) {
  const int64_t bytes = ceil_div(weights.depth, STEP_COLUMNS) * step_bytes, at = index * groups * PANEL;
  const auto* scales = static_cast<const half*>(matrix.scales);
  const bool wide = weights.offsets_dtype == FLOAT32;
  return {
      static_cast<const uint8_t*>(matrix.data) + index * bytes,
      bytes,
      scales == nullptr ? nullptr : scales + at,
      matrix.offsets == nullptr || wide ? nullptr : static_cast<const half*>(matrix.offsets) + at,
      matrix.offsets == nullptr || !wide ? nullptr : static_cast<const float*>(matrix.offsets) + at,
      matrix.row_scales + index * PANEL,
  };
}

// Groups of columns that share a scale.
struct Groups {
  int64_t of_w, x_columns, shift = 0;  // of W; columns of a group of x; W has 2^-shift as many

  Groups(const Weights& weights, int64_t largest_x_group) {
    const int64_t group = weights.group > 0 ? weights.group : LARGEST_GROUP;
    of_w = ceil_div(weights.depth, group);
    x_columns = min(group, largest_x_group);
    while (x_columns << shift < group) shift++;
  }
};

// One call: X are the elements of x, of the bias and of the output.
template <class X, class Format>
struct QuantizedLinear {
  using Rows = QuantizedRows<typename Format::Value>;

  const X* x;
  int64_t x_stride;
  const X* bias;
  X* out;
  PanelPlan plan;
  Groups groups;

  static int64_t most_rows(int64_t depth) { return min(Rows::max_rows(depth), MAX_ROW_TILES * ROW_TILE); }

  // `packed` stays with the thread: a block of x is packed once for all of its chunks.
  void compute(Rows& packed, int64_t item) const {
    const Weights& weights = plan.weights;
    const int64_t block = plan.block_of(item), first = plan.first_row(block);
    if (packed.index != block)
      packed.template pack<Format>(block, x + first * x_stride, x_stride, plan.first_row(block + 1) - first,
                                   weights.depth, groups.x_columns, weights.matrices[0].offsets == nullptr);
    plan.for_runs(item, [&](const PanelRun& run) {
      for (int64_t p = run.begin; p < run.end; p++) {
        const int64_t at = run.column + (p - run.begin) * PANEL;
        multiply_by_panel(packed, panel_of(weights, run.matrix, p, Format::STEP_BYTES, groups.of_w),
                          bias == nullptr ? nullptr : bias + at, out + first * plan.columns + at, run.columns(p));
      }
    });
  }

  // to[i, j] = packed row i times the panel's row j.
  void multiply_by_panel(const Rows& packed, const Panel& panel, const X* panel_bias, X* to, int64_t columns) const {
    constexpr int64_t NEAR = 2048;  // bytes ahead when a single tile passes
    const int64_t tiles = ceil_div(packed.count, ROW_TILE), share = panel.bytes / tiles;
    const char* next = reinterpret_cast<const char*>(panel.steps) + (tiles > 1 ? panel.bytes : NEAR);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t first = packed.count * t / tiles, width = packed.count * (t + 1) / tiles - first;
      Vec sums[ROW_TILE][VECTORS];
      MULTIPLY_ROWS<Format>[width - 1](packed, first, groups.shift, panel,
                                       Fetch{next + share * t, Format::STEP_BYTES / tiles}, sums);
      for (int64_t r = 0; r < width; r++)
        store_panel(sums[r], panel.row_scales, panel_bias, to + (first + r) * plan.columns, columns);
    }
  }
};

template <class X, class Format>
void multiply_quantized(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias,
                        void* out, int threads) {
  using Call = QuantizedLinear<X, Format>;
  if (rows == 0) return;
  const Call call{static_cast<const X*>(x),
                  x_stride,
                  static_cast<const X*>(bias),
                  static_cast<X*>(out),
                  PanelPlan(weights, rows, Call::most_rows(weights.depth), 1, threads),
                  Groups(weights, Format::X_GROUP)};
  parallel_for_with<typename Call::Rows>(call.plan.items(), threads,
                                         [&](auto& packed, int64_t item) { call.compute(packed, item); });
}

}  // namespace
