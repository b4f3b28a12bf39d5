// Vectors as wide as the instruction set of this build, over float32 and bfloat16 storage.
//
// Everything in these headers lives in an anonymous namespace and uses no templates of the standard library:
// kernels.cpp is compiled once for each instruction set, and the linker must not merge functions of one build into
// another.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Else the compiler loads a vector again for each use, puts a sum off, or rounds a product together with a later sum.
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(vec) asm("" : "+v"(vec))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(vec) asm("" : "+w"(vec))
#else
#define KEEP_IN_REGISTER(vec)
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecInt __attribute__((vector_size(LANES * 4)));
typedef uint32_t VecUint __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(LANES * 2)));

struct bf16 {
  uint16_t bits;
};

struct half {
  uint16_t bits;
};

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <int N>
struct Constant {
  static constexpr int value = N;
};

// body(Constant<n>), for n in 1 .. MOST.
template <int MOST, class Body>
inline void with_constant(int64_t n, const Body& body) {
  if constexpr (MOST > 1)
    if (n < MOST) return with_constant<MOST - 1>(n, body);
  body(Constant<MOST>{});
}

inline Vec fill(float x) { return x - Vec{}; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline VecInt max(VecInt a, VecInt b) { return a > b ? a : b; }

inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// GCC 12 widens in halves, which takes five instructions where these are one.
inline VecUint widen(VecHalf narrow) {
#if defined(__AVX512F__)
  return (VecUint)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)narrow);
#elif defined(__AVX2__)
  return (VecUint)_mm256_cvtepu16_epi32((__m128i)narrow);
#else
  return __builtin_convertvector(narrow, VecUint);
#endif
}

inline Vec load(const bf16* p) {
  VecHalf half;
  __builtin_memcpy(&half, p, sizeof half);
  return (Vec)(widen(half) << 16);
}

// Exact for every finite value.
inline Vec load(const half* p) {
  VecHalf bits;
  __builtin_memcpy(&bits, p, sizeof bits);
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);  // GCC 12 warns of the unmasked one
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)bits);
#else
  const VecUint wide = __builtin_convertvector(bits, VecUint);
  const Vec size = (Vec)((wide & 0x7fff) << 13) * 0x1p112f;  // the exponent's bias: 127 - 15
  return (Vec)((VecUint)size | (wide & 0x8000) << 16);
#endif
}

inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

#if defined(__AVX512BF16__)
// As `store`, but denormal numbers become 0. Not two vectors at once: Bochs 3.0 mistakes that instruction.
inline void store_normal(bf16* p, Vec v) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  __builtin_memcpy(p, &rounded, sizeof rounded);
}
#endif

// Rounds to nearest, ties to even; a NaN stays one.
inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  constexpr int DENORMAL = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, DENORMAL) == 0, true)) return store_normal(p, v);
#endif
  const VecUint bits = (VecUint)v;
  const VecUint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VecUint quiet = (bits >> 16) | 0x40;
  const VecHalf half = __builtin_convertvector(v == v ? rounded : quiet, VecHalf);
  __builtin_memcpy(p, &half, sizeof half);
}

// The first n < LANES elements; the other lanes are 0.
template <class T>
inline Vec load_first(const T* p, int64_t n) {
  T lanes[LANES] = {};
  __builtin_memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <class T>
inline void store_first(T* p, Vec v, int64_t n) {
  T lanes[LANES];
  store(lanes, v);
  __builtin_memcpy(p, lanes, n * sizeof(T));
}

// The first n lanes of `v`; the others are `rest`.
inline Vec first_lanes(Vec v, int64_t n, float rest) {
  VecInt lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return lane < static_cast<int32_t>(n) ? v : fill(rest);
}

template <class T>
inline Vec load_some(const T* p, int64_t n) {
  return n == LANES ? load(p) : load_first(p, n);
}

template <class T>
inline void store_some(T* p, Vec v, int64_t n) {
  if (n == LANES) return store(p, v);
  store_first(p, v, n);
}

// body(i, n) for each vector of 0 .. count: n = LANES, but for the last one.
template <class Body>
inline void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) body(i, LANES);
  if (i < count) body(i, count - i);
}

// Writes n floats times `factor`, rounded to T. `from` is readable to the next multiple of LANES.
template <class T>
inline void store_scaled(T* to, const float* from, float factor, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(from + i) * factor);
  if (i < n) store_first(to + i, load(from + i) * factor, n - i);
}

// Lane i is lane index(i) of `a` and `b` put together; `index` must be constant once inlined.
template <class Index>
inline Vec pick(Vec a, Vec b, const Index& index) {
#if defined(__clang__)  // has no __builtin_shuffle, but recognises one
  Vec picked;
  for (int i = 0; i < LANES; i++) picked[i] = index(i) < LANES ? a[index(i) % LANES] : b[index(i) % LANES];
  return picked;
#else
  VecInt from;
  for (int i = 0; i < LANES; i++) from[i] = index(i);
  return __builtin_shuffle(a, b, from);
#endif
}

// Which lanes of `a` and `b` become lane i of a first vector; of a second one, those WIDTH further.
template <int WIDTH>
inline int lower_lane(int i) {
  return i & WIDTH ? LANES + i - WIDTH : i;
}
template <int WIDTH>
inline int upper_lane(int i) {
  return lower_lane<WIDTH>(i) + WIDTH;
}

// Lanes of `b` where their number has the bit WIDTH, of `a` elsewhere.
template <int WIDTH>
inline Vec blend(Vec a, Vec b) {
#if defined(__AVX512F__)  // GCC 12 takes a shuffle for it, which fewer units do
  constexpr int NUMBERS_WITH_BIT = 0xffff / ((1 << WIDTH) + 1) << WIDTH;
  return (Vec)_mm512_mask_blend_ps(NUMBERS_WITH_BIT, (__m512)a, (__m512)b);
#else
  return pick(a, b, [](int i) { return i & WIDTH ? LANES + i : i; });
#endif
}

// Adds lanes WIDTH apart: those of `a` into the lanes whose number lacks the bit WIDTH, those of `b` into the others.
template <int WIDTH, class V>
inline V fold(V a, V b) {
  const Vec others = pick((Vec)a, (Vec)b, [](int i) { return i & WIDTH ? LANES + i - WIDTH : i + WIDTH; });
  return (V)blend<WIDTH>((Vec)a, (Vec)b) + (V)others;
}

template <int WIDTH>
inline Vec folded(const Vec* v) {
  if constexpr (WIDTH == LANES) {
    return *v;
  } else {
    return fold<WIDTH>(folded<2 * WIDTH>(v), folded<2 * WIDTH>(v + WIDTH));
  }
}

// Lane i: sum(v[i]), to the same bit.
inline Vec sums_of(const Vec* v) { return folded<1>(v); }

// Lanes WIDTH apart change places between vectors WIDTH apart, and so on with halves of WIDTH.
template <int WIDTH = LANES / 2>
inline void transpose(Vec (&rows)[LANES]) {
  for (int i = 0; i < LANES; i++) {
    if (i & WIDTH) continue;
    const Vec a = rows[i], b = rows[i + WIDTH];
    rows[i] = pick(a, b, lower_lane<WIDTH>);
    rows[i + WIDTH] = pick(a, b, upper_lane<WIDTH>);
  }
  if constexpr (WIDTH > 1) transpose<WIDTH / 2>(rows);
}

// In a tree: lanes LANES / 2 apart first.
template <int WIDTH = LANES / 2>
inline float sum(Vec v) {
  const Vec halves = v + pick(v, v, [](int i) { return i ^ WIDTH; });
  if constexpr (WIDTH > 1) return sum<WIDTH / 2>(halves);
  return halves[0];
}

template <int WIDTH = LANES / 2>
inline float largest(Vec v) {
  const Vec halves = max(v, pick(v, v, [](int i) { return i ^ WIDTH; }));
  if constexpr (WIDTH > 1) return largest<WIDTH / 2>(halves);
  return halves[0];
}

// All lanes combined, in each of them.
template <int WIDTH = LANES / 2, class Combine>
inline VecInt over_lanes(VecInt v, const Combine& combine) {
  const VecInt halves = combine(v, (VecInt)pick((Vec)v, (Vec)v, [](int i) { return i ^ WIDTH; }));
  if constexpr (WIDTH > 1) return over_lanes<WIDTH / 2>(halves, combine);
  return halves;
}

// Whether any lane is above `limit`.
inline bool any_above(Vec v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)(v > limit)) != 0;
#else
  return largest(v) > limit;
#endif
}

constexpr float LOG2_E = 1.44269504f;

// 2^x for x < 127, to about 1 ulp, and 1 at 0: a polynomial of what x is above an integer, whose power of two goes to
// the exponent. -inf gives exactly 0; so does all below the smallest normal result, but for AVX-512's denormal ones.
inline Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const Vec shifted = (x - 0.5f) + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
  const Vec f = x - (shifted - 12582912.f);
#endif
  Vec p = f * 1.86713026e-3f + 9.01702993e-3f;
  p = p * f + 5.57999134e-2f;
  p = p * f + 2.40164450e-1f;
  p = p * f + 6.93151312e-1f;
  p = p * f + 1.f;
#if defined(__AVX512DQ__)
  return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
#else
  return x < -126.f ? Vec{} : (Vec)((VecInt)p + ((VecInt)shifted << 23));
#endif
}

// e^x for x <= 0, to about 2 ulp: x = n ln 2 + r, a polynomial of r (Moshier's Cephes), 2^n through the exponent bits.
// 0 below the smallest normal result, so -inf gives exactly 0.
inline Vec exp(Vec x) {
  constexpr float SMALLEST = -87.336544f;
  const Vec shifted = x * 1.44269504f + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
  const Vec n = shifted - 12582912.f;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const VecInt exponent = ((VecInt)shifted - 0x4B400000 + 127) << 23;
  return x < SMALLEST ? Vec{} : p * (Vec)exponent;
}

}  // namespace
