// Linear layers, x W^T + bias, by what the weights are.
#pragma once

#include "linear_amx.h"
#include "linear_bf16.h"
#include "linear_panels.h"
#include "linear_quantized.h"
#include "ops.h"

namespace {

// What multiplies x of X by weights of W.
template <class X, class W>
struct BlockOf {
  using Block = PanelBlock<X, W>;
};
template <class X>
struct BlockOf<X, Int8> {
  using Block = QuantizedBlock<X, Int8>;
};
template <class X>
struct BlockOf<X, Int4> {
  using Block = QuantizedBlock<X, Int4>;
};
#if defined(HAVE_AMX)
template <>
struct BlockOf<bf16, bf16> {
  using Block = AmxBlock;
};
#elif defined(__AVX512BF16__)
template <>
struct BlockOf<bf16, bf16> {
  using Block = PairsBlock;
};
#endif

template <class X>
int64_t linear(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias, void* out,
               int threads) {
  const auto run = weights.dtype == INT4       ? multiply_panels<X, typename BlockOf<X, Int4>::Block>
                   : weights.dtype == INT8     ? multiply_panels<X, typename BlockOf<X, Int8>::Block>
                   : weights.dtype == BFLOAT16 ? multiply_panels<X, typename BlockOf<X, bf16>::Block>
                                               : multiply_panels<X, typename BlockOf<X, float>::Block>;
  run(x, x_stride, rows, weights, bias, out, threads);
  return OK;
}

// out = activation(gate) * up, which are the halves of x W^T + bias, made in `wide` where they cannot be made together.
template <class X>
void gated_linear(const void* x, int64_t x_stride, int64_t rows, const Weights& weights, const void* bias,
                  Activation activation, void* wide, void* out, int threads) {
  if (is_gate_and_up(weights)) {
    const auto run = weights.dtype == INT4       ? multiply_gated<X, typename BlockOf<X, Int4>::Block>
                     : weights.dtype == INT8     ? multiply_gated<X, typename BlockOf<X, Int8>::Block>
                     : weights.dtype == BFLOAT16 ? multiply_gated<X, typename BlockOf<X, bf16>::Block>
                                                 : multiply_gated<X, typename BlockOf<X, float>::Block>;
    return run(x, x_stride, rows, weights, bias, activation, out, threads);
  }
  int64_t columns = 0;
  for (int64_t i = 0; i < weights.count; i++) columns += weights.matrices[i].rows;
  linear<X>(x, x_stride, rows, weights, bias, wide, threads);
  gate_rows<X>(wide, columns, activation, out, rows, columns / 2, threads);
}

}  // namespace
