// What prefill attention multiplies at once: a tile of query tokens and a tile of keys.
#pragma once

#include "paged.h"

namespace {

#ifdef __AVX512BF16__
constexpr int MAX_ROWS = 192;  // query token x query head rows of a tile, which share the packing of its keys
#else
constexpr int MAX_ROWS = 96;  // which share the reading of its keys
#endif
constexpr int PREFILL_TILE = 64;  // keys of a tile

// Query tokens [first, first + count) of one sequence, at positions `position` and after, with `group` heads from
// `head`.
struct QueryTile {
  int64_t first, count, position, head, group;

  int64_t rows() const { return count * group; }
  int64_t end_position() const { return position + count; }

  // body(r, token, head) for each row.
  template <class Body>
  void for_rows(const Body& body) const {
    for (int64_t t = 0, r = 0; t < count; t++)
      for (int64_t h = 0; h < group; h++, r++) body(r, first + t, head + h);
  }
};

// Keys [begin, begin + count) of a context, none of them at or past `end`, and where they lie. `begin` is a multiple of
// PREFILL_TILE, so that a row's sums do not depend on where its chunk begins. Keys before `visible` are not read.
struct KeyTile {
  int64_t begin, count, hidden;
  Place places[PREFILL_TILE];  // from `hidden` on

  template <class E>
  KeyTile(const ContextReader<E>& context, int64_t first, int64_t visible, int64_t end)
      : begin(first), count(max(0, min(PREFILL_TILE, end - first))), hidden(max(0, min(count, visible - first))) {
    context.for_places(begin + hidden, count - hidden, [&](int64_t i, Place place) { places[hidden + i] = place; });
  }

  bool has(int64_t i) const { return i >= hidden && i < count; }

  template <class E>
  void fetch(const ContextReader<E>& context, int64_t head_dim, int64_t first, int64_t last) const {
    constexpr int64_t PER_LINE = 64 / sizeof(E);
    for (int64_t i = max(first, hidden); i < min(last, count); i++)
      for (int64_t d = 0; d < head_dim; d += PER_LINE) {
        __builtin_prefetch(context.k + places[i].row + d);
        __builtin_prefetch(context.v + places[i].row + d);
      }
  }
};

template <class E>
inline float scale_of([[maybe_unused]] const float* scales, [[maybe_unused]] Place place) {
  if constexpr (QUANTISED<E>)
    return scales[place.scale];
  else
    return 1.f;
}

}  // namespace
