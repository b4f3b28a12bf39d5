// Linear layers over integer weights (kernels/quantized.py has their meaning and order in memory).
//
// Lanes are rows of W: a panel's columns come in pairs, a vector holds one pair of LANES rows, and one instruction
// multiplies it by a pair of x and adds both. W streams through once, in the order in which it lies.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops.h"
#include "parallel.h"
#include "quantized_rows.h"
#include "vec.h"

namespace {

constexpr int PANEL = 16;                // rows of W that lie interleaved
constexpr int VECTORS = PANEL / LANES;
constexpr int STEP_PAIRS = STEP_COLUMNS / 2;
constexpr int ROW_TILE = 4;              // most rows of x whose sums share the registers
constexpr int MAX_TILES = 16;            // of one item
constexpr int64_t PANEL_CHUNK_BYTES = 1 << 20;  // of W for one item
constexpr int QUANTIZED_ITEMS_PER_THREAD = 6;

typedef int16_t VecPairs __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecNibbles __attribute__((vector_size(LANES * 4)));
typedef int8_t VecBytes __attribute__((vector_size(LANES * 2)));

// Lane i: both products of lane i's pairs, added.
inline VecInt dot_pairs(VecPairs a, VecPairs b) {
#if defined(__AVX512BW__)
  return (VecInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VecInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (VecInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (((VecInt)a << 16) >> 16) * (((VecInt)b << 16) >> 16) + ((VecInt)a >> 16) * ((VecInt)b >> 16);
#endif
}

inline VecInt fill_int(int32_t x) { return x - VecInt{}; }

inline VecInt load_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return fill_int(pair);
}

// MIDDLE: what is subtracted of each integer where there are no offsets.
struct Int8 {
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS;
  static constexpr int32_t MIDDLE = 0;

  static VecPairs pairs(const uint8_t* step, int vector, int pair) {
    VecBytes bytes;
    __builtin_memcpy(&bytes, step + (pair * PANEL + vector * LANES) * 2, sizeof bytes);
    return __builtin_convertvector(bytes, VecPairs);
  }
};

struct Int4 {
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS / 2;
  static constexpr int32_t MIDDLE = 8;

  static VecPairs pairs(const uint8_t* step, int vector, int pair) {
    VecNibbles nibbles;
    __builtin_memcpy(&nibbles, step + vector * sizeof nibbles, sizeof nibbles);
    return (VecPairs)((nibbles >> (4 * pair)) & 15);
  }
};

// Where a panel lies.
struct Panel {
  const uint8_t* steps;
  const half* scales;          // [groups, PANEL], or null: 1
  const half* narrow_offsets;  // likewise, or null
  const float* wide_offsets;   // likewise, or null
  const float* row_scales;

  bool has_offsets() const { return narrow_offsets != nullptr || wide_offsets != nullptr; }
  Vec offset(int64_t i) const { return wide_offsets != nullptr ? load(wide_offsets + i) : load(narrow_offsets + i); }
};

// sums[r][v] = panel times x row first + r.
template <class Format, int ROWS>
inline void multiply_panel(const QuantizedRows& x, int64_t first, int64_t group, const Panel& panel,
                           Vec (*sums)[VECTORS]) {
  const int16_t* values = x.values + first * x.stride;
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
    const int64_t end = min(x.stride, (g + 1) * group);
    for (int64_t k = g * group; k < end; k += STEP_COLUMNS, step += Format::STEP_BYTES)
      for (int j = 0; j < STEP_PAIRS; j++) {
        VecPairs rows[VECTORS];
        for (int v = 0; v < VECTORS; v++) rows[v] = Format::pairs(step, v, j);
        for (int r = 0; r < ROWS; r++) {
          const VecPairs columns = (VecPairs)load_pair(values + r * x.stride + k + 2 * j);
          for (int v = 0; v < VECTORS; v++) {
            acc[r][v] += dot_pairs(rows[v], columns);
            KEEP_IN_REGISTER(acc[r][v]);
          }
        }
      }
    for (int v = 0; v < VECTORS; v++) {
      const int64_t at = g * PANEL + v * LANES;
      const Vec scale = panel.scales != nullptr ? load(panel.scales + at) : fill(1.f);
      for (int r = 0; r < ROWS; r++) {
        const Vec product = __builtin_convertvector(acc[r][v], Vec) * fill(scales[r * x.groups + g]);
        sums[r][v] += product * scale;
      }
      if (!panel.has_offsets()) continue;
      const Vec offset = panel.offset(at);
      for (int r = 0; r < ROWS; r++)
        sums[r][v] += fill(totals[r * x.groups + g]) * offset;
    }
  }
}

template <class Format, int ROWS>
void multiply_rows(const QuantizedRows& x, int64_t first, int64_t group, const Panel& panel, Vec (*sums)[VECTORS]) {
  multiply_panel<Format, ROWS>(x, first, group, panel, sums);
}

template <class Format>
constexpr decltype(&multiply_rows<Format, 1>) MULTIPLY_ROWS[ROW_TILE] = {
    multiply_rows<Format, 1>, multiply_rows<Format, 2>, multiply_rows<Format, 3>, multiply_rows<Format, 4>};

template <class X>
inline void store_panel(const Vec* sums, const float* row_scales, const X* bias, X* out, int64_t columns) {
  for (int64_t v = 0; v * LANES < columns; v++) {
    const int64_t n = min(LANES, columns - v * LANES);
    Vec totals = sums[v] * load(row_scales + v * LANES);
    if (bias != nullptr) totals += load_some(bias + v * LANES, n);
    store_some(out + v * LANES, totals, n);
  }
}

// out[i, j] = x row i times the panel's row j.
template <class X, class Format>
void multiply_by_panel(const QuantizedRows& x, int64_t group, const Panel& panel, const X* bias, X* out,
                       int64_t out_stride, int64_t columns) {
  const int64_t tiles = ceil_div(x.count, ROW_TILE);
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t first = x.count * t / tiles, width = x.count * (t + 1) / tiles - first;
    Vec sums[ROW_TILE][VECTORS];
    MULTIPLY_ROWS<Format>[width - 1](x, first, group, panel, sums);
    for (int64_t r = 0; r < width; r++)
      store_panel(sums[r], panel.row_scales, bias, out + (first + r) * out_stride, columns);
  }
}

inline Panel panel_of(const Weights& weights, const Matrix& matrix, int64_t index, int64_t step_bytes,
                      int64_t groups) {
  const int64_t bytes = ceil_div(weights.depth, STEP_COLUMNS) * step_bytes, at = index * groups * PANEL;
  const auto* scales = static_cast<const half*>(matrix.scales);
  const bool wide = weights.offsets_dtype == FLOAT32;
  return {
      static_cast<const uint8_t*>(matrix.data) + index * bytes,
      scales == nullptr ? nullptr : scales + at,
      matrix.offsets == nullptr || wide ? nullptr : static_cast<const half*>(matrix.offsets) + at,
      matrix.offsets == nullptr || !wide ? nullptr : static_cast<const float*>(matrix.offsets) + at,
      matrix.row_scales + index * PANEL,
  };
}

template <class X, class Format>
void multiply_quantized(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias,
                        void* out, int threads) {
  int64_t columns = 0, panels = 0;
  for (int64_t i = 0; i < weights.count; i++) {
    columns += weights.matrices[i].rows;
    panels += ceil_div(weights.matrices[i].rows, PANEL);
  }
  if (rows == 0 || columns == 0) return;
  const int64_t group = weights.group > 0 ? weights.group : WHOLE_ROW_GROUP;
  const int64_t groups = ceil_div(weights.depth, group);
  const int64_t most_rows = min(QuantizedRows::max_rows(weights.depth), MAX_TILES * ROW_TILE);
  const int64_t blocks = ceil_div(rows, most_rows);
  const int64_t even_share = ceil_div(panels * blocks, threads * QUANTIZED_ITEMS_PER_THREAD);
  const int64_t resident = PANEL_CHUNK_BYTES / max(1, ceil_div(weights.depth, STEP_COLUMNS) * Format::STEP_BYTES);
  const int64_t chunk = max(1, min(even_share, resident));
  parallel_for(ceil_div(panels, chunk) * blocks, threads, [&](int64_t item) {
    const int64_t b = item % blocks, begin = item / blocks * chunk, end = min(panels, begin + chunk);
    const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
    const QuantizedRows packed(static_cast<const X*>(x) + first * x_stride, x_stride, count, weights.depth, group,
                               weights.matrices[0].offsets != nullptr ? 0 : Format::MIDDLE);
    int64_t before = 0, column = 0;  // panels and output columns of the matrices before this one
    for (int64_t i = 0; i < weights.count; i++) {
      const Matrix& matrix = weights.matrices[i];
      const int64_t own = ceil_div(matrix.rows, PANEL);
      for (int64_t p = max(0, begin - before); p < min(own, end - before); p++) {
        const int64_t at = column + p * PANEL;
        multiply_by_panel<X, Format>(packed, group, panel_of(weights, matrix, p, Format::STEP_BYTES, groups),
                                     bias == nullptr ? nullptr : static_cast<const X*>(bias) + at,
                                     static_cast<X*>(out) + first * columns + at, columns,
                                     min(PANEL, matrix.rows - p * PANEL));
      }
      before += own;
      column += matrix.rows;
    }
  });
}

}  // namespace
