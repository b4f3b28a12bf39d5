// Soft caps of attention scores (Gemma 2): cap * tanh(score / cap).
#pragma once

#include "vec.h"

namespace {

// To about 2 ulp: near 0 a polynomial (Moshier's Cephes), where the quotient of exponentials would cancel.
inline Vec tanh(Vec x) {
  const Vec size = max(x, -x), square = x * x;
  Vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec small = exp(size * -2.f);
  const Vec quotient = (1.f - small) / (1.f + small);
  return size < 0.625f ? p * square * x + x : (x < 0.f ? -quotient : quotient);
}

// Caps scores[0 .. count) unless `cap` is 0. Entries up to the next multiple of LANES must exist.
inline void cap_scores(float* scores, int64_t count, float cap) {
  if (cap == 0.f) return;
  for (int64_t i = 0; i < count; i += LANES) store(scores + i, tanh(load(scores + i) / cap) * cap);
}

}  // namespace
