// Decode attention: one query token a sequence. All query heads of a kv head go together, so that each K and V element
// is loaded and converted once for the whole group.
#pragma once

#include "paged.h"
#include "parallel.h"
#include "soft_cap.h"
#include "softmax.h"
namespace {

constexpr int DECODE_TILE = 32;  // keys between two softmax steps
constexpr int MAX_GROUP = 8;     // query heads that fit the registers at once
constexpr int SCALES_PER_LINE = 64 / sizeof(float);

// Where a tile's keys lie in the cache.
struct Tile {
  Place places[DECODE_TILE];
  int64_t count = 0;
};

// E: what the cache stores. Scales of a quantised cache multiply a key's scores and its softmax weights: one product a
// query head where the elements of the row would take head_dim.
template <class E, int G>
struct DecodeGroup {
  static constexpr int64_t PER_LINE = 64 / sizeof(E);  // elements of a cache line
  ContextReader<E> context;
  int64_t head_dim;
  Scoring scoring;
  alignas(64) float q[G][MAX_HEAD_DIM + LANES] = {};  // scaled; zeros past head_dim
  alignas(64) float acc[G][MAX_HEAD_DIM + LANES] = {};
  alignas(64) float scores[G][DECODE_TILE];
  float factors[G];
  RunningSoftmax softmax[G];

  DecodeGroup(const ContextReader<E>& reader, int64_t dim, const Scoring& how)
      : context(reader), head_dim(dim), scoring(in_powers_of_two(how)) {}

  template <class T>
  void read_queries(const Heads& queries, int64_t token, int64_t head) {
    for (int g = 0; g < G; g++)
      for (int64_t d = 0; d < head_dim; d += LANES)
        store(q[g] + d, load_chunk(row<T>(queries, token, head + g), d) * scoring.scale);
  }

  // Elements d .. d + LANES of a row, zeros past head_dim.
  template <class T>
  Vec load_chunk(const T* p, int64_t d) const {
    return d + LANES <= head_dim ? load(p + d) : load_first(p + d, head_dim - d);
  }

  // Lanes of the scores of KEYS keys at once: enough independent sums to hide the latency of a multiply-add.
  template <int KEYS>
  void score_keys(const Place* places, int64_t i, Vec (*lanes)[DECODE_TILE]) const {
    Vec dots[KEYS][G];
    for (int key = 0; key < KEYS; key++)
      for (int g = 0; g < G; g++) dots[key][g] = Vec{};
    for (int64_t d = 0; d < head_dim; d += LANES)
      for (int key = 0; key < KEYS; key++) {
        const Vec k = load_chunk(context.k + places[i + key].row, d);
        for (int g = 0; g < G; g++) dots[key][g] += load(q[g] + d) * k;
      }
    for (int key = 0; key < KEYS; key++)
      for (int g = 0; g < G; g++) lanes[g][i + key] = dots[key][g];
  }

  // Blocks lie far apart, where the processor's own prefetching does not follow: the next tile's K is fetched while
  // this one's is used, and its V likewise in `accumulate`.
  void score(const Tile& tile, const Tile& next) {
    constexpr int KEYS = G >= 5 ? 1 : 8 / G;
    Vec lanes[G][DECODE_TILE];
    int64_t i = 0;
    for (; i + KEYS <= tile.count; i += KEYS) {
      for (int64_t key = i; key < min(i + KEYS, next.count); key++) prefetch_row(context.k + next.places[key].row);
      score_keys<KEYS>(tile.places, i, lanes);
    }
    for (; i < tile.count; i++) score_keys<1>(tile.places, i, lanes);
    for (int g = 0; g < G; g++)
      for (i = 0; i < tile.count; i += LANES) store(scores[g] + i, sums_of(lanes[g] + i));
  }

  void prefetch_row(const E* row) const {
    for (int64_t d = 0; d < head_dim; d += PER_LINE) __builtin_prefetch(row + d);
  }

  // Adds up CHUNKS chunks of every V from column d on.
  template <int CHUNKS>
  void accumulate(const Tile& tile, const Tile& next, int64_t d) {
    Vec sums[CHUNKS][G];
    for (int c = 0; c < CHUNKS; c++)
      for (int g = 0; g < G; g++) sums[c][g] = load(acc[g] + d + c * LANES) * factors[g];
    for (int64_t i = 0; i < tile.count; i++) {
      if (i < next.count) prefetch_chunks<CHUNKS>(context.v + next.places[i].row, d);
      for (int c = 0; c < CHUNKS; c++) {
        const Vec v = load_chunk(context.v + tile.places[i].row, d + c * LANES);
        for (int g = 0; g < G; g++) sums[c][g] += v * scores[g][i];
      }
    }
    for (int c = 0; c < CHUNKS; c++)
      for (int g = 0; g < G; g++) store(acc[g] + d + c * LANES, sums[c][g]);
  }

  template <int CHUNKS>
  static void prefetch_chunks(const E* row, int64_t d) {
    for (int64_t at = d; at < d + CHUNKS * LANES; at += LANES)
      if (at % PER_LINE == 0) __builtin_prefetch(row + at);
  }

  void accumulate(const Tile& tile, const Tile& next) {
    constexpr int CHUNKS = G == 1 ? 8 : G <= 3 ? 4 : G <= 6 ? 2 : 1;  // sums that hide the latency and fit the registers
    int64_t d = 0;
    for (; d + CHUNKS * LANES <= head_dim; d += CHUNKS * LANES) accumulate<CHUNKS>(tile, next, d);
    for (; d < head_dim; d += LANES) accumulate<1>(tile, next, d);
  }

  Tile tile_at(int64_t begin, int64_t context_len) const {
    Tile tile;
    tile.count = max(int64_t{0}, min(DECODE_TILE, context_len - begin));
    context.for_places(begin, tile.count, [&](int64_t i, Place place) { tile.places[i] = place; });
    return tile;
  }

  // Multiplies each key's scores, or weights, by its scale, and fetches the next tile's.
  void apply_scales([[maybe_unused]] const float* scales, const Tile& tile, const Tile& next) {
    if constexpr (QUANTISED<E>) {
      alignas(64) float of_key[DECODE_TILE] = {};
      for (int64_t i = 0; i < tile.count; i++) of_key[i] = scales[tile.places[i].scale];
      for (int g = 0; g < G; g++)
        for (int64_t i = 0; i < tile.count; i += LANES) store(scores[g] + i, load(scores[g] + i) * load(of_key + i));
      for (int64_t i = 0; i < next.count; i += SCALES_PER_LINE) __builtin_prefetch(scales + next.places[i].scale);
    }
  }

  __attribute__((noinline)) void attend(int64_t context_len) {  // one copy, whatever T
    const int64_t first = scoring.first_visible(context_len - 1);
    Tile tile = tile_at(first, context_len);
    for (int64_t begin = first; begin < context_len; begin += DECODE_TILE) {
      const Tile next = tile_at(begin + DECODE_TILE, context_len);
      score(tile, next);
      apply_scales(context.k_scales, tile, next);
      for (int g = 0; g < G; g++) cap_scores(scores[g], tile.count, scoring.soft_cap);
      for (int g = 0; g < G; g++) factors[g] = softmax[g].update(scores[g], tile.count);
      apply_scales(context.v_scales, tile, next);
      accumulate(tile, next);
      tile = next;
    }
  }

  template <class T>
  void finish(const Heads& out, int64_t token, int64_t head) const {
    for (int g = 0; g < G; g++) store_scaled(row<T>(out, token, head + g), acc[g], softmax[g].inverse(), head_dim);
  }
};

template <class T, class E, int G>
void decode_group(const ContextReader<E>& reader, const Heads& q, const Heads& out, int64_t token, int64_t head,
                  int64_t context_len, int64_t head_dim, const Scoring& scoring) {
  DecodeGroup<E, G> group(reader, head_dim, scoring);
  group.template read_queries<T>(q, token, head);
  group.attend(context_len);
  group.template finish<T>(out, token, head);
}

template <class T, class E>
constexpr decltype(&decode_group<T, E, 1>) DECODE_BY_GROUP[] = {
    decode_group<T, E, 1>, decode_group<T, E, 2>, decode_group<T, E, 3>, decode_group<T, E, 4>,
    decode_group<T, E, 5>, decode_group<T, E, 6>, decode_group<T, E, 7>, decode_group<T, E, MAX_GROUP>};

template <class T, class E>
int64_t decode_from(const Heads& q, const Cache& cache, const Context& context, const Scoring& scoring,
                    const Heads& out, int threads) {
  const int64_t bad = first_bad_sequence(cache, context);
  if (bad != OK) return bad;
  const int64_t group = q.heads / cache.kv_heads;
  parallel_for(q.tokens * cache.kv_heads, threads, [&](int64_t item) {
    const int64_t sequence = item / cache.kv_heads, kv_head = item % cache.kv_heads;
    const ContextReader<E> reader(cache, context, sequence, kv_head);
    for (int64_t g = 0; g < group; g += MAX_GROUP) {
      const auto decode = DECODE_BY_GROUP<T, E>[min(MAX_GROUP, group - g) - 1];
      decode(reader, q, out, sequence, kv_head * group + g, context.context_lens[sequence], cache.head_dim, scoring);
    }
  });
  return OK;
}

template <class T>
int64_t paged_decode(const Heads& q, const Cache& cache, const Context& context, const Scoring& scoring,
                     const Heads& out, int threads) {
#ifdef BASE_OPS  // bound by reading the cache, and the longest part of this program to compile
  static_assert(sizeof(T) == sizeof(bf16));
  return BASE_OPS.paged_decode(BFLOAT16, q, cache, context, scoring, out, threads);
#else
  return by_format<T>(cache, [&](auto element) {
    return decode_from<T, decltype(element)>(q, cache, context, scoring, out, threads);
  });
#endif
}

}  // namespace
