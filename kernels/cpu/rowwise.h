// The operations that treat each token alone: KV write, RMSNorm, RoPE.
#pragma once

#include "paged.h"
#include "parallel.h"

namespace {

// Stores a row [head_dim] in its place. Of equal sizes, T and E are one type.
template <class T, class E>
inline void write_row(const T* row, E* rows, [[maybe_unused]] float* scales, Place to, int64_t head_dim) {
  if constexpr (QUANTISED<E>)
    scales[to.scale] = quantise_row(row, rows + to.row, head_dim);
  else if constexpr (sizeof(T) == sizeof(E))
    __builtin_memcpy(rows + to.row, row, head_dim * sizeof(T));
  else
    for_vectors(head_dim, [&](int64_t i, int64_t n) { store_some(rows + to.row + i, load_some(row + i, n), n); });
}

template <class T, class E>
int64_t write_slots(const Heads& k, const Heads& v, const Cache& cache, const int64_t* slots, int threads) {
  for (int64_t t = 0; t < k.tokens; t++)
    if (slots[t] >= cache.num_blocks * cache.block_size) return t;
  parallel_rows(k.tokens, k.heads * cache.head_dim, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      if (slots[t] < 0) continue;
      const int64_t block = slots[t] / cache.block_size, offset = slots[t] % cache.block_size;
      for (int64_t h = 0; h < k.heads; h++) {
        const Place to{block * cache.block_stride + h * cache.head_stride + offset * cache.slot_stride,
                       block * cache.scale_block_stride + h * cache.scale_head_stride + offset};
        write_row(row<T>(k, t, h), static_cast<E*>(cache.k), cache.k_scales, to, cache.head_dim);
        write_row(row<T>(v, t, h), static_cast<E*>(cache.v), cache.v_scales, to, cache.head_dim);
      }
    }
  });
  return OK;
}

template <class T>
int64_t kv_write(const Heads& k, const Heads& v, const Cache& cache, const int64_t* slots, int threads) {
  return by_format<T>(cache, [&](auto element) {
    return write_slots<T, decltype(element)>(k, v, cache, slots, threads);
  });
}

// to = x + residual, rounded to T.
template <class T>
inline void add_row(const T* x, const T* residual, T* to, int64_t columns) {
  for_vectors(columns, [&](int64_t i, int64_t n) {
    store_some(to + i, load_some(x + i, n) + load_some(residual + i, n), n);
  });
}

template <class T>
inline void normalise_row(const T* x, const T* weight, float eps, T* out, int64_t columns) {
  Vec squares = {};
  for_vectors(columns, [&](int64_t i, int64_t n) {
    const Vec v = load_some(x + i, n);
    squares += v * v;
  });
  const float factor = 1.f / __builtin_sqrtf(sum(squares) / columns + eps);
  for_vectors(columns, [&](int64_t i, int64_t n) {
    store_some(out + i, load_some(x + i, n) * factor * load_some(weight + i, n), n);
  });
}

template <class T>
int64_t rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride, const void* weight,
                 float eps, void* out, void* new_residual, int64_t rows, int64_t columns, int threads) {
  parallel_rows(rows, columns, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* from = static_cast<const T*>(x) + r * x_stride;
      if (residual != nullptr) {
        T* to = static_cast<T*>(new_residual) + r * columns;
        add_row(from, static_cast<const T*>(residual) + r * residual_stride, to, columns);
        from = to;
      }
      normalise_row(from, static_cast<const T*>(weight), eps, static_cast<T*>(out) + r * columns, columns);
    }
  });
  return OK;
}

template <class T>
inline void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  for_vectors(half, [&](int64_t i, int64_t n) {
    const Vec first = load_some(head + i, n), second = load_some(head + half + i, n);
    const Vec c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(head + i, first * c - second * s, n);
    store_some(head + half + i, second * c + first * s, n);
  });
}

// cos, sin: [num_positions, pairs]. A head's dimensions after its first 2 * pairs stay as they are.
template <class T>
int64_t rope(const Heads& q, const Heads& k, int64_t pairs, const int64_t* positions, const float* cos,
             const float* sin, int64_t num_positions, int threads) {
  for (int64_t t = 0; t < q.tokens; t++)
    if (positions[t] < 0 || positions[t] >= num_positions) return t;
  parallel_rows(q.tokens, (q.heads + k.heads) * 2 * pairs, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float *c = cos + positions[t] * pairs, *s = sin + positions[t] * pairs;
      for (int64_t h = 0; h < q.heads; h++) rotate(row<T>(q, t, h), c, s, pairs);
      for (int64_t h = 0; h < k.heads; h++) rotate(row<T>(k, t, h), c, s, pairs);
    }
  });
  return OK;
}

}  // namespace
