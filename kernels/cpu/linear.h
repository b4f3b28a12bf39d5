// Linear layers: x W^T + bias, W row-major as checkpoints store it, bfloat16 widened in registers on the way.
//
// Lanes run along the depth, for every number of rows of x: lane i adds up columns of its own, one after the other, and
// the lanes are added in a tree at the end. So W needs no transposing and no repacking, and a row's result depends on
// neither the rows beside it nor the thread. x is packed instead: it is small, and each item of work reuses its own.
#pragma once

#include "linear_amx.h"
#include "linear_bf16.h"
#include "linear_quantized.h"
#include "ops.h"
#include "parallel.h"
#include "vec.h"

namespace {

constexpr int STEP = 2 * LANES;     // columns of one step: 32 bits of bfloat16 in each lane
constexpr int TILE = 3;             // most rows of x whose sums share the registers
constexpr int WEIGHT_BLOCK = 24;    // rows of W that stay in the nearer caches while tile after tile passes
constexpr int X_BLOCK = 16 * TILE;  // most rows of x that one item packs
constexpr int64_t MAX_DEPTH = 32768;             // library.py sends larger ones to the reference
constexpr int64_t PACKED_FLOATS = 1 << 16;       // an item's x, for half of a small second-level cache
constexpr int64_t MAX_DEPTH_BLOCK = 800;         // columns of one pass: a tile's x takes a third of a first-level cache
constexpr int ITEMS_PER_THREAD = 16;

// Rows of W that one tile multiplies at once. The sums, the rows and one vector of x have to fit the registers, and the
// sums have to be enough to hide the latency of a multiply-add.
constexpr int group_of(int tile) {
  constexpr int GROUPS[TILE] = {4, 4, 3};
  return LANES == 16 && tile > 1 ? 2 * GROUPS[tile - 1] : GROUPS[tile - 1];
}

inline VecUint load_pairs(const bf16* p) {
  VecUint pairs;
  __builtin_memcpy(&pairs, p, sizeof pairs);
  return pairs;
}

// A step's two vectors. Of bfloat16: the even columns, then the odd ones, so that no lane has to move.
inline Vec load_half(const bf16* p, bool second) {
  return second ? (Vec)(load_pairs(p) & 0xffff0000) : (Vec)(load_pairs(p) << 16);
}
inline Vec load_half(const float* p, bool second) { return load(p + (second ? LANES : 0)); }

// Up to STEP columns of x, zeros after them, in the order of load_half(const W*, ...).
template <class W, class X>
inline void pack_step(const X* from, int64_t columns, float* first, float* second) {
  constexpr bool IN_PAIRS = sizeof(W) == sizeof(bf16);
  Vec low, high = {};
  if (columns >= STEP) {
    low = load(from);
    high = load(from + LANES);
  } else {
    low = load_first(from, min(LANES, columns));
    if (columns > LANES) high = load_first(from + LANES, columns - LANES);
  }
  store(first, IN_PAIRS ? pick(low, high, [](int i) { return 2 * i; }) : low);
  store(second, IN_PAIRS ? pick(low, high, [](int i) { return 2 * i + 1; }) : high);
}

// The part of W that will be wanted next, fetched line by line in the order in which it lies in memory: the processor's
// own prefetching does not follow several rows at once.
struct Ahead {
  const char* next;
  int64_t slowdown;  // passes over the present rows, each of which fetches its share

  template <int BYTES>  // that a step reads
  void advance() {
    constexpr int LINE = 64;
    for (int i = 0; i < BYTES || i == 0; i += LINE) __builtin_prefetch(next + i);
    next += BYTES / slowdown;
  }
};

// sums[c * WEIGHT_BLOCK + r] = lanes of x row c times W row r, for C rows of x and R of W; `add` to what was there.
template <class W, int C, int R>
inline void multiply_group(const float* x, const W* w, int64_t stride, int64_t steps, bool add, Ahead& ahead,
                           Vec* sums) {
  Vec acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = add ? sums[c * WEIGHT_BLOCK + r] : Vec{};
  for (int64_t s = 0; s < steps; s++) {
    ahead.advance<R * STEP * sizeof(W)>();
    for (int half = 0; half < 2; half++) {
      Vec row[R];
      for (int r = 0; r < R; r++) {
        row[r] = load_half(w + r * stride, half != 0);
        KEEP_IN_REGISTER(row[r]);  // else each use loads it again, and loads are the bottleneck
      }
      for (int c = 0; c < C; c++) {
        Vec column = load(x + c * LANES);
        KEEP_IN_REGISTER(column);
        for (int r = 0; r < R; r++) acc[r][c] += row[r] * column;
      }
      x += C * LANES;
    }
    w += STEP;
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[c * WEIGHT_BLOCK + r] = acc[r][c];
}

// One group over `columns` columns; those past the last whole step go through zero-padded copies.
template <class W, int C, int R>
inline void multiply_columns(const float* x, const W* w, int64_t stride, int64_t columns, bool add, Ahead& ahead,
                             Vec* sums) {
  const int64_t steps = columns / STEP, rest = columns % STEP;
  multiply_group<W, C, R>(x, w, stride, steps, add, ahead, sums);
  if (rest == 0) return;
  W padded[R][STEP] = {};
  for (int r = 0; r < R; r++) __builtin_memcpy(padded[r], w + r * stride + steps * STEP, rest * sizeof(W));
  multiply_group<W, C, R>(x + steps * STEP * C, padded[0], STEP, 1, add || steps > 0, ahead, sums);
}

// A tile of C rows of x against `rows` rows of W.
template <class W, int C>
void multiply_tile(const float* x, const W* w, int64_t stride, int64_t rows, int64_t columns, bool add, Ahead ahead,
                   Vec* sums) {
  constexpr int R = group_of(C);
  int64_t r = 0;
  for (; r + R <= rows; r += R)
    multiply_columns<W, C, R>(x, w + r * stride, stride, columns, add, ahead, sums + r);
  for (; r < rows; r++) multiply_columns<W, C, 1>(x, w + r * stride, stride, columns, add, ahead, sums + r);
}

template <class W>
constexpr decltype(&multiply_tile<W, 1>) MULTIPLY_BY_WIDTH[TILE] = {
    multiply_tile<W, 1>, multiply_tile<W, 2>, multiply_tile<W, 3>};

// Up to X_BLOCK rows of x, packed, against any rows of W.
template <class X, class W>
struct LinearBlock {
  static constexpr int64_t WEIGHT_ROWS = WEIGHT_BLOCK;
  int64_t index = -1;  // which rows of x are packed
  int64_t rows, depth, padded_depth, tiles;
  alignas(64) Vec sums[X_BLOCK * WEIGHT_BLOCK + LANES];  // a row is read in whole vectors
  alignas(64) float packed[TILE * MAX_DEPTH];  // tile after tile: [steps, 2, rows of the tile, LANES]

  LinearBlock() {}  // leaves its memory as it is

  void pack(int64_t which, const X* x, int64_t stride, int64_t count, int64_t columns) {
    index = which, rows = count, depth = columns, padded_depth = round_up(columns, STEP), tiles = ceil_div(count, TILE);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t first = tile_begin(t), width = tile_begin(t + 1) - first;
      for (int64_t c = 0; c < width; c++)
        for (int64_t k = 0; k < depth; k += STEP) {
          float* to = packed + first * padded_depth + k * width + c * LANES;
          pack_step<W>(x + (first + c) * stride + k, depth - k, to, to + width * LANES);
        }
    }
  }

  // Most rows that fit `packed` and still leave room in a cache.
  static int64_t max_rows(int64_t depth) {
    return max(TILE, min(X_BLOCK, PACKED_FLOATS / round_up(depth, STEP) / TILE * TILE));
  }

  int64_t tile_begin(int64_t t) const { return rows * t / tiles; }

  // out[i, j] = x row i times W row j, for at most WEIGHT_BLOCK rows of W; as many are wanted next.
  void multiply(const W* w, int64_t stride, int64_t weight_rows, const X* bias, X* out, int64_t out_stride) {
    const int64_t depth_block = round_up(ceil_div(depth, ceil_div(depth, MAX_DEPTH_BLOCK)), STEP);
    const int64_t passes = ceil_div(depth, depth_block) * tiles, bytes = weight_rows * stride * sizeof(W);
    const char* next = reinterpret_cast<const char*>(w) + bytes;
    int64_t pass = 0;
    for (int64_t k = 0; k < depth; k += depth_block)
      for (int64_t t = 0; t < tiles; t++, pass++) {
        const int64_t first = tile_begin(t), width = tile_begin(t + 1) - first;
        MULTIPLY_BY_WIDTH<W>[width - 1](packed + first * padded_depth + k * width, w + k, stride, weight_rows,
                                        min(depth_block, depth - k), k > 0, Ahead{next + bytes * pass / passes, tiles},
                                        sums + first * WEIGHT_BLOCK);
      }
    for (int64_t i = 0; i < rows; i++) finish_row(sums + i * WEIGHT_BLOCK, weight_rows, bias, out + i * out_stride);
  }

  static void finish_row(const Vec* lanes, int64_t columns, const X* bias, X* out) {
    for (int64_t j = 0; j < columns; j += LANES) {
      const int64_t n = min(LANES, columns - j);
      Vec totals = sums_of(lanes + j);
      if (bias != nullptr) totals += load_some(bias + j, n);
      store_some(out + j, totals, n);
    }
  }

  // All rows of one weight matrix that fall into output columns [begin, end); its own columns start at `offset`.
  void multiply_matrix(const Matrix& matrix, int64_t offset, int64_t begin, int64_t end, const X* bias, X* out,
                       int64_t out_stride) {
    const int64_t last = min(end, offset + matrix.rows);
    for (int64_t n = max(begin, offset); n < last; n += WEIGHT_BLOCK)
      multiply(static_cast<const W*>(matrix.data) + (n - offset) * matrix.row_stride, matrix.row_stride,
               min(WEIGHT_BLOCK, last - n), bias == nullptr ? nullptr : bias + n, out + n, out_stride);
  }
};

template <class X, class Block>
void multiply_all(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias, void* out,
                  int threads) {
  int64_t columns = 0;
  for (int64_t i = 0; i < weights.count; i++) columns += weights.matrices[i].rows;
  const int64_t most_rows = Block::max_rows(weights.depth), blocks = ceil_div(rows, most_rows);
  if (blocks == 0 || columns == 0) return;
  const int64_t even_share = ceil_div(columns * blocks, threads * ITEMS_PER_THREAD);
  const int64_t chunk = round_up(min(columns, even_share), Block::WEIGHT_ROWS), chunks = ceil_div(columns, chunk);
  // One block of x after the other, so that a thread packs each but once.
  parallel_for_with<Block>(chunks * blocks, threads, [&](auto& block, int64_t item) {
    const int64_t b = item / chunks, begin = item % chunks * chunk, end = min(columns, begin + chunk);
    const int64_t first = b * most_rows;
    if (block.index != b)
      block.pack(b, static_cast<const X*>(x) + first * x_stride, x_stride, min(most_rows, rows - first), weights.depth);
    int64_t offset = 0;
    for (int64_t i = 0; i < weights.count; offset += weights.matrices[i++].rows)
      block.multiply_matrix(weights.matrices[i], offset, begin, end, static_cast<const X*>(bias),
                            static_cast<X*>(out) + first * columns, columns);
  });
}

// What multiplies x of type X by W.
template <class X, class W>
struct BlockOf {
  using Type = LinearBlock<X, W>;
};
#ifdef HAVE_AMX
static_assert(AmxBlock::MAX_PACKED >= TILE_ROWS * MAX_DEPTH);
template <>
struct BlockOf<bf16, bf16> {
  using Type = AmxBlock;
};
#elif defined(__AVX512BF16__)
template <>
struct BlockOf<bf16, bf16> {
  using Type = PairsBlock;
};
#endif

template <class X>
int64_t linear(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias, void* out,
                  int threads) {
  const auto run = weights.dtype == INT4       ? multiply_quantized<X, Int4>
                   : weights.dtype == INT8     ? multiply_quantized<X, Int8>
                   : weights.dtype == BFLOAT16 ? multiply_all<X, typename BlockOf<X, bf16>::Type>
                                               : multiply_all<X, typename BlockOf<X, float>::Type>;
  run(x, x_stride, rows, weights, bias, out, threads);
  return OK;
}

}  // namespace
