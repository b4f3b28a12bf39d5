// How integers of W become cells of 32 bits, LANES rows a vector, and meet cells of x.
#pragma once

#include "panels.h"
#include "quantized_rows.h"
#include "vec.h"

namespace {

typedef int16_t VecPairs __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecUnsignedPairs __attribute__((vector_size(LANES * 4)));
typedef int8_t VecBytes __attribute__((vector_size(LANES * 2)));

inline VecInt fill_int(int32_t x) { return x - VecInt{}; }

inline VecInt load_cell(const void* p) {
  int32_t cell;
  __builtin_memcpy(&cell, p, sizeof cell);
  return fill_int(cell);
}

// Lane i: both products of lane i's pairs, added.
inline VecInt dot_pairs(VecInt a, VecInt b) {
#if defined(__AVX512BW__)
  return (VecInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VecInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (VecInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Each 16 bits: both products of their unsigned bytes of `a` and signed ones of `b`, added.
inline VecPairs dot_bytes(VecInt a, VecInt b) {
#if defined(__AVX512BW__)
  return (VecPairs)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VecPairs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
  const VecPairs even = (VecPairs)(a & 0x00ff00ff), odd = (VecPairs)((VecUnsignedPairs)a >> 8);
  return even * (((VecPairs)b << 8) >> 8) + odd * ((VecPairs)b >> 8);
#endif
}

inline VecInt widen_bytes(VecBytes bytes) {
#if defined(__AVX512BW__)
  return (VecInt)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
  return (VecInt)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return (VecInt)__builtin_convertvector(bytes, VecPairs);
#endif
}

// A cell: 2 columns of 16 bits.
struct Int8 {
  using Value = int16_t;                             // of x
  static constexpr int CELLS = STEP_COLUMNS / 2;     // of a step
  static constexpr int64_t X_GROUP = LARGEST_GROUP;  // of x, at most
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS;

  static VecInt cell(const uint8_t* step, int vector, int j) {
    VecBytes bytes;
    __builtin_memcpy(&bytes, step + (j * PANEL + vector * LANES) * 2, sizeof bytes);
    return widen_bytes(bytes);
  }
  static int32_t start(VecInt) { return 0; }
  static VecInt add_products(VecInt sums, VecInt w, VecInt x) { return sums + dot_pairs(w, x); }
  static VecInt sums(VecInt sums) { return sums; }
};

// A cell: 4 columns of 8 bits, whose products 16 bits hold: 8 cells of 15 * 127 twice.
struct Int4 {
  using Value = int8_t;
  static constexpr int CELLS = STEP_COLUMNS / 4;
  static constexpr int64_t X_GROUP = SMALLEST_GROUP;
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS / 2;
  static constexpr int32_t MIDDLE = 8;  // what is subtracted of each integer where there are no offsets

  static VecInt cell(const uint8_t* step, int vector, int j) {
    VecUnsignedPairs nibbles;
    __builtin_memcpy(&nibbles, step + vector * sizeof nibbles, sizeof nibbles);
    return (VecInt)((nibbles >> (4 * j)) & 0x0f0f);
  }

  // Of two 16-bit sums: -MIDDLE times the x that each is multiplied by. Lane i of `total` has columns i + n * LANES.
  static int32_t start(VecInt total) {
    uint32_t halves[2] = {};
    for (int i = 0; i < LANES; i++) halves[i / 2 % 2] -= MIDDLE * total[i];
    return static_cast<int32_t>(halves[1] << 16 | (halves[0] & 0xffff));
  }
  static VecInt add_products(VecInt sums, VecInt w, VecInt x) { return (VecInt)((VecPairs)sums + dot_bytes(w, x)); }
  static VecInt sums(VecInt sums) { return dot_pairs(sums, fill_int(0x00010001)); }
};

}  // namespace
