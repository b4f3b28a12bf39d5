// Prefill attention: a tile of query tokens, with all query heads of one kv head, against tiles of keys at fixed places
// of the context, by an online softmax.
#pragma once

#include "parallel.h"
#include "prefill_amx.h"
#include "prefill_pairs.h"
#include "prefill_tiles.h"
#include "prefill_vectors.h"
#include "soft_cap.h"
#include "softmax.h"

namespace {

#ifdef HAVE_AMX
template <class E>
using PrefillProducts = AmxProducts<E>;
#elif defined(__AVX512BF16__)
template <class E>
using PrefillProducts = PairProducts<E>;
#else
template <class E>
using PrefillProducts = VectorProducts<E>;
#endif

// E: what the cache stores.
template <class E>
struct PrefillTile {
  ContextReader<E> context;
  QueryTile tile;
  int64_t head_dim;
  Scoring scoring;
  PrefillProducts<E> products;
  RunningSoftmax softmax[MAX_ROWS];
  int64_t positions[MAX_ROWS];  // of the rows' tokens
  static constexpr int ROWS = PrefillProducts<E>::ROWS;

  PrefillTile(const ContextReader<E>& reader, const QueryTile& queries, int64_t dim, const Scoring& how)
      : context(reader), tile(queries), head_dim(dim), scoring(in_powers_of_two(how)),
        products(dim, queries.rows(), scoring.scale) {
    tile.for_rows([&](int64_t r, int64_t token, int64_t) { positions[r] = tile.position + token - tile.first; });
  }

  template <class T>
  void read_queries(const Heads& all) {
    tile.for_rows([&](int64_t r, int64_t token, int64_t head) { products.read_query(r, row<T>(all, token, head)); });
  }

  // A few rows at a time go no further than the last of them sees. Blocks lie far apart, where the processor's own
  // prefetching does not follow: the next tile is fetched meanwhile.
  void attend_tile(const KeyTile& keys, const KeyTile& next) {
    products.load_keys(context, keys);
    const int64_t fetched_at_once = ceil_div(next.count, ceil_div(tile.rows(), ROWS));
    for (int64_t r = 0, fetched = 0; r < tile.rows(); r += ROWS, fetched += fetched_at_once) {
      next.fetch(context, head_dim, fetched, fetched + fetched_at_once);
      const int64_t end = min(r + ROWS, tile.rows());
      weigh(r, end, keys.begin, keys.count);
      products.add_values(r, end, num_seen(end - 1, keys.begin, keys.count));
    }
  }

  // Of keys [begin, begin + count), those up to row r's own.
  int64_t num_seen(int64_t r, int64_t begin, int64_t count) const {
    return max(0, min(count, positions[r] + 1 - begin));
  }

  // Scores and then weights of rows [first, end), 0 where a row sees no key. A tile that it sees nothing of leaves its
  // softmax as it was.
  void weigh(int64_t first, int64_t end, int64_t begin, int64_t count) {
    const int64_t most = num_seen(end - 1, begin, count);
    if (most == 0) return;
    products.score(first, end, most);
    for (int64_t r = first; r < end; r++) {
      float* scores = products.scores(r);
      const int64_t before = scoring.first_visible(positions[r]) - begin;
      int64_t seen = num_seen(r, begin, count);
      if (before >= seen) seen = 0;
      if (seen > 0) {
        cap_scores(scores, seen, scoring.soft_cap);
        for (int64_t i = 0; i < before; i++) scores[i] = -__builtin_inff();
        const auto store_weights = [&](int64_t i, Vec weights) { products.store_weights(r, i, weights); };
        const float factor = softmax[r].update(scores, seen, store_weights);
        if (factor != 1.f) products.rescale(r, factor);
      }
      for (int64_t i = round_up(seen, LANES); i < PREFILL_TILE; i += LANES) products.store_weights(r, i, Vec{});
    }
  }

  __attribute__((noinline)) void attend() {  // one copy, whatever T
    const int64_t visible = scoring.first_visible(tile.position);
    const int64_t end = tile.end_position();
    KeyTile keys(context, visible / PREFILL_TILE * PREFILL_TILE, visible, end);
    while (keys.count > 0) {
      const KeyTile next(context, keys.begin + PREFILL_TILE, visible, end);
      attend_tile(keys, next);
      keys = next;
    }
  }

  template <class T>
  void finish(const Heads& out) {
    tile.for_rows([&](int64_t r, int64_t token, int64_t head) {
      store_scaled(row<T>(out, token, head), products.sums(r), softmax[r].inverse(), head_dim);
    });
  }
};

// How a batch of sequences is cut: tiles of query tokens x kv heads (x groups of at most MAX_ROWS query heads).
struct PrefillPlan {
  static constexpr int64_t FEWEST_ROWS = 48, TILES_PER_THREAD = 4;

  const Context& context;
  const int32_t* cu_seqlens;
  int64_t kv_heads, group;
  int64_t heads_at_once, passes, tokens_per_tile;

  PrefillPlan(const Context& c, const int32_t* cu, int64_t heads, int64_t num_kv_heads)
      : context(c), cu_seqlens(cu), kv_heads(num_kv_heads), group(heads / num_kv_heads) {
    heads_at_once = min(group, MAX_ROWS);
    passes = ceil_div(group, heads_at_once);
    tokens_per_tile = MAX_ROWS / heads_at_once;
  }

  // Smaller tiles where there would not be some for each thread; no row's result depends on those beside it.
  void share_among(int threads) {
    while (tokens_per_tile * heads_at_once > FEWEST_ROWS && items() < TILES_PER_THREAD * threads) tokens_per_tile /= 2;
  }

  int64_t new_tokens(int64_t s) const { return cu_seqlens[s + 1] - cu_seqlens[s]; }
  int64_t items(int64_t s) const { return ceil_div(new_tokens(s), tokens_per_tile) * kv_heads * passes; }

  int64_t items() const {
    int64_t total = 0;
    for (int64_t s = 0; s < context.num_sequences; s++) total += items(s);
    return total;
  }

  // OK, or the first sequence that runs backwards or has more new tokens than context; 0 when all together are not
  // exactly the given tokens.
  int64_t first_bad(int64_t num_tokens) const {
    if (cu_seqlens[0] != 0 || cu_seqlens[context.num_sequences] != num_tokens) return 0;
    for (int64_t s = 0; s < context.num_sequences; s++)
      if (new_tokens(s) < 0 || new_tokens(s) > context.context_lens[s]) return s;
    return OK;
  }

  // Later tiles see more keys: they come first, so that the threads finish together.
  QueryTile tile(int64_t s, int64_t item, int64_t* kv_head) const {
    const int64_t tiles = ceil_div(new_tokens(s), tokens_per_tile);
    const int64_t start = (tiles - 1 - item / (kv_heads * passes)) * tokens_per_tile;
    const int64_t pass = item % passes;
    *kv_head = item / passes % kv_heads;
    return {cu_seqlens[s] + start, min(tokens_per_tile, new_tokens(s) - start),
            context.context_lens[s] - new_tokens(s) + start, *kv_head * group + pass * heads_at_once,
            min(heads_at_once, group - pass * heads_at_once)};
  }
};

template <class T, class E>
int64_t prefill_from(const Heads& q, const Cache& cache, const Context& context, const int32_t* cu_seqlens,
                     const Scoring& scoring, const Heads& out, int threads) {
  PrefillPlan plan(context, cu_seqlens, q.heads, cache.kv_heads);
  int64_t bad = first_bad_sequence(cache, context);
  if (bad == OK) bad = plan.first_bad(q.tokens);
  if (bad != OK) return bad;
  plan.share_among(threads);
  parallel_for(plan.items(), threads, [&](int64_t item) {
    int64_t sequence = 0, kv_head;
    for (; item >= plan.items(sequence); sequence++) item -= plan.items(sequence);
    const QueryTile tile = plan.tile(sequence, item, &kv_head);
    PrefillTile<E> work(ContextReader<E>(cache, context, sequence, kv_head), tile, cache.head_dim, scoring);
    work.template read_queries<T>(q);
    work.attend();
    work.template finish<T>(out);
  });
  return OK;
}

template <class T>
int64_t paged_prefill(const Heads& q, const Cache& cache, const Context& context, const int32_t* cu_seqlens,
                      const Scoring& scoring, const Heads& out, int threads) {
  return by_format<T>(cache, [&](auto element) {
    return prefill_from<T, decltype(element)>(q, cache, context, cu_seqlens, scoring, out, threads);
  });
}

}  // namespace
