// Reading tokens of a paged cache through a block table.
#pragma once

#include "ops.h"
#include "vec.h"
namespace {

// Points into one head of one sequence's context.
template <class T>
struct ContextReader {
  const T* k;
  const T* v;
  const int32_t* blocks;
  int64_t block_size, block_stride, slot_stride;

  ContextReader(const Cache& cache, const Context& context, int64_t sequence, int64_t kv_head)
      : k(static_cast<const T*>(cache.k) + kv_head * cache.head_stride),
        v(static_cast<const T*>(cache.v) + kv_head * cache.head_stride),
        blocks(context.block_tables + sequence * context.table_stride),
        block_size(cache.block_size),
        block_stride(cache.block_stride),
        slot_stride(cache.slot_stride) {}

  int64_t offset(int64_t position) const {
    return blocks[position / block_size] * block_stride + position % block_size * slot_stride;
  }
};

// OK, or the first sequence whose context leaves its block table or the cache.
inline int64_t first_bad_sequence(const Cache& cache, const Context& context) {
  for (int64_t s = 0; s < context.num_sequences; s++) {
    const int64_t used = ceil_div(context.context_lens[s], cache.block_size);
    if (context.context_lens[s] < 0 || used > context.max_blocks) return s;
    const int32_t* blocks = context.block_tables + s * context.table_stride;
    for (int64_t i = 0; i < used; i++)
      if (blocks[i] < 0 || blocks[i] >= cache.num_blocks) return s;
  }
  return OK;
}

template <class T>
inline T* row(const Heads& heads, int64_t token, int64_t head) {
  return static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
}

}  // namespace
