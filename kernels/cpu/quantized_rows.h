// Rows of x as integers, for products with integer weights: each row and group of columns by its largest value.
//
// That makes the sums exact: they depend on neither their order nor the rows beside, the threads or the instruction set.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int STEP_COLUMNS = 8;            // of one piece of W's memory
constexpr int SMALLEST_GROUP = 32;         // columns that share a scale
constexpr int LARGEST_GROUP = 128;         // 32-bit sums of 16-bit x times 8-bit W hold twice that
constexpr int64_t ROW_ELEMENTS = 1 << 17;  // of all rows that are quantised at once
constexpr float SMALLEST_VALUE = 1e-30f;   // a group with nothing larger counts as zeros: its inverse would overflow

constexpr int CHUNK = SMALLEST_GROUP;  // columns that are taken in at once

// Zeros after the last column.
template <class X>
inline void load_chunk(const X* x, int64_t columns, Vec* v) {
  if (columns < CHUNK) {
    X padded[CHUNK] = {};
    __builtin_memcpy(padded, x, columns * sizeof(X));
    return load_chunk(padded, CHUNK, v);
  }
  for (int i = 0; i < CHUNK / LANES; i++) v[i] = load(x + i * LANES);
}

inline void store_narrow(int16_t* to, const VecInt* v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int i = 0; i < CHUNK / LANES; i += 2) {
    const __m256i both = _mm256_packs_epi32((__m256i)v[i], (__m256i)v[i + 1]);  // in quarters 0, 2, 1, 3
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * LANES), _mm256_permute4x64_epi64(both, 0xd8));
  }
#else
  typedef int16_t Narrow __attribute__((vector_size(LANES * 2)));
  for (int i = 0; i < CHUNK / LANES; i++) {
    const Narrow narrow = __builtin_convertvector(v[i], Narrow);
    __builtin_memcpy(to + i * LANES, &narrow, sizeof narrow);
  }
#endif
}

inline void store_narrow(int8_t* to, const VecInt* v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i all = _mm256_packs_epi16(low, high);  // in eighths 0, 2, 4, 6, 1, 3, 5, 7
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(all, order));
#else
  typedef int8_t Narrow __attribute__((vector_size(LANES)));
  for (int i = 0; i < CHUNK / LANES; i++) {
    const Narrow narrow = __builtin_convertvector(v[i], Narrow);
    __builtin_memcpy(to + i * LANES, &narrow, sizeof narrow);
  }
#endif
}

// Value: int16_t or int8_t.
template <class Value>
struct QuantizedRows {
  static constexpr float LARGEST = sizeof(Value) == 2 ? 32767.f : 127.f;

  int64_t index = -1;                    // of the block of x that is packed
  int64_t count, stride, group, groups;  // stride: columns, rounded up to whole steps
  alignas(64) Value values[ROW_ELEMENTS];
  float scales[ROW_ELEMENTS / SMALLEST_GROUP];    // [count, groups]
  float totals[ROW_ELEMENTS / SMALLEST_GROUP];    // of each group, in x's own units
  int32_t starts[ROW_ELEMENTS / SMALLEST_GROUP];  // Format::start of each group: of its sums

  static int64_t max_rows(int64_t depth) { return ROW_ELEMENTS / round_up(depth, SMALLEST_GROUP); }

  QuantizedRows() {}  // leaves its memory as it is

  // Takes in block `which` of x: `rows` <= max_rows(depth) of them.
  template <class Format, class X>
  void pack(int64_t which, const X* x, int64_t x_stride, int64_t rows, int64_t depth, int64_t columns_per_group,
            bool centred) {
    index = which, count = rows, stride = round_up(depth, STEP_COLUMNS);
    group = columns_per_group, groups = ceil_div(depth, group);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t g = 0; g < groups; g++)
        quantize<Format>(x + r * x_stride + g * group, min(group, depth - g * group), values + r * stride + g * group,
                         r * groups + g, centred);
  }

  // Whole chunks are written: what lies past the last group is the next row's, which is written later.
  template <class Format, class X>
  void quantize(const X* x, int64_t columns, Value* to, int64_t at, bool centred) {
    VecInt top = {};  // bits of the largest size: they have its order, infinities and NaN being the largest
    for (int64_t k = 0; k < columns; k += CHUNK) {
      Vec v[CHUNK / LANES];
      load_chunk(x + k, columns - k, v);
      for (const Vec& one : v) top = max(top, (VecInt)one & 0x7fffffff);
    }
    const Vec range = (Vec)over_lanes(top, [](VecInt a, VecInt b) { return max(a, b); });
    const Vec inverse = range > SMALLEST_VALUE ? LARGEST / range : Vec{};
    VecInt total = {};
    for (int64_t k = 0; k < columns; k += CHUNK) {
      Vec v[CHUNK / LANES];
      VecInt nearest[CHUNK / LANES];
      load_chunk(x + k, columns - k, v);
      for (int i = 0; i < CHUNK / LANES; i++) {
        Vec scaled = v[i] * inverse;
        KEEP_IN_REGISTER(scaled);  // rounded by itself, so that every instruction set finds the same integer
        nearest[i] = (VecInt)(scaled + 12582912.f) - 0x4B400000;  // adding 1.5 * 2^23 rounds to an integer
        total += nearest[i];
      }
      store_narrow(to + k, nearest);
    }
    const float scale = range[0] < SMALLEST_VALUE ? 0.f : range[0] / LARGEST;  // NaN for NaN: no result is finite
    scales[at] = scale;
    totals[at] = scale * static_cast<float>(over_lanes(total, [](VecInt a, VecInt b) { return a + b; })[0]);
    starts[at] = centred ? Format::start(total) : 0;
  }
};

}  // namespace
