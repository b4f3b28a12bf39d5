// Linear layers, x W^T + bias, by what the weights are and how they lie in memory.
#pragma once

#include "linear_amx.h"
#include "linear_bf16.h"
#include "linear_panels.h"
#include "linear_quantized.h"
#include "ops.h"
#include "parallel.h"

namespace {

#ifdef __AVX512BF16__
#ifdef HAVE_AMX
using RowBlock = AmxBlock;
static_assert(AmxBlock::MAX_PACKED >= TILE_ROWS * MAX_DEPTH);
#else
using RowBlock = PairsBlock;
#endif

// Bfloat16 with bfloat16, whose rows lie as checkpoints store them.
void multiply_rows(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias, void* out,
                   int threads) {
  constexpr int ITEMS_PER_THREAD = 16;
  int64_t columns = 0;
  for (int64_t i = 0; i < weights.count; i++) columns += weights.matrices[i].rows;
  const int64_t most_rows = RowBlock::max_rows(weights.depth), blocks = ceil_div(rows, most_rows);
  if (blocks == 0 || columns == 0) return;
  const int64_t even_share = ceil_div(columns * blocks, threads * ITEMS_PER_THREAD);
  const int64_t chunk = round_up(min(columns, even_share), RowBlock::WEIGHT_ROWS), chunks = ceil_div(columns, chunk);
  // One block of x after the other, so that a thread packs each but once.
  parallel_for_with<RowBlock>(chunks * blocks, threads, [&](auto& block, int64_t item) {
    const int64_t b = item / chunks, begin = item % chunks * chunk, end = min(columns, begin + chunk);
    const int64_t first = b * most_rows;
    if (block.index != b)
      block.pack(b, static_cast<const bf16*>(x) + first * x_stride, x_stride, min(most_rows, rows - first),
                 weights.depth);
    int64_t offset = 0;
    for (int64_t i = 0; i < weights.count; offset += weights.matrices[i++].rows)
      block.multiply_matrix(weights.matrices[i], offset, begin, end, static_cast<const bf16*>(bias),
                            static_cast<bf16*>(out) + first * columns, columns);
  });
}
#endif

template <class X>
int64_t linear(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias, void* out,
               int threads) {
  auto run = weights.dtype == INT4       ? multiply_quantized<X, Int4>
             : weights.dtype == INT8     ? multiply_quantized<X, Int8>
             : weights.dtype == BFLOAT16 ? multiply_panels<X, bf16>
                                         : multiply_panels<X, float>;
#ifdef __AVX512BF16__  // whose builds compute bfloat16 alone
  if (weights.dtype == BFLOAT16 && weights.layout == Layout::ROWS) run = multiply_rows;
#endif
  run(x, x_stride, rows, weights, bias, out, threads);
  return OK;
}

}  // namespace
