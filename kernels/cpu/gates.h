// The gates of SwiGLU and GeGLU: activation(gate) * up.
#pragma once

#include "ops.h"
#include "parallel.h"
#include "vec.h"

namespace {

// x / (1 + e^-z): 0 where the exponential would overflow.
inline Vec gated(Vec x, Vec z) {
  constexpr float SMALLEST = -87.f;
  return z < SMALLEST ? Vec{} : x / (1.f + exp2(z * -LOG2_E));
}

inline Vec silu(Vec x) { return gated(x, x); }

// The tanh approximation: x (1 + tanh u) / 2 = x / (1 + e^-2u).
inline Vec gelu(Vec x) {
  constexpr float SQRT_8_OVER_PI = 1.59576912f;
  return gated(x, (x * x * x * 0.044715f + x) * SQRT_8_OVER_PI);
}

// to = activation(gate) * up, of `columns` each.
template <class T>
using GateRow = void (*)(const T* gate, const T* up, T* to, int64_t columns);

template <class T, Vec ACTIVATION(Vec)>
inline void gate_row(const T* gate, const T* up, T* to, int64_t columns) {
  for_vectors(columns, [&](int64_t i, int64_t n) {
    store_some(to + i, ACTIVATION(load_some(gate + i, n)) * load_some(up + i, n), n);
  });
}

template <class T>
inline GateRow<T> gate_row_of(Activation activation) {
  return activation == GELU_TANH ? gate_row<T, gelu> : gate_row<T, silu>;
}

// gate_up: rows of the gate's `columns`, then as many of up.
template <class T>
int64_t gate_rows(const void* gate_up, int64_t row_stride, Activation activation, void* out, int64_t rows,
                  int64_t columns, int threads) {
  const GateRow<T> gate_one = gate_row_of<T>(activation);
  parallel_rows(rows, 2 * columns, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* gate = static_cast<const T*>(gate_up) + r * row_stride;
      gate_one(gate, gate + columns, static_cast<T*>(out) + r * columns, columns);
    }
  });
  return OK;
}

template <class T>
int64_t silu_mul(const void* gate_up, int64_t row_stride, void* out, int64_t rows, int64_t columns, int threads) {
  return gate_rows<T>(gate_up, row_stride, SILU, out, rows, columns, threads);
}

template <class T>
int64_t gelu_mul(const void* gate_up, int64_t row_stride, void* out, int64_t rows, int64_t columns, int threads) {
  return gate_rows<T>(gate_up, row_stride, GELU_TANH, out, rows, columns, threads);
}

}  // namespace
