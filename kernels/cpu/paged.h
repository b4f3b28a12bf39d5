// Reading tokens of a paged cache through a block table.
#pragma once

#include "ops.h"
#include "kv_formats.h"

namespace {

// Calls op with an element of the type that the cache stores, when T is what the op computes in.
template <class T, class Op>
inline int64_t by_format(const Cache& cache, const Op& op) {
  if (cache.format == CacheFormat::INT8) return op(int8{});
  if (cache.format == CacheFormat::FP8_E4M3) return op(e4m3{});
  if (cache.format == CacheFormat::BFLOAT16) return op(bf16{});
  return op(T{});
}

// Where a token's row, and its scale, lie behind the reader's pointers.
struct Place {
  int64_t row, scale;
};

// Points into one head of one sequence's context. E: what the cache stores.
template <class E>
struct ContextReader {
  const E* k;
  const E* v;
  const float* k_scales;  // null unless QUANTISED<E>
  const float* v_scales;
  const int32_t* blocks;
  int64_t block_size, block_stride, slot_stride, scale_block_stride;

  ContextReader(const Cache& cache, const Context& context, int64_t sequence, int64_t kv_head)
      : k(static_cast<const E*>(cache.k) + kv_head * cache.head_stride),
        v(static_cast<const E*>(cache.v) + kv_head * cache.head_stride),
        k_scales(cache.k_scales + kv_head * cache.scale_head_stride),
        v_scales(cache.v_scales + kv_head * cache.scale_head_stride),
        blocks(context.block_tables + sequence * context.table_stride),
        block_size(cache.block_size),
        block_stride(cache.block_stride),
        slot_stride(cache.slot_stride),
        scale_block_stride(cache.scale_block_stride) {}

  // body(i, place) for positions begin + i, i in 0 .. count - 1.
  template <class Body>
  void for_places(int64_t begin, int64_t count, const Body& body) const {
    const int32_t* block = blocks + begin / block_size;
    int64_t slot = begin % block_size;
    for (int64_t i = 0; i < count; block++, slot = 0) {
      Place place{*block * block_stride + slot * slot_stride, *block * scale_block_stride + slot};
      const int64_t end = min(count, i + block_size - slot);
      for (; i < end; i++, place.row += slot_stride, place.scale++) body(i, place);
    }
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
