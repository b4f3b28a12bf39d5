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

// Rows of T, `stride` elements from one to the next.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  T* operator[](int64_t r) const { return data + r * stride; }
};

// to = activation(gate) * up, in `rows` rows of `columns`.
template <class T>
using Gate = void (*)(Rows<const T> gate, Rows<const T> up, Rows<T> to, int64_t rows, int64_t columns);

template <class T, Vec ACTIVATION(Vec)>
inline void multiply_by_gate(Rows<const T> gate, Rows<const T> up, Rows<T> to, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++)
    for_vectors(columns, [&](int64_t i, int64_t n) {
      store_some(to[r] + i, ACTIVATION(load_some(gate[r] + i, n)) * load_some(up[r] + i, n), n);
    });
}

template <class T>
inline Gate<T> gate_of(Activation activation) {
  return activation == GELU_TANH ? multiply_by_gate<T, gelu> : multiply_by_gate<T, silu>;
}

// gate_up: rows of the gate's `columns`, then as many of up.
template <class T>
int64_t gate_rows(const void* gate_up, int64_t row_stride, Activation activation, void* out, int64_t rows,
                  int64_t columns, int threads) {
  const Rows<const T> gate{static_cast<const T*>(gate_up), row_stride};
  const Rows<T> to{static_cast<T*>(out), columns};
  parallel_rows(rows, 2 * columns, threads, [&](int64_t begin, int64_t end) {
    const Rows<const T> from{gate[begin], row_stride};
    gate_of<T>(activation)(from, {from.data + columns, row_stride}, {to[begin], columns}, end - begin, columns);
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
