// The products of decode attention on AVX512-VNNI over an int8 cache, whose bytes are multiplied as they lie. Queries
// and weights become integers of 16 bits, a high and a low byte that are multiplied one after the other: sums are
// exact, and what is rounded are these integers alone, at 2^-17 of the largest. Heads are whole vectors of bytes.
#pragma once

#include "decode_tile.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

namespace {

constexpr int ROW_BYTES = 64;                  // of K or V that a vector holds
constexpr int FOURS = ROW_BYTES / LANES;       // bytes that a lane holds, and vectors of sums of their columns
constexpr float LARGEST_QUERY = 127 * 256.f;   // what the largest value of a query becomes: its high byte is signed
constexpr float LARGEST_WEIGHT = 255 * 257.f;  // all of 16 bits
constexpr int32_t UNSIGNED_BIAS = 128;         // of a K that the instruction takes as unsigned

// sums += products of four bytes a lane, unsigned by signed.
inline VecInt add_bytes(VecInt sums, __m512i of_unsigned, __m512i of_signed) {
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sums, of_unsigned, of_signed);
}

// The nearest integers to |v| < 2^31.
inline VecInt nearest(Vec v) { return (VecInt)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v); }

inline __m128i low_bytes(VecInt v) { return _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v); }

// Half a row of each.
inline __m512i load_halves(const int8* first, const int8* second) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  return _mm512_maskz_inserti64x4(0xff, low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
}

// Quarter j of each of four rows, in `quarters[j]`.
inline void load_quarters(const int8* const (&rows)[4], __m512i (&quarters)[4]) {
  constexpr int EVEN = 0x88, ODD = 0xdd, HALF = ROW_BYTES / 2;
  for (int half = 0; half < 2; half++) {
    const __m512i upper = load_halves(rows[0] + half * HALF, rows[1] + half * HALF);
    const __m512i lower = load_halves(rows[2] + half * HALF, rows[3] + half * HALF);
    quarters[2 * half] = _mm512_maskz_shuffle_i32x4(0xffff, upper, lower, EVEN);
    quarters[2 * half + 1] = _mm512_maskz_shuffle_i32x4(0xffff, upper, lower, ODD);
  }
}

// G: query heads.
template <int G>
class ByteDecodeProducts {
 public:
  ByteDecodeProducts(int64_t dim, float factor) : head_dim(dim), scale(factor) {}

  static bool takes(int64_t dim) { return dim % ROW_BYTES == 0; }

  void read_query(int g, const bf16* from) {
    const float peak = peak_of(from, head_dim);
    VecInt totals = {};
    for (int64_t d = 0; d < head_dim; d += LANES) {
      const VecInt integers = nearest(load(from + d) * (LARGEST_QUERY / peak)), high = (integers + 128) >> 8;
      totals += integers;
      const VecInt halves[2] = {high, integers - (high << 8)};
      for (int half = 0; half < 2; half++)
        _mm512_store_si512(q[g][d / LANES][half], _mm512_maskz_broadcast_i32x4(0xffff, low_bytes(halves[half])));
    }
    starts[g] = -UNSIGNED_BIAS * over_lanes(totals, [](VecInt a, VecInt b) { return a + b; });
    units[g] = peak / LARGEST_QUERY * scale;
  }

  void score(const int8* k, const Tile& tile, const Tile& next, float (*scores)[DECODE_TILE]) const {
    int64_t i = 0;
    for (; i < tile.count; i += LANES) {
      VecInt sums[G];
      score_keys(k, tile.places + i, next.places + i, sums);
      for (int g = 0; g < G; g++)
        store(scores[g] + i, __builtin_convertvector(sums[g] + starts[g], Vec) * units[g]);
    }
    for (; i < next.count; i++) prefetch_columns(k + next.places[i].row, 0, head_dim);
  }

  // Adds all V of the tile times `weights`, zeros after them, to what was added before, times `factors`.
  void accumulate(const int8* v, const Tile& tile, const Tile& next, const float (*weights)[DECODE_TILE],
                  const float* factors) {
    Weights rounded;
    for (int g = 0; g < G; g++) rounded.read(g, weights[g], tile.count);
    constexpr int AT_ONCE = G <= 2 ? 4 : G <= 6 ? 2 : 1;  // of FOURS: sums that fit the registers
    for (int64_t d = 0; d < head_dim; d += ROW_BYTES)
      add_columns<0, AT_ONCE>(v + d, tile, next, rounded, factors, acc + d / ROW_BYTES * G);
  }

  template <class T>
  void store_sums(int g, float factor, T* to) const {
    for (int64_t d = 0; d < head_dim; d += ROW_BYTES) {
      alignas(64) float columns[ROW_BYTES];
      for (int c = 0; c < FOURS; c++)
        for (int quarter = 0; quarter < 4; quarter++)
          __builtin_memcpy(columns + quarter * LANES + c * 4, acc[d / ROW_BYTES * G + g][c] + quarter * 4, 16);
      store_scaled(to + d, columns, factor, ROW_BYTES);
    }
  }

 private:
  // Softmax weights, and what their last bit stands for: an unsigned high and low byte of each.
  struct Weights {
    uint8_t bytes[G][2][DECODE_TILE];
    float units[G];

    // A NaN has larger bits than any number, and spreads by its unit.
    void read(int g, const float* from, int64_t count) {
      VecInt top = {};
      for (int64_t i = 0; i < count; i += LANES) top = max(top, (VecInt)load(from + i) & 0x7fffffff);
      const float peak = ((Vec)over_lanes(top, [](VecInt a, VecInt b) { return max(a, b); }))[0];
      for (int64_t i = 0; i < count; i += LANES) {
        const VecInt integers = nearest(load(from + i) * (LARGEST_WEIGHT / peak));
        const __m128i high = low_bytes(integers >> 8), low = low_bytes(integers);
        __builtin_memcpy(bytes[g][0] + i, &high, sizeof high);
        __builtin_memcpy(bytes[g][1] + i, &low, sizeof low);
      }
      units[g] = peak / LARGEST_WEIGHT;
    }

    // Of keys i .. i + 3, in each lane.
    __m512i four(int g, int half, int64_t i) const {
      int32_t four_bytes;
      __builtin_memcpy(&four_bytes, bytes[g][half] + i, sizeof four_bytes);
      return _mm512_set1_epi32(four_bytes);
    }
  };

  int64_t head_dim;
  float scale;
  float units[G];
  VecInt starts[G];
  alignas(64) int8_t q[G][MAX_HEAD_DIM / LANES][2][ROW_BYTES];  // LANES columns, four times
  // Lane 4 i + j of vector c: column 16 i + 4 c + j of a row's part.
  alignas(64) float acc[MAX_HEAD_DIM / ROW_BYTES * G][FOURS][LANES] = {};

  // Products with LANES keys, K taken as unsigned.
  void score_keys(const int8* k, const Place* places, const Place* next, VecInt (&sums)[G]) const {
    constexpr int AT_ONCE = G <= 4 ? 2 : 1;
    VecInt halves[2][G];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      VecInt fours[2][G];
      for (int n = 0; n < 2; n += AT_ONCE)
        score_fours<AT_ONCE>(k, places + i + 2 * n, next + i + 2 * n, fours + n);
      for (int g = 0; g < G; g++) halves[i][g] = fold<2>(fours[0][g], fours[1][g]);
    }
    for (int g = 0; g < G; g++) sums[g] = fold<1>(halves[0][g], halves[1][g]);
  }

  // N times four keys that lie 4 apart, the first ones 2: lanes of each key's products are neighbours, to be added up.
  template <int N>
  void score_fours(const int8* k, const Place* places, const Place* next, VecInt (*sums)[G]) const {
    VecInt dots[2][N][G] = {};
    for (int64_t d = 0; d < head_dim; d += ROW_BYTES) {
      __m512i keys[N][4];
      for (int n = 0; n < N; n++) {
        const int8* rows[4];
        for (int i = 0; i < 4; i++) {
          rows[i] = k + places[2 * n + 4 * i].row + d;
          __builtin_prefetch(k + next[2 * n + 4 * i].row + d, 0, 2);
        }
        load_quarters(rows, keys[n]);
        for (int j = 0; j < 4; j++) keys[n][j] = _mm512_xor_si512(keys[n][j], _mm512_set1_epi8(-UNSIGNED_BIAS));
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
          for (int half = 0; half < 2; half++) {
            __m512i query = _mm512_load_si512(q[g][d / LANES + j][half]);
            if constexpr (N > 1) KEEP_IN_REGISTER(query);
            for (int n = 0; n < N; n++) dots[half][n][g] = add_bytes(dots[half][n][g], keys[n][j], query);
          }
    }
    for (int n = 0; n < N; n++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) sums[n][g] = (dots[0][n][g] << 8) + dots[1][n][g];
  }

  // Adds up vectors FIRST .. FOURS of the columns of each V, N at once.
  template <int FIRST, int N>
  static void add_columns(const int8* v, const Tile& tile, const Tile& next, const Weights& weights,
                          const float* factors, float (*to)[FOURS][LANES]) {
    VecInt added[G][2][N] = {};
    int64_t i = 0;
    for (; i < tile.count; i += 4) {
      __m512i rows[4], columns[N];
      if constexpr (FIRST == 0)
        for (int key = 0; key < 4; key++) __builtin_prefetch(v + next.places[i + key].row, 0, 2);
      for (int key = 0; key < 4; key++) rows[key] = _mm512_loadu_si512(v + tile.places[i + key].row);
      interleave_fours<FIRST>(rows, columns);
#pragma GCC unroll 8
      for (int g = 0; g < G; g++)
        for (int half = 0; half < 2; half++) {
          const __m512i four = weights.four(g, half, i);
          for (int n = 0; n < N; n++) added[g][half][n] = add_bytes(added[g][half][n], four, columns[n]);
        }
    }
    if constexpr (FIRST == 0)
      for (; i < next.count; i++) __builtin_prefetch(v + next.places[i].row, 0, 2);
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
      for (int n = 0; n < N; n++) {
        float* sums = to[g][FIRST + n];
        const VecInt more = (added[g][0][n] << 8) + added[g][1][n];
        store(sums, load(sums) * factors[g] + __builtin_convertvector(more, Vec) * weights.units[g]);
      }
    if constexpr (FIRST + N < FOURS) add_columns<FIRST + N, N>(v, tile, next, weights, factors, to);
  }

  // Lane 4 i + j of vector c: column 16 i + 4 c + j of all four rows.
  template <int FIRST, int N>
  static void interleave_fours(const __m512i (&rows)[4], __m512i (&columns)[N]) {
    for (int n = 0; n < N; n++) {
      const bool upper = (FIRST + n) / 2, last = (FIRST + n) % 2;
      const __m512i a = upper ? _mm512_unpackhi_epi8(rows[0], rows[1]) : _mm512_unpacklo_epi8(rows[0], rows[1]);
      const __m512i b = upper ? _mm512_unpackhi_epi8(rows[2], rows[3]) : _mm512_unpacklo_epi8(rows[2], rows[3]);
      columns[n] = last ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
    }
  }
};

}  // namespace

#endif
