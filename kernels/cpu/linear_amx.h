// Linear layers of bfloat16 with bfloat16 on AMX, the matrix units of newer Xeons.
//
// The units multiply [16 rows, 32 columns] by [16 pairs of columns, 16 rows, 2]: rows of x by a piece of a panel, as
// both lie in memory. Tiles are always whole, padded with zeros, and columns are added up in one order: a row of x gets
// the same bits whatever surrounds it.
#pragma once

#include "amx_tiles.h"
#include "linear_panels.h"
#include "ops.h"
#include "panels.h"
#include "vec.h"

#ifdef HAVE_AMX

namespace {

static_assert(PANEL == TILE_ROWS && PAIR * LANES == TILE_COLUMNS, "a tile is a piece of a panel");

// Rows of x against any panels. A thread keeps it while it multiplies.
class AmxBlock {
  static constexpr int64_t MAX_X_TILES = 8;

 public:
  int64_t index = -1;  // which rows of x these are

  AmxBlock() {}  // leaves its memory as it is

  // Most rows that fit `packed`; half of them fill a second-level cache.
  static int64_t max_rows(int64_t depth) {
    return max(1, min(MAX_X_TILES, MAX_PACKED / (round_up(depth, TILE_COLUMNS) * TILE_ROWS))) * TILE_ROWS;
  }
  static int64_t at_once(int64_t) { return 2; }
  static constexpr int64_t MOST_SUMS = MAX_X_TILES * TILE_ROWS * 2 * PANEL;  // of max_rows() by at_once() panels

  // Copies x tile after tile, with zeros for rows and columns that only fill the last ones.
  void take(int64_t which, const bf16* x, int64_t stride, int64_t count, const Weights& weights) {
    index = which, rows = count, depth = weights.depth;
    bf16* to = packed;
    for (int64_t first = 0; first < rows; first += TILE_ROWS)
      for (int64_t k = 0; k < depth; k += TILE_COLUMNS)
        for (int64_t i = first; i < first + TILE_ROWS; i++, to += TILE_COLUMNS) {
          const Vec pairs = i < rows ? load_pairs_of(x + i * stride + k, depth - k) : Vec{};
          __builtin_memcpy(to, &pairs, sizeof pairs);
        }
  }

  // out[i, j] = x row i times row j of the run's panels.
  void multiply(const PanelRun& run, const bf16* bias, bf16* out, int64_t out_stride) const {
    const int64_t stride = run.matrix.stride;
    for (int64_t p = run.begin; p < run.end; p += 2) {
      const bf16* w = static_cast<const bf16*>(run.matrix.data) + p * stride;
      const bool two_w = run.end - p > 1;
      for (int64_t first = 0; first < rows; first += 2 * TILE_ROWS) {
        const bool two_x = rows - first > TILE_ROWS;
        alignas(64) float sums[4][TILE_ROWS * TILE_ROWS];
        const auto add_up_tiles = two_w ? two_x ? &AmxBlock::add_up<true, true> : &AmxBlock::add_up<false, true>
                                  : two_x ? &AmxBlock::add_up<true, false>
                                          : &AmxBlock::add_up<false, false>;
        (this->*add_up_tiles)(x_tile(first), w, stride, sums);
        for (int64_t i = 0; i < (two_x ? 2 : 1); i++)
          for (int64_t j = 0; j < (two_w ? 2 : 1); j++) {
            const int64_t row = first + i * TILE_ROWS;
            store_sums(sums[2 * i + j], TILE_ROWS, min(TILE_ROWS, rows - row), run, p + j, bias, out + row * out_stride,
                       out_stride);
          }
      }
    }
  }

 private:
  static constexpr int64_t MAX_PACKED = TILE_ROWS * MAX_DEPTH;  // elements: a tile's rows of the greatest depth

  TileRegisters registers;
  int64_t rows, depth;
  alignas(64) bf16 packed[MAX_PACKED];  // tile after tile: [steps of TILE_COLUMNS, TILE_ROWS, TILE_COLUMNS]

  const bf16* x_tile(int64_t first) const { return packed + first * round_up(depth, TILE_COLUMNS); }

  // sums[2 * i + j]: the products of tile i of x with panel j, in registers 0 to 3 on the way.
  template <bool TWO_X, bool TWO_W>
  void add_up(const bf16* x, const bf16* w, int64_t stride, float (*sums)[TILE_ROWS * TILE_ROWS]) const {
    const bf16* next_x = x + TILE_ROWS * round_up(depth, TILE_COLUMNS);
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t k = 0; k < depth; k += TILE_COLUMNS) {
      load_panel<6>(w + k * PANEL, depth - k);
      if constexpr (TWO_W) load_panel<7>(w + stride + k * PANEL, depth - k);
      load_tile<4>(x + k * TILE_ROWS, TILE_BYTES);
      multiply_tiles<0, 4, 6>();
      if constexpr (TWO_W) multiply_tiles<1, 4, 7>();
      if constexpr (TWO_X) {
        load_tile<5>(next_x + k * TILE_ROWS, TILE_BYTES);
        multiply_tiles<2, 5, 6>();
        if constexpr (TWO_W) multiply_tiles<3, 5, 7>();
      }
    }
    store_tile<0>(sums[0], TILE_BYTES);
    if constexpr (TWO_W) store_tile<1>(sums[1], TILE_BYTES);
    if constexpr (TWO_X) store_tile<2>(sums[2], TILE_BYTES);
    if constexpr (TWO_X && TWO_W) store_tile<3>(sums[3], TILE_BYTES);
  }

  // A piece of a panel, of which `columns` are left.
  template <int TILE>
  static void load_panel(const bf16* piece, int64_t columns) {
    if (columns >= TILE_COLUMNS) return load_tile<TILE>(piece, TILE_BYTES);
    alignas(64) bf16 padded[TILE_COLUMNS * PANEL] = {};
    __builtin_memcpy(padded, piece, ceil_div(columns, PAIR) * TILE_BYTES);
    load_tile<TILE>(padded, TILE_BYTES);
  }
};

}  // namespace

#endif
