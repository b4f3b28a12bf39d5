// The keys that decode attention treats between two softmax steps, and where they lie.
#pragma once

#include "paged.h"

namespace {

#ifdef BASE_OPS
constexpr int DECODE_TILE = 64;  // products so fast that the next tile's memory wants a head start
#else
constexpr int DECODE_TILE = 32;
#endif
static_assert(DECODE_TILE % LANES == 0, "scores are whole vectors");

struct Tile {
  Place places[DECODE_TILE];  // past `count` the last one again, so that keys may be read a whole vector at a time
  int64_t count = 0;
};

// Keys `begin` and after of a context of `length`, as far as they go; its rows, and scales, seen from `base`, which is
// another head's or sequence's reader of the same cache.
template <class E>
Tile tile_at(const ContextReader<E>& context, int64_t begin, int64_t length, const ContextReader<E>& base) {
  Tile tile;
  tile.count = max(0, min(DECODE_TILE, length - begin));
  const int64_t rows = context.k - base.k, scales = context.k_scales - base.k_scales;
  Place last = {};
  context.for_places(begin, tile.count, [&](int64_t i, Place place) {
    tile.places[i] = last = {place.row + rows, place.scale + scales};
  });
  for (int64_t i = tile.count; i < DECODE_TILE; i++) tile.places[i] = last;
  return tile;
}

// Blocks lie far apart, where the processor's own prefetching does not follow: while one tile is used, the rows of the
// next are fetched, to the second-level cache, which has far more misses under way at a time than the first.
template <class E>
inline void prefetch_columns(const E* row, int64_t begin, int64_t end) {
  constexpr int64_t PER_LINE = 64 / sizeof(E);
  for (int64_t d = begin; d < end; d += PER_LINE) __builtin_prefetch(row + d, 0, 2);
}

}  // namespace
