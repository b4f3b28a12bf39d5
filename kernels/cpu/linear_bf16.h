// Linear layers of bfloat16 with bfloat16 on AVX512-BF16: one instruction multiplies 16 pairs of columns and adds them up.
//
// Lanes run along the depth, a pair of columns in each, so neither W nor x has to be packed. A lane adds up its pairs one
// after the other for every number of rows, and the lanes are added in a tree at the end: a row's result depends on
// neither the rows beside it nor the thread. The instruction takes denormal numbers for 0.
#pragma once

#include "ops.h"
#include "vec.h"

#ifdef __AVX512BF16__

namespace {

// Rows of x against any rows of W, both read where they lie.
class PairsBlock {
 public:
  static constexpr int64_t WEIGHT_ROWS = LANES;  // whose sums are folded at once
  int64_t index = -1;                            // which rows of x are meant

  // Most rows whose elements fill a part of a second-level cache, where they stay while W passes.
  static int64_t max_rows(int64_t depth) { return max(ROW_TILE, min(MAX_ROWS, CACHED_ELEMENTS / depth)); }

  void pack(int64_t which, const bf16* from, int64_t from_stride, int64_t count, int64_t columns) {
    index = which, x = from, stride = from_stride, rows = count, depth = columns;
  }

  // All rows of one weight matrix that fall into output columns [begin, end); its own columns start at `offset`.
  void multiply_matrix(const Matrix& matrix, int64_t offset, int64_t begin, int64_t end, const bf16* bias, bf16* out,
                       int64_t out_stride) const {
    const int64_t last = min(end, offset + matrix.rows);
    for (int64_t n = max(begin, offset); n < last; n += WEIGHT_ROWS) {
      const bf16* data = static_cast<const bf16*>(matrix.data) + (n - offset) * matrix.stride;
      multiply(data, matrix.stride, min(WEIGHT_ROWS, last - n), bias == nullptr ? nullptr : bias + n, out + n,
               out_stride);
    }
  }

 private:
  static constexpr int STEP = 2 * LANES;  // columns
  static constexpr int ROW_TILE = 3;      // most rows of x whose sums share the registers with those of
  static constexpr int GROUP = 8;         // rows of W
  static constexpr int64_t MAX_ROWS = 96, CACHED_ELEMENTS = 1 << 17;
  static_assert(LANES % GROUP == 0, "a block of W is whole groups");

  const bf16* x;
  int64_t stride, rows, depth;

  // out[i, j] = x row i times W row j, for `count` rows of W.
  void multiply(const bf16* w, int64_t w_stride, int64_t count, const bf16* bias, bf16* out, int64_t out_stride) const {
    const bf16* w_rows[LANES];  // the last one again where there are fewer
    for (int64_t i = 0; i < LANES; i++) w_rows[i] = w + min(i, count - 1) * w_stride;
    const Vec shift = bias == nullptr ? Vec{} : load_some(bias, count);
    const int64_t tiles = ceil_div(rows, ROW_TILE);
    int64_t ahead = GROUP * w_stride;  // from a row to the one that the first tile fetches meanwhile
    for (int64_t t = 0; t < tiles; t++, ahead = 0) {
      const int64_t first = rows * t / tiles, width = rows * (t + 1) / tiles - first;
      Vec sums[ROW_TILE][LANES];
      const auto add_up = width == 1   ? &PairsBlock::add_up<1>
                          : width == 2 ? &PairsBlock::add_up<2>
                                       : &PairsBlock::add_up<3>;
      (this->*add_up)(x + first * stride, w_rows, ahead, sums);
      for (int64_t i = 0; i < width; i++)
        store_some(out + (first + i) * out_stride, sums_of(sums[i]) + shift, count);
    }
  }

  // sums[c][r] = lanes of row c of `from` times row r of W.
  template <int ROWS>
  void add_up(const bf16* from, const bf16* const* w, int64_t ahead, Vec (*sums)[LANES]) const {
    for (int g = 0; g < LANES; g += GROUP) {
      Vec acc[GROUP][ROWS] = {};
      int64_t k = 0;
      for (; k + STEP <= depth; k += STEP) {
        for (int r = 0; r < GROUP; r++) __builtin_prefetch(w[g + r] + k + ahead);
        multiply_step(from + k, w + g, k, acc, [](const bf16* p) { return _mm512_loadu_si512(p); });
      }
      const __mmask32 present = (1u << (depth - k)) - 1;
      if (present != 0)
        multiply_step(from + k, w + g, k, acc, [=](const bf16* p) { return _mm512_maskz_loadu_epi16(present, p); });
      for (int r = 0; r < GROUP; r++)
        for (int c = 0; c < ROWS; c++) sums[c][g + r] = acc[r][c];
    }
  }

  // A step's columns: those of W from k on.
  template <int ROWS, class Load>
  void multiply_step(const bf16* from, const bf16* const* w, int64_t k, Vec (&acc)[GROUP][ROWS],
                     const Load& load_step) const {
    __m512i columns[ROWS];
    for (int c = 0; c < ROWS; c++) columns[c] = load_step(from + c * stride);
    for (int r = 0; r < GROUP; r++) {
      __m512i row = load_step(w[r] + k);
      KEEP_IN_REGISTER(row);  // else each use loads it again
      for (int c = 0; c < ROWS; c++)
        acc[r][c] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][c], (__m512bh)row, (__m512bh)columns[c]);
    }
  }
};

}  // namespace

#endif
