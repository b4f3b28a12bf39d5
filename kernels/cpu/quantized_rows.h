// Rows of x as integers, for products with integer weights: each row and group of columns by its largest value.
//
// That makes the sums exact: they depend on neither their order nor the rows beside, the threads or the instruction
// set.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int STEP_COLUMNS = 8;            // of one piece of W's memory
constexpr int GROUP = 32;                  // columns of x that share a scale
constexpr float LARGEST = 127.f;           // what the largest value of a group becomes
constexpr float SMALLEST_VALUE = 1e-30f;   // a group with nothing larger counts as zeros: its inverse would overflow
constexpr int64_t ROW_ELEMENTS = 1 << 17;  // of all rows that are quantised at once
constexpr int ROW_TILE = LANES == 16 ? 6 : 4;  // most rows whose sums share the registers

// One group's vectors.
using GroupFloats = Vec[GROUP / LANES];
using GroupInts = VecInt[GROUP / LANES];

// Zeros after the last column.
template <class X>
inline void load_group(const X* x, int64_t columns, GroupFloats& v) {
  if (columns < GROUP) {
    X padded[GROUP] = {};
    __builtin_memcpy(padded, x, columns * sizeof(X));
    return load_group(padded, GROUP, v);
  }
  for (int i = 0; i < GROUP / LANES; i++) v[i] = load(x + i * LANES);
}

inline void store_narrow(int16_t* to, const GroupInts& v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int i = 0; i < GROUP / LANES; i += 2) {
    const __m256i both = _mm256_packs_epi32((__m256i)v[i], (__m256i)v[i + 1]);  // in quarters 0, 2, 1, 3
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * LANES), _mm256_permute4x64_epi64(both, 0xd8));
  }
#else
  typedef int16_t Narrow __attribute__((vector_size(LANES * 2)));
  for (int i = 0; i < GROUP / LANES; i++) {
    const Narrow narrow = __builtin_convertvector(v[i], Narrow);
    __builtin_memcpy(to + i * LANES, &narrow, sizeof narrow);
  }
#endif
}

inline void store_narrow(int8_t* to, const GroupInts& v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i all = _mm256_packs_epi16(low, high);  // in eighths 0, 2, 4, 6, 1, 3, 5, 7
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(all, order));
#else
  typedef int8_t Narrow __attribute__((vector_size(LANES)));
  for (int i = 0; i < GROUP / LANES; i++) {
    const Narrow narrow = __builtin_convertvector(v[i], Narrow);
    __builtin_memcpy(to + i * LANES, &narrow, sizeof narrow);
  }
#endif
}

// Lane i: v[i]'s lanes combined.
template <int WIDTH = 1, class Combine>
inline VecInt combined_lanes(const VecInt* v, const Combine& combine) {
  if constexpr (WIDTH == LANES) {
    return *v;
  } else {
    const Vec a = (Vec)combined_lanes<2 * WIDTH>(v, combine), b = (Vec)combined_lanes<2 * WIDTH>(v + WIDTH, combine);
    return combine((VecInt)pick(a, b, lower_lane<WIDTH>), (VecInt)pick(a, b, upper_lane<WIDTH>));
  }
}

// What the integers of a group of columns stand for, of each row of a tile.
struct XGroup {
  const int32_t* cells;  // [rows, GROUP_CELLS]
  const float* scales;
  const float* totals;    // sums of the columns, in x's own units
  const int32_t* starts;  // what sums of products begin with
};

// A block of rows of x, in tiles. A cell is 32 bits: the columns of a row that one lane of a product takes.
template <class Format>
struct QuantizedRows {
  using Value = typename Format::Value;
  static constexpr int CELL_COLUMNS = sizeof(int32_t) / sizeof(Value), GROUP_CELLS = GROUP / CELL_COLUMNS;

  int64_t count, tiles, groups, steps;  // rows, and tiles of them; groups and steps of a row
  alignas(64) int32_t cells[ROW_ELEMENTS / CELL_COLUMNS];  // of each tile [groups, its rows, GROUP_CELLS]
  float scales[ROW_ELEMENTS / GROUP + LANES];              // of each tile [groups, its rows]
  float totals[ROW_ELEMENTS / GROUP + LANES];              // likewise
  int32_t starts[ROW_ELEMENTS / GROUP + LANES];            // likewise

  static int64_t max_rows(int64_t depth) { return ROW_ELEMENTS / round_up(depth, GROUP); }

  QuantizedRows() {}  // leaves its memory as it is

  int64_t tile_begin(int64_t t) const { return count * t / tiles; }

  XGroup group(int64_t first_of_tile, int64_t width, int64_t g) const {
    const int64_t at = first_of_tile * groups + g * width;
    return {cells + at * GROUP_CELLS, scales + at, totals + at, starts + at};
  }

  // Takes in `rows` <= max_rows(depth) rows of x. middle: what is subtracted of each integer of W.
  template <class X>
  void pack(const X* x, int64_t x_stride, int64_t rows, int64_t depth, int32_t middle) {
    count = rows, tiles = ceil_div(rows, ROW_TILE);
    groups = ceil_div(depth, GROUP), steps = ceil_div(depth, STEP_COLUMNS);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t begin = tile_begin(t);
      pack_tile(x + begin * x_stride, x_stride, begin, tile_begin(t + 1) - begin, depth, middle);
    }
  }

 private:
  // One row's columns of a group.
  template <class X>
  struct Piece {
    const X* x;
    int64_t columns;
  };

  // LANES pieces at a time: what is done once a group then takes a lane, not a vector.
  template <class X>
  void pack_tile(const X* x, int64_t x_stride, int64_t begin, int64_t width, int64_t depth, int32_t middle) {
    int64_t g = 0, r = 0;
    for (int64_t i = 0; i < groups * width; i += LANES) {
      Piece<X> pieces[LANES];
      const int64_t n = min(LANES, groups * width - i);
      for (int64_t j = 0; j < n; j++) {
        pieces[j] = {x + r * x_stride + g * GROUP, depth - g * GROUP};
        if (++r == width) r = 0, g++;
      }
      quantize(pieces, n, begin * groups + i, middle);
    }
  }

  // Whole vectors are written: what lies past a tile's last one is the next tile's, which is written later.
  template <class X>
  void quantize(const Piece<X>* pieces, int64_t n, int64_t at, int32_t middle) {
    const Vec ranges = ranges_of(pieces, n);
    alignas(64) float inverses[LANES];
    store(inverses, ranges > SMALLEST_VALUE ? LARGEST / ranges : Vec{});
    VecInt sums[LANES];
    for (int64_t j = n; j < LANES; j++) sums[j] = VecInt{};
    for (int64_t j = 0; j < n; j++) {
      GroupFloats v;
      GroupInts nearest;
      VecInt sum = {};
      load_group(pieces[j].x, pieces[j].columns, v);
      for (int i = 0; i < GROUP / LANES; i++) {
        Vec scaled = v[i] * inverses[j];
        KEEP_IN_REGISTER(scaled);  // rounded by itself, so that every instruction set finds the same integer
        nearest[i] = (VecInt)(scaled + 12582912.f) - 0x4B400000;  // adding 1.5 * 2^23 rounds to an integer
        sum += nearest[i];
        nearest[i] = Format::in_order(nearest[i]);
      }
      sums[j] = sum;
      store_narrow(reinterpret_cast<Value*>(cells + (at + j) * GROUP_CELLS), nearest);
    }
    const VecInt total = combined_lanes(sums, [](VecInt a, VecInt b) { return a + b; });
    const Vec scale = ranges < SMALLEST_VALUE ? Vec{} : ranges / LARGEST;  // NaN for NaN: no result is finite
    const VecInt start = Format::starts(sums, total, middle);
    store(scales + at, scale);
    store(totals + at, scale * __builtin_convertvector(total, Vec));
    __builtin_memcpy(starts + at, &start, sizeof start);
  }

  // The largest size in each piece. Sizes have the order of their bits, infinities and NaN being the largest.
  template <class X>
  static Vec ranges_of(const Piece<X>* pieces, int64_t n) {
    VecInt tops[LANES];
    for (int64_t j = n; j < LANES; j++) tops[j] = VecInt{};
    for (int64_t j = 0; j < n; j++) {
      GroupFloats v;
      load_group(pieces[j].x, pieces[j].columns, v);
      tops[j] = VecInt{};
      for (const Vec& one : v) tops[j] = max(tops[j], (VecInt)one & 0x7fffffff);
    }
    return (Vec)combined_lanes(tops, [](VecInt a, VecInt b) { return max(a, b); });
  }
};

}  // namespace
