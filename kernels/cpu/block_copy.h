// Copies of whole KV blocks.
#pragma once

#include "parallel.h"

namespace {

// An item is a piece of a row, so that few large blocks keep all threads busy too.
inline int64_t copy_rows(const void* source, int64_t source_stride, void* target, int64_t target_stride,
                         int64_t row_bytes, const int64_t* source_rows, const int64_t* target_rows, int64_t rows,
                         int threads) {
  constexpr int64_t PIECE = 1 << 18;
  const int64_t pieces = ceil_div(row_bytes, PIECE);
  parallel_for(rows * pieces, threads, [&](int64_t item) {
    const int64_t row = item / pieces, begin = item % pieces * PIECE;
    __builtin_memcpy(static_cast<char*>(target) + target_rows[row] * target_stride + begin,
                     static_cast<const char*>(source) + source_rows[row] * source_stride + begin,
                     min(PIECE, row_bytes - begin));
  });
  return OK;
}

}  // namespace
