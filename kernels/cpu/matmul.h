// Small float32 matrix products on tiles that lie in the first- or second-level cache.
#pragma once

#include "vec.h"

namespace {

constexpr int MATMUL_COLUMNS = 2 * LANES;  // columns of a register tile: every tile's width is a multiple
constexpr int MATMUL_ROWS = 6;             // 12 sums, 2 columns and 1 broadcast fill 16 registers

// C[ROWS, MATMUL_COLUMNS] (+)= A[ROWS, depth] B[depth, MATMUL_COLUMNS]; rows `lda`, `ldb`, `ldc` floats apart.
template <int ROWS>
inline void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                          int64_t depth, bool add) {
  Vec sums[ROWS][2];  // not zeroed as a whole, for which GCC calls up a string instruction
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2; j++) sums[r][j] = add ? load(c + r * ldc + j * LANES) : Vec{};
  for (int64_t i = 0; i < depth; i++) {
    const Vec left = load(b + i * ldb), right = load(b + i * ldb + LANES);
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] += left * a[r * lda + i];
      sums[r][1] += right * a[r * lda + i];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2; j++) store(c + r * ldc + j * LANES, sums[r][j]);
}

// C[rows, columns] (+)= A[rows, depth] B[depth, columns]; `columns` is a multiple of MATMUL_COLUMNS.
inline void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                     int64_t columns, int64_t depth, bool add) {
  for (int64_t j = 0; j < columns; j += MATMUL_COLUMNS) {
    int64_t r = 0;
    for (; r + MATMUL_ROWS <= rows; r += MATMUL_ROWS)
      multiply_tile<MATMUL_ROWS>(a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth, add);
    for (; r < rows; r++) multiply_tile<1>(a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth, add);
  }
}

}  // namespace
