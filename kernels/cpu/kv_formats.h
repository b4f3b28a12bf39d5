// One byte an element, and a scale for each row: what a quantised KV cache stores. kernels/kv_write.py is the contract.
#pragma once

#include "vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

struct int8 {
  int8_t value;
};

struct e4m3 {  // sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN and are never stored here
  uint8_t bits;
};

typedef int8_t VecByte __attribute__((vector_size(LANES)));
typedef uint8_t VecUbyte __attribute__((vector_size(LANES)));

// LANES signed bytes. GCC 12 converts bytes lane by lane unless it is given the instruction's name: 1 becomes 30.
inline VecInt load_bytes(const void* p) {
#if defined(__AVX512F__)
  return (VecInt)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (VecInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  VecByte bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, VecInt);
#endif
}

inline Vec load(const int8* p) { return __builtin_convertvector(load_bytes(p), Vec); }

// Exponent and mantissa move to float32's places, where the exponent is too small by the difference of the biases. A
// product with a power of two mends that, exactly, subnormal numbers included. The sign fills what is left of them.
inline Vec load(const e4m3* p) { return (Vec)((VecUint)load_bytes(p) << 20 & 0x87f00000) * 0x1p120f; }

template <class E>
constexpr float QUANTISED_LIMIT = 0;  // the largest value stored
template <>
constexpr float QUANTISED_LIMIT<int8> = 127.f;
template <>
constexpr float QUANTISED_LIMIT<e4m3> = 448.f;

template <class E>
constexpr bool QUANTISED = QUANTISED_LIMIT<E> != 0;

constexpr float ROUNDS_TO_INTEGER = 12582912.f;  // 1.5 * 2^23: adding it leaves no bits for fractions

// |v| <= 127; ties to even.
inline void store(int8* p, Vec v) {
  const VecInt integers = (VecInt)(v + ROUNDS_TO_INTEGER) - 0x4B400000;
  const VecByte bytes = __builtin_convertvector(integers, VecByte);
  __builtin_memcpy(p, &bytes, sizeof bytes);
}

// |v| <= 448; ties to even. Below the smallest normal number, 2^-6, the mantissa counts steps of 2^-9.
inline void store(e4m3* p, Vec v) {
  const VecUint bits = (VecUint)v, size = bits & 0x7fffffff;
  const VecUint normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
  const VecUint steps = (VecUint)((Vec)size * 0x1p9f + ROUNDS_TO_INTEGER) - 0x4B400000;
  const VecUint code = ((Vec)size < 0x1p-6f ? steps : normal) | ((bits >> 24) & 0x80);
  const VecUbyte bytes = __builtin_convertvector(code, VecUbyte);
  __builtin_memcpy(p, &bytes, sizeof bytes);
}

// max |x| of a row; NaN when the row has a NaN or an infinity.
template <class T>
inline float peak_of(const T* x, int64_t n) {
  Vec peak = {}, not_finite = {};
  for_vectors(n, [&](int64_t i, int64_t count) {
    const Vec v = load_some(x + i, count);
    peak = max(peak, max(v, -v));
    not_finite += v - v;
  });
  return largest(peak) + sum(not_finite);
}

// Returns the scale.
template <class T, class E>
inline float quantise_row(const T* x, E* to, int64_t n) {
  constexpr float SMALLEST_PEAK = 0x1p-100f, LIMIT = QUANTISED_LIMIT<E>;
  const float peak = peak_of(x, n);
  if (!(peak >= SMALLEST_PEAK)) {
    __builtin_memset(to, 0, n);
    return peak < SMALLEST_PEAK ? 0.f : __builtin_nanf("");
  }
  const float factor = LIMIT / peak;
  for_vectors(n, [&](int64_t i, int64_t count) {
    Vec scaled = load_some(x + i, count) * factor;
    KEEP_IN_REGISTER(scaled);  // rounded here, not together with an addition that follows
    store_some(to + i, max(fill(-LIMIT), -max(fill(-LIMIT), -scaled)), count);
  });
  return peak / LIMIT;
}

}  // namespace
