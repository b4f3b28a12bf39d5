// The next token of each row of logits: greedy, or drawn under top-k, top-p and min-p without sorting the vocabulary.
//
// Tokens are ordered by (logit descending, id ascending). The order is total, so whatever the filters keep is all
// tokens up to a last one, and only that one has to be found.
#pragma once

#include "parallel.h"
#include "rowwise.h"
#include "vec.h"

namespace {

// A logit and a token as one integer that is larger for what comes first. -0 counts as +0.
inline uint64_t key_of(float logit, int64_t id) {
  const float value = logit + 0.f;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

inline float logit_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
  float logit;
  __builtin_memcpy(&logit, &bits, sizeof logit);
  return logit;
}

// A binary heap whose root is the smallest.
struct Heap {
  uint64_t* keys;
  int64_t size;

  void sink(int64_t i) {
    const uint64_t key = keys[i];
    for (int64_t child; (child = 2 * i + 1) < size; i = child) {
      if (child + 1 < size && keys[child + 1] < keys[child]) child++;
      if (key <= keys[child]) break;
      keys[i] = keys[child];
    }
    keys[i] = key;
  }

  void build() {
    for (int64_t i = size / 2 - 1; i >= 0; i--) sink(i);
  }

  uint64_t pop() {
    const uint64_t root = keys[0];
    keys[0] = keys[--size];
    if (size > 0) sink(0);
    return root;
  }
};

// One row's logits by the temperature, what is no number made so: any parameter gives a token.
template <class T>
struct ScaledRow {
  const T* logits;
  int64_t vocab;
  float temperature;

  // Elements i .. i + n; the other lanes are -inf.
  Vec at(int64_t i, int64_t n) const {
    const Vec logit = load_some(logits + i, n), v = temperature == 1.f ? logit : logit / temperature;
    const Vec nothing = fill(-__builtin_inff());
    const Vec finite = v <= __FLT_MAX__ ? v : (v == v ? fill(__FLT_MAX__) : nothing);
    if (n == LANES) return finite;
    float lanes[LANES];
    store(lanes, finite);
    for (int64_t lane = n; lane < LANES; lane++) lanes[lane] = -__builtin_inff();
    return load(lanes);
  }

  float peak() const {
    Vec most = fill(-__builtin_inff());
    for_vectors(vocab, [&](int64_t i, int64_t n) { most = max(most, at(i, n)); });
    return largest(most);
  }

  // The first of the tokens whose logit is the largest; 0 when none is above -inf.
  int64_t first() const {
    Vec most = fill(-__builtin_inff());
    VecInt ids = {}, here = {};
    for (int lane = 0; lane < LANES; lane++) here[lane] = lane;
    for_vectors(vocab, [&](int64_t i, int64_t n) {
      const Vec v = at(i, n);
      ids = v > most ? here : ids;
      most = max(v, most);
      here += LANES;
    });
    const float peak = largest(most);
    int64_t token = vocab;
    for (int64_t lane = 0; lane < LANES; lane++)
      if (most[lane] == peak) token = min(token, ids[lane]);
    return token;
  }

  // Of all tokens, relative to the first one's probability.
  double mass(float peak) const {
    double total = 0;
    for_vectors(vocab, [&](int64_t i, int64_t n) { total += sum(exp(at(i, n) - peak)); });
    return total;
  }

  // body(id, logit, e^(logit - peak)) for tokens whose logit is at least `bound`, which body may raise, ids ascending.
  // Ends when body returns true.
  template <class Body>
  void for_each_from(const float& bound, float peak, const Body& body) const {
    for (int64_t i = 0; i < vocab; i += LANES) {
      const int64_t n = min(LANES, vocab - i);
      const Vec v = at(i, n);
      if (largest(v) < bound) continue;
      const Vec weights = exp(v - peak);
      for (int64_t lane = 0; lane < n; lane++)
        if (v[lane] >= bound && body(i + lane, v[lane], weights[lane])) return;
    }
  }
};

// The largest power of two up to x as a logarithm, a little less than ln(x).
inline float log_below(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return static_cast<float>((bits >> 52) - 1023) * 0.693147f - 0.001f;
}

template <class T>
struct Sampler {
  ScaledRow<T> row;
  Draw how;
  uint64_t* scratch;  // [vocab]
  float peak;

  bool cuts_mass() const { return how.top_p < 1.0; }
  bool cuts_rare() const { return how.min_gap > -__builtin_inf(); }

  // The k first tokens.
  Heap first(int64_t k) const {
    Heap kept{scratch, 0};
    float bound = -__builtin_inff();
    row.for_each_from(bound, peak, [&](int64_t id, float logit, float) {
      const uint64_t key = key_of(logit, id);
      if (kept.size < k) {
        kept.keys[kept.size++] = key;
        if (kept.size == k) kept.build();
      } else if (key > kept.keys[0]) {
        kept.keys[0] = key;
        kept.sink(0);
      }
      if (kept.size == k) bound = logit_of(kept.keys[0]);
      return false;
    });
    return kept;
  }

  // All tokens that top-p and min-p may keep: those rarer than the mean of what top-p cuts off are cut off themselves.
  Heap likely(double total) const {
    const float rare = cuts_mass() ? log_below((1.0 - how.top_p) * total / row.vocab) : -__builtin_inff();
    const float far = cuts_rare() ? static_cast<float>(how.min_gap) * 1.0001f - 0.001f : -__builtin_inff();
    const float bound = peak + (rare > far ? rare : far);
    Heap kept{scratch, 0};
    row.for_each_from(bound, peak, [&](int64_t id, float logit, float) {
      kept.keys[kept.size++] = key_of(logit, id);
      return false;
    });
    return kept;
  }

  static double mass(const Heap& kept, float peak) {
    double total = 0;
    for (int64_t i = 0; i < kept.size; i++) total += weight_of(kept.keys[i], peak);
    return total;
  }

  static float weight_of(uint64_t key, float peak) { return exp(fill(logit_of(key) - peak))[0]; }

  // The last token that the filters keep, as a key.
  uint64_t last_kept() const {
    const bool counted = how.top_k > 0 && how.top_k < row.vocab;
    if (!counted && !cuts_mass() && !cuts_rare()) return 0;
    Heap kept;
    double total = 0;
    if (counted) {
      kept = first(how.top_k);
      if (!cuts_mass() && !cuts_rare()) return kept.keys[0];
      total = mass(kept, peak);
    } else {
      if (cuts_mass()) total = row.mass(peak);
      kept = likely(total);
    }
    return last_likely(kept, total);
  }

  uint64_t last_likely(Heap kept, double total) const {
    for (int64_t i = 0; i < kept.size; i++) kept.keys[i] = ~kept.keys[i];  // the first token becomes the root
    kept.build();
    uint64_t last = ~kept.pop();
    double before = weight_of(last, peak);
    while (kept.size > 0 && !(cuts_mass() && before >= how.top_p * total)) {
      const uint64_t key = ~kept.pop();
      if (static_cast<double>(logit_of(key)) < peak + how.min_gap) break;
      last = key;
      before += weight_of(key, peak);
    }
    return last;
  }

  // The first token at which the cumulative probability of what was kept, ids ascending, exceeds `uniform`.
  int64_t draw() const {
    const uint64_t last = last_kept();
    const float bound = last == 0 ? -__builtin_inff() : logit_of(last);
    double total = 0, cumulative = 0;
    int64_t token = 0;
    row.for_each_from(bound, peak, [&](int64_t id, float logit, float weight) {
      if (key_of(logit, id) >= last) total += weight;
      return false;
    });
    const double target = how.uniform * total;
    row.for_each_from(bound, peak, [&](int64_t id, float logit, float weight) {
      if (key_of(logit, id) < last || weight == 0.f) return false;
      token = id;
      return (cumulative += weight) > target;
    });
    return token;
  }
};

template <class T>
int64_t sample(const void* logits, int64_t row_stride, int64_t rows, int64_t vocab, const Draw* draws,
               uint64_t* scratch, int64_t* tokens, int threads) {
  parallel_for(rows, threads, [&](int64_t r) {
    const ScaledRow<T> row{static_cast<const T*>(logits) + r * row_stride, vocab, draws ? draws[r].temperature : 1.f};
    const float peak = draws ? row.peak() : -__builtin_inff();
    const bool certain = peak == -__builtin_inff();
    tokens[r] = certain ? row.first() : Sampler<T>{row, draws[r], scratch + r * vocab, peak}.draw();
  });
  return OK;
}

}  // namespace
