// Rows of x as 16-bit integers, for products with integer weights: each row and group of columns by its largest value.
//
// That is finer than bfloat16 by far, and it makes the sums exact: they cannot depend on their order, so not on the rows
// beside, the threads or the instruction set.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int STEP_COLUMNS = 8;                // of one piece of W's memory
constexpr int SMALLEST_GROUP = 32;             // columns that share a scale
constexpr int WHOLE_ROW_GROUP = 128;           // of x, where W has one scale a row; 32-bit sums hold twice that
constexpr int64_t ROW_ELEMENTS = 1 << 17;      // of all rows that are quantised at once: a quarter of a megabyte
constexpr float LARGEST_INTEGER = 32767.f;
constexpr float SMALLEST_VALUE = 1e-30f;       // a group with nothing larger counts as zeros: its inverse would overflow

typedef int16_t VecShorts __attribute__((vector_size(LANES * 2)));

struct QuantizedRows {
  int64_t count, stride, groups;  // stride: columns, rounded up to whole steps
  alignas(64) int16_t values[ROW_ELEMENTS + LANES];
  float scales[ROW_ELEMENTS / SMALLEST_GROUP];    // [count, groups]
  float totals[ROW_ELEMENTS / SMALLEST_GROUP];    // of each group, in x's own units
  int32_t starts[ROW_ELEMENTS / SMALLEST_GROUP];  // of sums over a group: its values times what W's integers lack

  static int64_t max_rows(int64_t depth) { return ROW_ELEMENTS / round_up(depth, SMALLEST_GROUP); }

  template <class X>
  QuantizedRows(const X* x, int64_t x_stride, int64_t rows, int64_t depth, int64_t group, int32_t middle)
      : count(rows), stride(round_up(depth, STEP_COLUMNS)), groups(ceil_div(depth, group)) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t g = 0; g < groups; g++)
        quantize(x + r * x_stride + g * group, min(group, depth - g * group), values + r * stride + g * group,
                 r * groups + g, middle);
  }

  // Whole vectors are written: what lies past the last group is the next row's, which is written later.
  template <class X>
  void quantize(const X* x, int64_t columns, int16_t* to, int64_t index, int32_t middle) {
    Vec top = {}, poison = {};  // poison: 0, or NaN when any value is infinite or NaN
    for (int64_t i = 0; i < columns; i += LANES) {
      const Vec v = load_some(x + i, min(LANES, columns - i));
      top = max((Vec)((VecUint)v & 0x7fffffff), top);
      poison += v * 0.f;
    }
    const float range = largest(top) > SMALLEST_VALUE ? largest(top) : 0.f;
    const float inverse = range > 0.f ? LARGEST_INTEGER / range : 0.f;
    VecInt total = {};
    for (int64_t i = 0; i < columns; i += LANES) {
      const Vec scaled = load_some(x + i, min(LANES, columns - i)) * inverse;
      const VecInt nearest = (VecInt)(scaled + 12582912.f) - 0x4B400000;  // adding 1.5 * 2^23 rounds to an integer
      const VecShorts shorts = __builtin_convertvector(nearest, VecShorts);
      __builtin_memcpy(to + i, &shorts, sizeof shorts);
      total += nearest;
    }
    scales[index] = range / LARGEST_INTEGER + sum(poison);
    int32_t sum_of_lanes = 0;
    for (int i = 0; i < LANES; i++) sum_of_lanes += total[i];
    totals[index] = scales[index] * static_cast<float>(sum_of_lanes);
    starts[index] = -middle * sum_of_lanes;
  }
};

}  // namespace
