// Weights whose rows lie in panels: how a product over them is cut into items of work, and what is fetched ahead.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int PANEL = 16;               // rows of W that lie interleaved
constexpr int VECTORS = PANEL / LANES;  // of one element of each
constexpr int PANEL_ITEMS_PER_THREAD = 16;
constexpr int BLOCK_ITEMS_PER_THREAD = 64;  // of several blocks, whose items take longer: threads wait for the last one

// The hints of prefetch instructions. The second level takes more requests at once: enough to wait for memory.
enum CacheLevel { FIRST_LEVEL = 3, SECOND_LEVEL = 2 };

// What will be wanted next, fetched in the order in which it lies in memory: the processor's own prefetching stops at
// the end of each page, and follows the first of several tiles of x only.
struct Fetch {
  const char* next;
  int64_t bytes_per_step;

  template <int STEP_BYTES, CacheLevel INTO = FIRST_LEVEL>  // that a step reads
  void advance() {
    touch<STEP_BYTES, INTO>(0);
    next += bytes_per_step;
  }

  // What a step reads `distance` bytes further.
  template <int STEP_BYTES, CacheLevel INTO = FIRST_LEVEL>
  void touch(int64_t distance) const {
    constexpr int LINE = 64;
    for (int i = 0; i < STEP_BYTES; i += LINE) __builtin_prefetch(next + distance + i, 0, INTO);
  }
};

// Adjoining panels of one matrix, and the first output column that they make.
struct PanelRun {
  const Matrix& matrix;
  int64_t begin, end, column;

  int64_t columns(int64_t panel) const { return min(PANEL, matrix.rows - panel * PANEL); }
};

// How a call is cut: into blocks of rows of x, and each of these into chunks of panels.
struct PanelPlan {
  const Weights& weights;
  int64_t rows, columns = 0, panels = 0;
  int64_t blocks, chunk, chunks;

  // A chunk is a multiple of `together` panels. parts: equal parts of the output whose same columns an item makes.
  PanelPlan(const Weights& weights, int64_t rows, int64_t most_rows, int64_t together, int threads, int64_t parts = 1)
      : weights(weights), rows(rows) {
    for (int64_t i = 0; i < weights.count; i++) {
      columns += weights.matrices[i].rows;
      panels += ceil_div(weights.matrices[i].rows, PANEL);
    }
    columns /= parts, panels /= parts;
    blocks = ceil_div(rows, most_rows);
    const int64_t items = threads * (blocks > 1 ? BLOCK_ITEMS_PER_THREAD : PANEL_ITEMS_PER_THREAD);
    chunk = round_up(max(1, ceil_div(panels * blocks, items)), together);
    chunks = ceil_div(panels, chunk);
  }

  // One block of x after the other, so that a thread prepares each but once.
  int64_t items() const { return blocks * chunks; }
  int64_t block_of(int64_t item) const { return item / chunks; }
  int64_t first_row(int64_t block) const { return rows * block / blocks; }
  int64_t first_panel(int64_t item) const { return item % chunks * chunk; }
  int64_t end_panel(int64_t item) const { return min(panels, first_panel(item) + chunk); }

  // body(run) for each matrix that the item's panels belong to.
  template <class Body>
  void for_runs(int64_t item, const Body& body) const {
    const int64_t begin = first_panel(item), end = end_panel(item);
    int64_t before = 0, column = 0;  // panels and output columns of the matrices before this one
    for (int64_t i = 0; i < weights.count; i++) {
      const Matrix& matrix = weights.matrices[i];
      const int64_t own = ceil_div(matrix.rows, PANEL);
      const int64_t first = max(0, begin - before), last = min(own, end - before);
      if (first < last) body(PanelRun{matrix, first, last, column + first * PANEL});
      before += own;
      column += matrix.rows;
    }
  }
};

}  // namespace
