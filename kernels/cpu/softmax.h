// One step of the online softmax (Milakov and Gimelshein, 2018) for one row of scores.
#pragma once

#include "vec.h"
namespace {

struct RunningSoftmax {
  float peak = -__builtin_inff();
  float total = 0.f;

  // Replaces scores[0 .. count) by weights relative to the largest score so far and adds them to the total. Entries up
  // to the next multiple of LANES must exist; they become 0. Returns the factor for what was accumulated before.
  float update(float* scores, int64_t count) {
    for (int64_t i = count; i % LANES; i++) scores[i] = -__builtin_inff();
    Vec top = fill(peak);
    for (int64_t i = 0; i < count; i += LANES) top = max(top, load(scores + i));
    const float new_peak = largest(top);
    Vec sums = {};
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec weights = exp(load(scores + i) - new_peak);
      store(scores + i, weights);
      sums += weights;
    }
    const float factor = new_peak == peak ? 1.f : exp(fill(peak - new_peak))[0];
    total = total * factor + sum(sums);
    peak = new_peak;
    return factor;
  }

  // What turns accumulated values into an average; 0 when there was no key.
  float inverse() const { return total > 0.f ? 1.f / total : 0.f; }
};

}  // namespace
