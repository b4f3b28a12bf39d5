// Stages of a decoder, or a whole step, in one call: the ops of these headers one after the other, on memory that
// stays.
//
// kernels/reference/decoder.py is the same composition through the public ops; both give the same bits.
#pragma once

#include "linear.h"
#include "paged_decode.h"
#include "paged_prefill.h"
#include "rowwise.h"

namespace {

// Where a step's intermediate results lie. All rows are contiguous.
template <class T>
struct Workspace {
  T* normed;  // [tokens, hidden]
  T* wide;    // [tokens, columns of a stage's first linear]
  T* narrow;  // [tokens, columns of a stage's second linear's input]
  T* end;

  Workspace(void* memory, const Decoder& decoder, int64_t tokens) {
    normed = static_cast<T*>(memory);
    wide = normed + tokens * decoder.hidden;
    narrow = wide + tokens * decoder.max_wide;
    end = narrow + tokens * decoder.max_narrow;
  }
};

// One step's tokens on their way through the stages.
template <class T>
struct DecoderStep {
  const Decoder& decoder;
  const Step& step;
  const Cache* caches;
  Workspace<T> work;
  int threads;

  // residual_out = residual + delta, and its norm to work.normed, of `rows` rows.
  void enter(const Stage& stage, int64_t rows, const T* delta, const T* residual, T* residual_out) const {
    const int64_t hidden = decoder.hidden;
    if (stage.delta_norm != nullptr) {
      rms_norm<T>(delta, hidden, nullptr, 0, stage.delta_norm, decoder.eps, work.normed, nullptr, rows, hidden,
                  threads);
      delta = work.normed;
    }
    rms_norm<T>(delta, hidden, residual, hidden, stage.norm, decoder.eps, work.normed, residual_out, rows, hidden,
                threads);
  }

  void multiply(const T* x, int64_t rows, const Linear& linear_layer, T* out) const {
    const Weights& weights = linear_layer.weights;
    linear<T>(x, weights.depth, rows, weights, linear_layer.bias, out, threads);
  }

  void attend(const Stage& stage, const Cache& cache) const {
    const Attention& attention = *stage.attention;
    const int64_t dim = decoder.head_dim, row = (decoder.heads + 2 * decoder.kv_heads) * dim;
    const Heads q{work.wide, step.tokens, decoder.heads, row, dim};
    const Heads k{work.wide + decoder.heads * dim, step.tokens, decoder.kv_heads, row, dim};
    const Heads v{work.wide + (decoder.heads + decoder.kv_heads) * dim, step.tokens, decoder.kv_heads, row, dim};
    normalise_heads(q, attention.query_norm);
    normalise_heads(k, attention.key_norm);
    rope<T>(q, k, attention.rotary_pairs, step.positions, attention.cos, attention.sin, attention.num_positions,
            threads);
    kv_write<T>(k, v, cache, step.slot_mapping, threads);
    const int64_t decodes = step.decodes.num_sequences;
    const Heads out{work.narrow, step.tokens, decoder.heads, decoder.heads * dim, dim};
    if (decodes > 0)
      paged_decode<T>(first_tokens(q, decodes), cache, step.decodes, attention.scoring, first_tokens(out, decodes),
                      threads);
    if (step.prefills.num_sequences > 0)
      paged_prefill<T>(after_tokens(q, decodes), cache, step.prefills, step.cu_seqlens, attention.scoring,
                       after_tokens(out, decodes), threads);
  }

  // Each head alone, in place; `weight` may be null.
  void normalise_heads(const Heads& heads, const void* weight) const {
    if (weight == nullptr) return;
    parallel_rows(heads.tokens, heads.heads * decoder.head_dim, threads, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < heads.heads; h++) {
          T* head = row<T>(heads, t, h);
          normalise_row(head, static_cast<const T*>(weight), decoder.eps, head, decoder.head_dim);
        }
    });
  }

  static Heads first_tokens(Heads heads, int64_t count) {
    heads.tokens = count;
    return heads;
  }

  static Heads after_tokens(Heads heads, int64_t count) {
    heads.data = row<T>(heads, count, 0);
    heads.tokens -= count;
    return heads;
  }

  void multiply_gated(const Stage& stage, int64_t rows) const {
    const Weights& weights = stage.first.weights;
    gated_linear<T>(work.normed, weights.depth, rows, weights, stage.first.bias, stage.activation, work.wide,
                    work.narrow, threads);
  }

  // The first stage's input: a residual stream of embeddings, and nothing to add to it.
  void embed(const Ends& ends, const Stream& stream) const {
    ends.embedding_dtype == BFLOAT16 ? embed_from<bf16>(ends, stream) : embed_from<T>(ends, stream);
  }

  template <class E>
  void embed_from(const Ends& ends, const Stream& stream) const {
    const int64_t hidden = decoder.hidden;
    parallel_rows(step.tokens, hidden, threads, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const E* from = static_cast<const E*>(ends.embedding) + step.token_ids[t] * ends.embedding_stride;
        T *residual = residual_of(stream) + t * hidden, *delta = delta_of(stream) + t * hidden;
        for_vectors(hidden, [&](int64_t i, int64_t n) {
          store_some(residual + i, load_some(from + i, n) * ends.embedding_scale, n);
          store_some(delta + i, Vec{}, n);
        });
      }
    });
  }

  // The norm of what the last layer left of the rows to sample, to work.normed.
  void leave(const Ends& ends, const Stream& sampled) const {
    const int64_t hidden = decoder.hidden;
    parallel_rows(step.samples, hidden, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const T *delta = delta_of(sampled) + r * hidden, *residual = residual_of(sampled) + r * hidden;
        T* normed = work.normed + r * hidden;
        if (ends.delta_norm != nullptr) {
          normalise_row(delta, static_cast<const T*>(ends.delta_norm), decoder.eps, normed, hidden);
          delta = normed;
        }
        add_row(delta, residual, normed, hidden);
        normalise_row(normed, static_cast<const T*>(ends.norm), decoder.eps, normed, hidden);
      }
    });
  }

  // All threads of a region call these. They share the loops in them and do the rest, which changes nothing, each.

  void run(int64_t first, int64_t last, const Stream& in, const Stream& out) const {
    Stream from = in;
    for (int64_t s = first; s < last; s++, from = out) {
      const Stage& stage = decoder.stages[s];
      enter(stage, step.tokens, delta_of(from), residual_of(from), residual_of(out));
      if (stage.attention != nullptr) {
        multiply(work.normed, step.tokens, stage.first, work.wide);
        attend(stage, caches[s / 2]);
      } else {
        multiply_gated(stage, step.tokens);
      }
      multiply(work.narrow, step.tokens, stage.second, delta_of(out));
    }
  }

  // The last layer, in whose second half nothing but the rows to sample is wanted. Returns where these are.
  Stream run_last_layer(const Stream& stream) const {
    const Stage* const stages = decoder.stages + decoder.num_stages - 2;
    const Stage &attention = stages[0], &feed_forward = stages[1];
    enter(attention, step.tokens, delta_of(stream), residual_of(stream), residual_of(stream));
    multiply(work.normed, step.tokens, attention.first, work.wide);
    attend(attention, caches[decoder.num_stages / 2 - 1]);

    const Stream sampled{stream.residual, stream.delta};  // exchanged: each is read no more once it is written
    keep_samples(attention.second.weights.depth, residual_of(stream), residual_of(sampled));
    multiply(work.wide, step.samples, attention.second, delta_of(sampled));

    enter(feed_forward, step.samples, delta_of(sampled), residual_of(sampled), residual_of(sampled));
    multiply_gated(feed_forward, step.samples);
    multiply(work.narrow, step.samples, feed_forward.second, delta_of(sampled));
    return sampled;
  }

  // Rows to sample, of `columns` in work.narrow to work.wide, and of the residual stream.
  void keep_samples(int64_t columns, const T* residual, T* residual_out) const {
    const int64_t hidden = decoder.hidden;
    parallel_rows(step.samples, columns + hidden, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const int64_t from = step.sample_rows[r];
        __builtin_memcpy(work.wide + r * columns, work.narrow + from * columns, columns * sizeof(T));
        __builtin_memcpy(residual_out + r * hidden, residual + from * hidden, hidden * sizeof(T));
      }
    });
  }

  static T* delta_of(const Stream& stream) { return static_cast<T*>(stream.delta); }
  static T* residual_of(const Stream& stream) { return static_cast<T*>(stream.residual); }
};

inline bool alike(const Cache& some, const Cache& other) {
  return some.num_blocks == other.num_blocks && some.block_size == other.block_size;
}

// Whether every position, slot and context lies in its table, for all stages.
inline bool step_is_sound(const Decoder& decoder, int64_t first, int64_t last, const Step& step, const Cache* caches) {
  const int64_t decodes = step.decodes.num_sequences, prefills = step.prefills.num_sequences;
  const Cache* checked = nullptr;
  int64_t checked_positions = 0;
  for (int64_t s = first; s < last; s++) {
    if (decoder.stages[s].attention == nullptr) continue;
    const Cache& cache = caches[s / 2];
    const int64_t positions = decoder.stages[s].attention->num_positions;
    if (checked != nullptr && alike(cache, *checked) && positions == checked_positions) continue;
    checked = &cache, checked_positions = positions;
    for (int64_t t = 0; t < step.tokens; t++) {
      const int64_t position = step.positions[t];
      if (position < 0 || position >= positions) return false;
      if (step.slot_mapping[t] >= cache.num_blocks * cache.block_size) return false;
    }
    if (first_bad_sequence(cache, step.decodes) != OK || first_bad_sequence(cache, step.prefills) != OK) return false;
    if (prefills == 0) {
      if (decodes != step.tokens) return false;
      continue;
    }
    const PrefillPlan plan(step.prefills, step.cu_seqlens, decoder.heads, decoder.kv_heads);
    if (plan.first_bad(step.tokens - decodes) != OK) return false;
  }
  return true;
}

template <class T>
int64_t run_stages(const Decoder& decoder, int64_t first, int64_t last, const Step& step, const Cache* caches,
                   const Stream& in, const Stream& out, void* workspace, int threads) {
  if (!step_is_sound(decoder, first, last, step, caches)) return 0;
  const DecoderStep<T> work{decoder, step, caches, Workspace<T>(workspace, decoder, step.tokens), threads};
  in_one_region(threads, [&] { work.run(first, last, in, out); });
  return OK;
}

// Whether every token id and every row to sample lies in its table.
inline bool ends_are_sound(const Ends& ends, const Step& step) {
  for (int64_t t = 0; t < step.tokens; t++)
    if (step.token_ids[t] < 0 || step.token_ids[t] >= ends.vocab) return false;
  for (int64_t r = 0; r < step.samples; r++)
    if (step.sample_rows[r] < 0 || step.sample_rows[r] >= step.tokens) return false;
  return step.samples <= step.tokens;
}

template <class T>
int64_t forward(const Decoder& decoder, const Ends& ends, const Step& step, const Cache* caches, void* logits,
                void* workspace, int threads) {
  if (!ends_are_sound(ends, step) || !step_is_sound(decoder, 0, decoder.num_stages, step, caches)) return 0;
  const DecoderStep<T> work{decoder, step, caches, Workspace<T>(workspace, decoder, step.tokens), threads};
  const Stream stream{work.work.end, work.work.end + step.tokens * decoder.hidden};
  in_one_region(threads, [&] {
    work.embed(ends, stream);
    work.run(0, decoder.num_stages - 2, stream, stream);
    work.leave(ends, work.run_last_layer(stream));
    work.multiply(work.work.normed, step.samples, ends.head, static_cast<T*>(logits));
  });
  return OK;
}

}  // namespace
