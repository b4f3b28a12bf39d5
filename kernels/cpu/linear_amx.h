// Linear layers of bfloat16 with bfloat16 on AMX, the matrix units of newer Xeons: W stays as checkpoints store it.
//
// The units multiply [16 rows, 32 columns] by [16 pairs of columns, 16 rows, 2], so rows of W are the left factor as
// they lie in memory, and x, packed in pairs, the right one. The tile of sums is the output's transpose. Tiles are always
// whole, padded with zeros, and columns are added up in one order: a row of x gets the same bits whatever surrounds it.
#pragma once

#include "amx_tiles.h"
#include "ops.h"
#include "vec.h"

#ifdef HAVE_AMX

namespace {

// Rows of W that one tile covers, which may be fewer than it has.
struct WeightRows {
  const bf16* data;
  int64_t stride, rows;

  // Columns from k on, of which `columns` exist.
  template <int TILE>
  void load(int64_t k, int64_t columns) const {
    if (rows >= TILE_ROWS && columns >= TILE_COLUMNS)
      return load_tile<TILE>(data + k, stride * static_cast<int64_t>(sizeof(bf16)));
    alignas(64) bf16 padded[TILE_ROWS][TILE_COLUMNS] = {};
    for (int64_t r = 0; r < min(rows, TILE_ROWS); r++)
      __builtin_memcpy(padded[r], data + r * stride + k, min(columns, TILE_COLUMNS) * sizeof(bf16));
    load_tile<TILE>(padded, TILE_BYTES);
  }

  WeightRows next() const { return {data + TILE_ROWS * stride, stride, rows - TILE_ROWS}; }
};

// Rows of x, packed, against any rows of W.
class AmxBlock {
 public:
  static constexpr int64_t WEIGHT_ROWS = 2 * TILE_ROWS;              // that are multiplied at once
  static constexpr int64_t MAX_PACKED = int64_t{TILE_ROWS} * 32768;  // elements: a tile's rows of the greatest depth
  int64_t index = -1;                                                // which rows of x are packed

  AmxBlock() {}  // leaves its memory as it is

  // Most rows that fit `packed`; half of them fill a second-level cache.
  static int64_t max_rows(int64_t depth) {
    return max(1, min(MAX_X_TILES, MAX_PACKED / (round_up(depth, TILE_COLUMNS) * TILE_ROWS))) * TILE_ROWS;
  }

  void pack(int64_t which, const bf16* x, int64_t stride, int64_t count, int64_t columns) {
    index = which, rows = count, depth = columns;
    for (int64_t first = 0; first < rows; first += TILE_ROWS)
      for (int64_t k = 0; k < depth; k += TILE_COLUMNS)
        pack_tile(x_tile(first) + k * TILE_ROWS, [&](int i) {
          return first + i < rows ? load_pairs_of(x + (first + i) * stride + k, depth - k) : Vec{};
        });
  }

  // All rows of one weight matrix that fall into output columns [begin, end); its own columns start at `offset`.
  void multiply_matrix(const Matrix& matrix, int64_t offset, int64_t begin, int64_t end, const bf16* bias, bf16* out,
                       int64_t out_stride) const {
    const int64_t last = min(end, offset + matrix.rows);
    for (int64_t n = max(begin, offset); n < last; n += WEIGHT_ROWS) {
      const bf16* data = static_cast<const bf16*>(matrix.data) + (n - offset) * matrix.stride;
      multiply({data, matrix.stride, min(WEIGHT_ROWS, last - n)}, bias == nullptr ? nullptr : bias + n, out + n,
               out_stride);
    }
  }

 private:
  static constexpr int64_t MAX_X_TILES = 8;

  TileRegisters registers;
  int64_t rows, depth;
  alignas(64) bf16 packed[MAX_PACKED];  // tile after tile: [pairs of columns, TILE_ROWS, 2]

  bf16* x_tile(int64_t first) { return packed + first * round_up(depth, TILE_COLUMNS); }
  const bf16* x_tile(int64_t first) const { return packed + first * round_up(depth, TILE_COLUMNS); }

  void multiply(const WeightRows& w, const bf16* bias, bf16* out, int64_t out_stride) const {
    for (int64_t first = 0; first < rows; first += 2 * TILE_ROWS) {
      const bool two_x = rows - first > TILE_ROWS, two_w = w.rows > TILE_ROWS;
      alignas(64) float sums[4][TILE_ROWS * TILE_ROWS];
      if (two_w) {
        two_x ? add_up<true, true>(w, first, sums) : add_up<true, false>(w, first, sums);
      } else {
        two_x ? add_up<false, true>(w, first, sums) : add_up<false, false>(w, first, sums);
      }
      for (int64_t i = 0; i < (two_w ? 2 : 1); i++)
        for (int64_t j = 0; j < (two_x ? 2 : 1); j++) {
          const int64_t column = i * TILE_ROWS, row = first + j * TILE_ROWS;
          finish(sums[2 * i + j], min(TILE_ROWS, rows - row), min(TILE_ROWS, w.rows - column),
                 bias == nullptr ? nullptr : bias + column, out + row * out_stride + column, out_stride);
        }
    }
  }

  // sums[2 * i + j]: the products of tile i of W with tile j of x, in registers 0 to 3 on the way.
  template <bool TWO_W, bool TWO_X>
  void add_up(const WeightRows& w, int64_t first, float (*sums)[TILE_ROWS * TILE_ROWS]) const {
    const bf16 *x = x_tile(first), *next_x = x_tile(first + TILE_ROWS);
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t k = 0; k < depth; k += TILE_COLUMNS) {
      load_tile<6>(x + k * TILE_ROWS, TILE_BYTES);
      if constexpr (TWO_X) load_tile<7>(next_x + k * TILE_ROWS, TILE_BYTES);
      w.load<4>(k, depth - k);
      multiply_tiles<0, 4, 6>();
      if constexpr (TWO_X) multiply_tiles<1, 4, 7>();
      if constexpr (TWO_W) {
        w.next().load<5>(k, depth - k);
        multiply_tiles<2, 5, 6>();
        if constexpr (TWO_X) multiply_tiles<3, 5, 7>();
      }
    }
    store_tile<0>(sums[0], TILE_BYTES);
    if constexpr (TWO_X) store_tile<1>(sums[1], TILE_BYTES);
    if constexpr (TWO_W) store_tile<2>(sums[2], TILE_BYTES);
    if constexpr (TWO_W && TWO_X) store_tile<3>(sums[3], TILE_BYTES);
  }

  // A tile of sums, [rows of W, rows of x], to its place in out.
  static void finish(const float* sums, int64_t x_rows, int64_t columns, const bf16* bias, bf16* out,
                     int64_t out_stride) {
    Vec totals[LANES];
    __builtin_memcpy(totals, sums, sizeof totals);
    transpose(totals);
    const Vec shift = bias == nullptr ? Vec{} : load_some(bias, columns);
    for (int64_t i = 0; i < x_rows; i++) store_some(out + i * out_stride, totals[i] + shift, columns);
  }
};

}  // namespace

#endif
