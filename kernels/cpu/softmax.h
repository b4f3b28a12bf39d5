// One step of the online softmax (Milakov and Gimelshein, 2018) for one row of scores, in powers of two.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

// The same weights from powers of two instead of e.
inline Scoring in_powers_of_two(Scoring scoring) {
  scoring.scale *= LOG2_E;
  scoring.soft_cap *= LOG2_E;
  return scoring;
}

struct RunningSoftmax {
  Vec totals = {};  // their sum is the total
  float peak = -__builtin_inff();  // the largest score so far, or a little less

  // Replaces scores[0 .. count), count > 0, by weights relative to `peak` and adds them to the total. Entries up to the
  // next multiple of LANES must exist; they become 0. Returns the factor for what was accumulated before.
  float update(float* scores, int64_t count) {
    return update(scores, count, [&](int64_t i, Vec weights) { store(scores + i, weights); });
  }

  // The same for weights that store_weights(i, weights) takes, those of scores[i .. i + LANES).
  template <class StoreWeights>
  float update(float* scores, int64_t count, const StoreWeights& store_weights) {
    const int64_t whole = count / LANES * LANES;
    if (whole < count) store(scores + whole, first_lanes(load(scores + whole), count - whole, -__builtin_inff()));
    const float factor = raise_peak(scores, count);
    const Vec top = fill(peak);
    Vec sums = totals;
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec weights = exp2(load(scores + i) - top);
      store_weights(i, weights);
      sums += weights;
    }
    totals = sums;
    return factor;
  }

  // What turns accumulated values into an average; 0 when there was no key.
  float inverse() const {
    const float total = sum(totals);
    return total > 0.f ? 1.f / total : 0.f;
  }

 private:
  // Most later tiles have a score that is a little larger. Weights above 1 are as exact as those below, so that the
  // peak seldom needs to follow, nor is what is largest to be looked for across lanes.
  float raise_peak(const float* scores, int64_t count) {
    constexpr float SLACK = 8.f;  // weights reach 2^8
    Vec top = load(scores);
    for (int64_t i = LANES; i < count; i += LANES) top = max(top, load(scores + i));
    if (!any_above(top, peak + SLACK)) return 1.f;
    const float before = peak;
    peak = largest(top);
    if (before == -__builtin_inff()) return 1.f;  // there is nothing to scale
    const float factor = exp2(fill(before - peak))[0];
    totals *= factor;
    return factor;
  }
};

}  // namespace
