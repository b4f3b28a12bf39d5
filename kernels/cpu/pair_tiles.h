// Tiles of bfloat16 in pairs of what is summed over, as the instructions that multiply bfloat16 take them: 16 pairs by
// 16 lanes, a right factor that fills a tile register of AMX, or 16 vectors.
#pragma once

#include "kv_formats.h"
#include "vec.h"

#ifdef __AVX512BF16__

namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLUMNS = 32;  // bfloat16 ones; 16 of float32
static_assert(LANES == TILE_ROWS, "tiles are transposed in vectors");

// TILE_COLUMNS of a row, of which `columns` exist, as bfloat16 that holds them exactly: a pair in each lane, then
// zeros.
template <class E>
inline Vec load_pairs_of(const E* p, int64_t columns) {
  if (columns < TILE_COLUMNS) {
    E row[TILE_COLUMNS] = {};
    __builtin_memcpy(row, p, max(0, columns) * sizeof(E));
    return load_pairs_of(row, TILE_COLUMNS);
  }
  if constexpr (sizeof(E) == sizeof(bf16)) {
    Vec pairs;
    __builtin_memcpy(&pairs, p, sizeof pairs);
    return pairs;
  } else {
    const Vec low = load(p), high = load(p + LANES);
    const Vec even = pick(low, high, [](int i) { return 2 * i; });
    const Vec odd = pick(low, high, [](int i) { return 2 * i + 1; });
    return (Vec)((VecUint)even >> 16 | (VecUint)odd);
  }
}

// A pair in each lane.
inline Vec broadcast_pair(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return (Vec)_mm512_set1_epi32(pair);
}

// sums += both products of each lane. The instruction takes denormal numbers for 0.
inline Vec add_pairs(Vec sums, Vec left, Vec right) {
  return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)left, (__m512bh)right);
}

// Two rows of TILE_COLUMNS as pairs of one and the other: those of the first LANES columns, and of the last.
struct PairsOfRows {
  Vec low, high;
};

inline PairsOfRows interleave(Vec first, Vec second) {
  typedef uint16_t Halves __attribute__((vector_size(64)));
  Halves low, high;
  for (int i = 0; i < LANES; i++) {
    low[2 * i] = i, low[2 * i + 1] = TILE_COLUMNS + i;
    high[2 * i] = LANES + i, high[2 * i + 1] = TILE_COLUMNS + LANES + i;
  }
  const auto a = (Halves)first, b = (Halves)second;
  return {(Vec)__builtin_shuffle(a, b, low), (Vec)__builtin_shuffle(a, b, high)};
}

// The right factor of which row i's pairs of columns are row(i).
template <class Row>
inline void pack_tile(bf16* to, const Row& row) {
  Vec pairs[LANES];
  for (int i = 0; i < TILE_ROWS; i++) pairs[i] = row(i);
  transpose(pairs);
  __builtin_memcpy(to, pairs, sizeof pairs);
}

}  // namespace

#endif
