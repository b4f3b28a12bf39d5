// Prefill attention: a tile of query tokens, with all query heads of one kv head, against tiles of keys. The tiles are
// widened to float32 once, K transposed, so that both products are small matrix products without horizontal sums.
#pragma once

#include "matmul.h"
#include "paged.h"
#include "parallel.h"
#include "soft_cap.h"
#include "softmax.h"

namespace {

constexpr int MAX_ROWS = 96;      // query token x query head rows of a tile, which share the reading of its keys
constexpr int PREFILL_TILE = 64;  // keys of a tile
constexpr int MAX_PADDED_DIM = MAX_HEAD_DIM + MATMUL_COLUMNS;
static_assert(PREFILL_TILE % MATMUL_COLUMNS == 0, "score tiles have no remainder");
static_assert(MAX_ROWS % MATMUL_ROWS == 0, "full tiles of rows have no remainder");

// Query tokens [first, first + count) of one sequence, at positions `position` and after, with `group` heads from `head`.
struct QueryTile {
  int64_t first, count, position, head, group;

  int64_t rows() const { return count * group; }
  int64_t token(int64_t r) const { return first + r / group; }
  int64_t query_head(int64_t r) const { return head + r % group; }
  int64_t row_position(int64_t r) const { return position + r / group; }
};

// Keys [begin, begin + count) of a context, none of them at or past `end`, and where they lie.
struct KeyTile {
  int64_t begin, count;
  Place places[PREFILL_TILE];

  template <class E>
  KeyTile(const ContextReader<E>& context, int64_t first, int64_t end)
      : begin(first), count(max(0, min(PREFILL_TILE, end - first))) {
    context.for_places(begin, count, [&](int64_t i, Place place) { places[i] = place; });
  }

  template <class E>
  void fetch(const ContextReader<E>& context, int64_t head_dim, int64_t first, int64_t last) const {
    constexpr int64_t PER_LINE = 64 / sizeof(E);
    for (int64_t i = first; i < min(last, count); i++)
      for (int64_t d = 0; d < head_dim; d += PER_LINE) {
        __builtin_prefetch(context.k + places[i].row + d);
        __builtin_prefetch(context.v + places[i].row + d);
      }
  }
};

// E: what the cache stores.
template <class E>
struct PrefillTile {
  ContextReader<E> context;
  QueryTile tile;
  int64_t head_dim, padded_dim;
  Scoring scoring;
  RunningSoftmax softmax[MAX_ROWS];
  alignas(64) float q[MAX_ROWS * MAX_PADDED_DIM];        // [rows, padded_dim], scaled
  alignas(64) float acc[MAX_ROWS * MAX_PADDED_DIM];      // [rows, padded_dim]
  alignas(64) float scores[MAX_ROWS * PREFILL_TILE];     // [rows, PREFILL_TILE]
  alignas(64) float k[MAX_PADDED_DIM * PREFILL_TILE];    // [head_dim, PREFILL_TILE]: transposed
  alignas(64) float v[PREFILL_TILE * MAX_PADDED_DIM];    // [PREFILL_TILE, padded_dim]

  PrefillTile(const ContextReader<E>& reader, const QueryTile& queries, int64_t dim, const Scoring& how)
      : context(reader), tile(queries), head_dim(dim), padded_dim(round_up(dim, MATMUL_COLUMNS)), scoring(how) {
    __builtin_memset(acc, 0, tile.rows() * padded_dim * sizeof(float));
  }

  template <class T>
  void read_queries(const Heads& all) {
    for (int64_t r = 0; r < tile.rows(); r++) {
      const T* from = row<T>(all, tile.token(r), tile.query_head(r));
      widen(q + r * padded_dim, from, scoring.scale);
    }
  }

  // to[0 .. padded_dim) = from[0 .. head_dim) * factor, then zeros.
  template <class T>
  void widen(float* to, const T* from, float factor) const {
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store(to + d, load(from + d) * factor);
    for (; d < padded_dim; d += LANES) store(to + d, load_first(from + d, max(0, head_dim - d)) * factor);
  }

  void load_keys(const KeyTile& keys) {
    for (int64_t i = 0; i < keys.count; i++)
      widen(v + i * padded_dim, context.v + keys.places[i].row, scale_of(context.v_scales, keys.places[i]));
    for (int64_t i = 0; i < keys.count; i += LANES)
      transpose_keys(keys.places + i, min(LANES, keys.count - i), k + i);
  }

  // Up to LANES keys as columns of `to`, which has room for whole vectors both ways; the last one fills what is left.
  void transpose_keys(const Place* places, int64_t count, float* to) const {
    for (int64_t d = 0; d < head_dim; d += LANES) {
      const int64_t n = min(LANES, head_dim - d);
      Vec rows[LANES];
      for (int i = 0; i < LANES; i++) {
        const Place place = places[min(i, count - 1)];
        rows[i] = load_some(context.k + place.row + d, n) * scale_of(context.k_scales, place);
      }
      transpose(rows);
      for (int i = 0; i < LANES; i++) store(to + (d + i) * PREFILL_TILE, rows[i]);
    }
  }

  static float scale_of([[maybe_unused]] const float* scales, [[maybe_unused]] Place place) {
    if constexpr (QUANTISED<E>)
      return scales[place.scale];
    else
      return 1.f;
  }

  // A few rows at a time go no further than the last of them sees. Blocks lie far apart, where the processor's own
  // prefetching does not follow: the next tile is fetched meanwhile.
  void attend_tile(const KeyTile& keys, const KeyTile& next) {
    load_keys(keys);
    const int64_t fetched_at_once = ceil_div(next.count, ceil_div(tile.rows(), MATMUL_ROWS));
    for (int64_t r = 0, fetched = 0; r < tile.rows(); r += MATMUL_ROWS, fetched += fetched_at_once) {
      next.fetch(context, head_dim, fetched, fetched + fetched_at_once);
      weigh(r, min(r + MATMUL_ROWS, tile.rows()), keys.begin, keys.count);
    }
    for (int64_t r = 0; r < tile.rows(); r += MATMUL_ROWS) {
      const int64_t end = min(r + MATMUL_ROWS, tile.rows());
      multiply(scores + r * PREFILL_TILE, PREFILL_TILE, v, padded_dim, acc + r * padded_dim, padded_dim, end - r,
               padded_dim, num_seen(end - 1, keys.begin, keys.count), true);
    }
  }

  // Of keys [begin, begin + count), those up to row r's own.
  int64_t num_seen(int64_t r, int64_t begin, int64_t count) const {
    return max(0, min(count, tile.row_position(r) + 1 - begin));
  }

  // Scores and then weights of rows [first, end). Past a row's keys they are 0, as far as the last row's go.
  void weigh(int64_t first, int64_t end, int64_t begin, int64_t count) {
    const int64_t most = num_seen(end - 1, begin, count);
    multiply(q + first * padded_dim, padded_dim, k, PREFILL_TILE, scores + first * PREFILL_TILE, PREFILL_TILE,
             end - first, round_up(most, MATMUL_COLUMNS), head_dim, false);
    for (int64_t r = first; r < end; r++) {
      float* row_scores = scores + r * PREFILL_TILE;
      const int64_t seen = num_seen(r, begin, count);
      cap_scores(row_scores, seen, scoring.soft_cap);
      hide(row_scores, min(seen, scoring.first_visible(tile.row_position(r)) - begin));
      const float factor = softmax[r].update(row_scores, seen);
      for (int64_t i = round_up(seen, LANES); i < most; i++) row_scores[i] = 0.f;
      float* row_acc = acc + r * padded_dim;
      if (factor != 1.f)
        for (int64_t d = 0; d < padded_dim; d += LANES) store(row_acc + d, load(row_acc + d) * factor);
    }
  }

  // The scores of keys before a row's window.
  static void hide(float* scores, int64_t count) {
    for (int64_t i = 0; i < count; i++) scores[i] = -__builtin_inff();
  }

  __attribute__((noinline)) void attend() {  // one copy, whatever T
    const int64_t end = tile.row_position(tile.rows() - 1) + 1;
    KeyTile keys(context, scoring.first_visible(tile.position), end);
    while (keys.count > 0) {
      const KeyTile next(context, keys.begin + PREFILL_TILE, end);
      attend_tile(keys, next);
      keys = next;
    }
  }

  template <class T>
  void finish(const Heads& out) const {
    for (int64_t r = 0; r < tile.rows(); r++) {
      T* to = row<T>(out, tile.token(r), tile.query_head(r));
      store_scaled(to, acc + r * padded_dim, softmax[r].inverse(), head_dim);
    }
  }
};

// How a batch of sequences is cut: tiles of query tokens x kv heads (x groups of at most MAX_ROWS query heads).
struct PrefillPlan {
  const Context& context;
  const int32_t* cu_seqlens;
  int64_t kv_heads, group;
  int64_t heads_at_once, passes, tokens_per_tile;

  PrefillPlan(const Context& c, const int32_t* cu, int64_t heads, int64_t num_kv_heads)
      : context(c), cu_seqlens(cu), kv_heads(num_kv_heads), group(heads / num_kv_heads) {
    heads_at_once = min(group, MAX_ROWS);
    passes = ceil_div(group, heads_at_once);
    // So that every row sees a key of the first tile, whatever its window.
    tokens_per_tile = min(MAX_ROWS / heads_at_once, PREFILL_TILE);
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
  const PrefillPlan plan(context, cu_seqlens, q.heads, cache.kv_heads);
  int64_t bad = first_bad_sequence(cache, context);
  if (bad == OK) bad = plan.first_bad(q.tokens);
  if (bad != OK) return bad;
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
