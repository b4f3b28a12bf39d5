// How integers of W become cells of 32 bits, LANES rows a vector, and meet cells of x.
#pragma once

#include "panels.h"
#include "quantized_rows.h"
#include "vec.h"

namespace {

typedef int16_t VecPairs __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecUnsignedPairs __attribute__((vector_size(LANES * 4)));

inline VecInt fill_int(int32_t x) { return x - VecInt{}; }

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

#ifdef __AVX512VNNI__
// Each lane: `sums` and the four products of its unsigned bytes of `a` and signed ones of `b`, all exact.
inline VecInt add_dot_bytes(VecInt sums, VecInt a, VecInt b) {
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
}
#endif

inline VecInt load_int(const uint8_t* p) {
  VecInt v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

#ifdef __AVX512VNNI__
// A cell: 4 columns of 8 bits, to which 128 is added so that they have no sign.
struct Int8 {
  using Value = int8_t;                           // of x
  static constexpr int CELLS = STEP_COLUMNS / 4;  // of a step
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS;

  static constexpr int32_t middle(bool) { return 128; }  // what is to be subtracted of each integer
  static VecInt cell(const uint8_t* step, int vector, int j) {
    return load_int(step + (j * PANEL + vector * LANES) * 4) ^ fill_int(0x80808080);
  }
  static VecInt in_order(VecInt x) { return x; }  // of cells, columns of x

  // What sums of products begin with, a lane for each of LANES groups of x: lane i of sums[j] is the sum of columns
  // i + n * LANES of group j, lane j of totals that of all.
  static VecInt starts(const VecInt*, VecInt totals, int32_t middle) { return totals * -middle; }
  static VecInt add_products(VecInt sums, VecInt w, VecInt x) { return add_dot_bytes(sums, w, x); }
  static VecInt end(VecInt sums) { return sums; }
};
#else
// A cell: 2 columns of 16 bits. Those of 4 bytes of W are the two even ones, and the two odd ones.
struct Int8 {
  using Value = int16_t;
  static constexpr int CELLS = STEP_COLUMNS / 2;
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS;

  static constexpr int32_t middle(bool) { return 0; }
  static VecInt cell(const uint8_t* step, int vector, int j) {
    const VecPairs bytes = (VecPairs)load_int(step + (j / 2 * PANEL + vector * LANES) * 4);
    return (VecInt)(j % 2 == 0 ? bytes << 8 >> 8 : bytes >> 8);
  }
  static VecInt in_order(VecInt x) {
    return (VecInt)pick((Vec)x, (Vec)x, [](int i) { return (i & ~3) | (i & 1) << 1 | (i & 2) >> 1; });
  }
  static VecInt starts(const VecInt*, VecInt, int32_t) { return VecInt{}; }
  static VecInt add_products(VecInt sums, VecInt w, VecInt x) { return sums + dot_pairs(w, x); }
  static VecInt end(VecInt sums) { return sums; }
};
#endif

// A cell: 4 columns of 8 bits.
struct Int4 {
  using Value = int8_t;
  static constexpr int CELLS = STEP_COLUMNS / 4;
  static constexpr int STEP_BYTES = PANEL * STEP_COLUMNS / 2;

  static constexpr int32_t middle(bool has_offsets) { return has_offsets ? 0 : 8; }
  static VecInt cell(const uint8_t* step, int vector, int j) {
    VecUnsignedPairs nibbles;
    __builtin_memcpy(&nibbles, step + vector * sizeof nibbles, sizeof nibbles);
    return (VecInt)((nibbles >> (4 * j)) & 0x0f0f);
  }
  static VecInt in_order(VecInt x) { return x; }
#ifdef __AVX512VNNI__
  static VecInt starts(const VecInt*, VecInt totals, int32_t middle) { return totals * -middle; }
  static VecInt add_products(VecInt sums, VecInt w, VecInt x) { return add_dot_bytes(sums, w, x); }
  static VecInt end(VecInt sums) { return sums; }
#else
  // A lane has two sums, for 16 bits hold the products of a group: 8 cells of 15 * 127 twice. Each has its own start.
  static VecInt starts(const VecInt* sums, VecInt totals, int32_t middle) {
    VecInt in_first = {}, of_first[LANES];
    for (int i = 0; i < LANES; i++) in_first[i] = i / 2 % 2 == 0 ? -1 : 0;
    for (int j = 0; j < LANES; j++) of_first[j] = sums[j] & in_first;
    const VecInt first = combined_lanes(of_first, [](VecInt a, VecInt b) { return a + b; });
    return ((totals - first) * -middle) << 16 | ((first * -middle) & 0xffff);
  }
  static VecInt add_products(VecInt sums, VecInt w, VecInt x) { return (VecInt)((VecPairs)sums + dot_bytes(w, x)); }
  static VecInt end(VecInt sums) { return dot_pairs(sums, fill_int(0x00010001)); }
#endif
};

}  // namespace
