// Decode attention: one query token a sequence. All query heads of a kv head go together, so that each K and V element
// is loaded and converted once for the whole group.
#pragma once

#include "decode_bytes.h"
#include "decode_pairs.h"
#include "decode_vectors.h"
#include "parallel.h"
#include "soft_cap.h"
#include "softmax.h"

namespace {

constexpr int MAX_GROUP = 8;  // query heads that fit the registers at once

// What multiplies G query heads by a cache of E.
template <class E, int G>
struct DecodeProductsOf {
  using Products = VectorDecodeProducts<E, G>;
};
#ifdef BASE_OPS
template <int G>
struct DecodeProductsOf<bf16, G> {
  using Products = PairDecodeProducts<G>;
};
template <int G>
struct DecodeProductsOf<int8, G> {
  using Products = ByteDecodeProducts<G>;
};
#endif

// E: what the cache stores. Scales of a quantised cache multiply a key's scores and its softmax weights: one product a
// query head where the elements of the row would take head_dim.
template <class E, int G>
struct DecodeGroup {
  static constexpr int SCALES_PER_LINE = 64 / sizeof(float);
  ContextReader<E> context;
  int64_t head_dim;
  Scoring scoring;
  typename DecodeProductsOf<E, G>::Products products;
  alignas(64) float scores[G][DECODE_TILE];
  RunningSoftmax softmax[G];

  DecodeGroup(const ContextReader<E>& reader, int64_t dim, const Scoring& how)
      : context(reader), head_dim(dim), scoring(in_powers_of_two(how)), products(dim, scoring.scale) {}

  template <class T>
  void read_queries(const Heads& queries, int64_t token, int64_t head) {
    for (int g = 0; g < G; g++) products.read_query(g, row<T>(queries, token, head + g));
  }

  // Multiplies each key's scores, or weights, by its scale, and fetches the next tile's.
  void apply_scales([[maybe_unused]] const float* scales, const Tile& tile, const Tile& next) {
    if constexpr (QUANTISED<E>) {
      for (int64_t i = 0; i < tile.count; i += LANES) {
        const Vec of_key = scales_of(scales, tile, i);
        for (int g = 0; g < G; g++) store(scores[g] + i, load(scores[g] + i) * of_key);
      }
      for (int64_t i = 0; i < next.count; i += SCALES_PER_LINE) __builtin_prefetch(scales + next.places[i].scale, 0, 2);
    }
  }

  // Of keys i and after of the tile, zeros after its last one.
  Vec scales_of(const float* scales, const Tile& tile, int64_t i) const {
    const int64_t first = tile.places[i].scale, last = tile.places[i + LANES - 1].scale;
    const bool side_by_side = context.block_size >= LANES && last - first == LANES - 1;
    if (side_by_side) return load(scales + first);  // a vector stored in parts takes long to be read
    alignas(64) float of_key[LANES] = {};
    for (int64_t key = i; key < min(i + LANES, tile.count); key++) of_key[key - i] = scales[tile.places[key].scale];
    return load(of_key);
  }

  // `after`: what will be read when this is done.
  __attribute__((noinline)) void attend(int64_t context_len, const Tile& after) {  // one copy, whatever T
    int64_t begin = scoring.first_visible(context_len - 1);
    Tile tile = tile_at(context, begin, context_len, context);
    for (; begin < context_len; begin += DECODE_TILE) {
      const Tile more = tile_at(context, begin + DECODE_TILE, context_len, context);
      const Tile& next = more.count > 0 ? more : after;
      products.score(context.k, tile, next, scores);
      apply_scales(context.k_scales, tile, next);
      for (int g = 0; g < G; g++) cap_scores(scores[g], tile.count, scoring.soft_cap);
      float factors[G];
      for (int g = 0; g < G; g++) factors[g] = softmax[g].update(scores[g], tile.count);
      apply_scales(context.v_scales, tile, next);
      products.accumulate(context.v, tile, next, scores, factors);
      tile = next;
    }
  }

  template <class T>
  void finish(const Heads& out, int64_t token, int64_t head) const {
    for (int g = 0; g < G; g++)
      products.store_sums(g, softmax[g].inverse(), row<T>(out, token, head + g));
  }
};

// One item of a step's work: a sequence and a kv head.
template <class E>
struct DecodeItem {
  int64_t sequence, kv_head, context_len;
  ContextReader<E> reader;

  DecodeItem(const Cache& cache, const Context& context, int64_t item)
      : sequence(item / cache.kv_heads), kv_head(item % cache.kv_heads), context_len(context.context_lens[sequence]),
        reader(cache, context, sequence, kv_head) {}

  Tile first_tile(const Scoring& scoring, const ContextReader<E>& base) const {
    return tile_at(reader, scoring.first_visible(context_len - 1), context_len, base);
  }
};

template <class T, class E, int G>
void decode_group(const DecodeItem<E>& item, const Heads& q, const Heads& out, int64_t head, int64_t head_dim,
                  const Scoring& scoring, const Tile& after) {
  DecodeGroup<E, G> group(item.reader, head_dim, scoring);
  group.template read_queries<T>(q, item.sequence, head);
  group.attend(item.context_len, after);
  group.template finish<T>(out, item.sequence, head);
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
  const int64_t group = q.heads / cache.kv_heads, items = q.tokens * cache.kv_heads;
  parallel_for(items, threads, [&](int64_t number) {
    const DecodeItem<E> item(cache, context, number);
    Tile after{};  // what this thread probably reads next
    if (number + 1 < items) after = DecodeItem<E>(cache, context, number + 1).first_tile(scoring, item.reader);
    for (int64_t g = 0; g < group; g += MAX_GROUP) {
      const auto decode = DECODE_BY_GROUP<T, E>[min(MAX_GROUP, group - g) - 1];
      decode(item, q, out, item.kv_head * group + g, cache.head_dim, scoring, after);
    }
  });
  return OK;
}

template <class T>
int64_t paged_decode(const Heads& q, const Cache& cache, const Context& context, const Scoring& scoring,
                     const Heads& out, int threads) {
#ifdef BASE_OPS  // float32 arithmetic gains nothing here, and is the longest part of this program to compile
  static_assert(sizeof(T) == sizeof(bf16));
  const bool is_bfloat16 = cache.format == CacheFormat::AS_COMPUTED || cache.format == CacheFormat::BFLOAT16;
  if (is_bfloat16 && PairDecodeProducts<1>::takes(cache.head_dim))
    return decode_from<bf16, bf16>(q, cache, context, scoring, out, threads);
  if (cache.format == CacheFormat::INT8 && ByteDecodeProducts<1>::takes(cache.head_dim))
    return decode_from<bf16, int8>(q, cache, context, scoring, out, threads);
  return BASE_OPS.paged_decode(BFLOAT16, q, cache, context, scoring, out, threads);
#else
  return by_format<T>(cache, [&](auto element) {
    return decode_from<T, decltype(element)>(q, cache, context, scoring, out, threads);
  });
#endif
}

}  // namespace
