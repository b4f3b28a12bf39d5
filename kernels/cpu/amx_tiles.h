// Tiles of AMX, the matrix units of newer Xeons: registers of 16 rows of 64 bytes.
//
// The units multiply [16 rows, 32 columns] of bfloat16 by [16 pairs of columns, 16 rows, 2] and add to [16, 16] of
// float32.
#pragma once

#include "pair_tiles.h"

#ifdef HAVE_AMX

namespace {

constexpr int TILE_BYTES = 64;  // of a row

// Instructions with tile registers: assembly, because GCC's intrinsics do not say that they read memory.
template <int TILE>
inline void load_tile(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"n"(TILE), "r"(from), "r"(row_bytes) : "memory");
}

template <int TILE>
inline void store_tile(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"n"(TILE), "r"(to), "r"(row_bytes) : "memory");
}

template <int TILE>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"n"(TILE));
}

// SUMS[16, 16] += LEFT[16, 32] RIGHT[16 pairs, 16, 2]
template <int SUMS, int LEFT, int RIGHT>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(SUMS), "n"(LEFT), "n"(RIGHT));
}

// All eight tile registers of this thread, of full size, for as long as this lives.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int t = 0; t < 8; t++) shapes.row_bytes[t] = TILE_BYTES, shapes.rows[t] = TILE_ROWS;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
};

}  // namespace

#endif
