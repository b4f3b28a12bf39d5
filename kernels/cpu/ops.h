// The C interface of the CPU kernels: plain pointers, no torch, no C++ types. kernels/cpu/library.py mirrors it.
//
// A reference is a pointer that is not null. Strides count elements. Every op returns OK, or the index of the sequence
// or token that leaves its table, having written nothing. `threads` limits how many threads share the work, the caller
// included.
#pragma once

#include <cstdint>

// INT8 and INT4 are weights alone.
enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4 };

constexpr int64_t OK = -1;

// Attention heads longer than this go to the torch reference (library.py checks).
constexpr int MAX_HEAD_DIM = 256;

// What a cache stores: elements of the DType that the op computes in, or bfloat16 whatever that is, or one byte each
// with a scale a row.
enum class CacheFormat : int32_t { AS_COMPUTED = 0, INT8 = 1, FP8_E4M3 = 2, BFLOAT16 = 3 };

// A paged cache [num_blocks, kv_heads, block_size, head_dim], the last dimension contiguous; K and V of equal strides.
// Scales [num_blocks, kv_heads, block_size], null unless quantised, likewise.
struct Cache {
  void* k;
  void* v;
  int64_t num_blocks, kv_heads, block_size, head_dim;
  int64_t block_stride, head_stride, slot_stride;
  float* k_scales;
  float* v_scales;
  int64_t scale_block_stride, scale_head_stride;
  CacheFormat format;
};

// Which blocks hold each sequence's context.
struct Context {
  const int32_t* block_tables;  // [num_sequences, max_blocks]
  int64_t table_stride, max_blocks, num_sequences;
  const int32_t* context_lens;  // [num_sequences]
};

// Rows of heads [tokens, heads, head_dim], the last dimension contiguous.
struct Heads {
  void* data;
  int64_t tokens, heads;
  int64_t token_stride, head_stride;
};

// Weights as kernels/panels.py lays them out, or integers as kernels/quantized.py does.
struct Matrix {
  const void* data;
  int64_t rows, stride;  // elements from one panel to the next; not of integers
  // Of integers only: float16 scales or null, offsets or null, float32 row scales.
  const void* scales;
  const void* offsets;
  const float* row_scales;
};

// Linear layers that share their input: the rows of one matrix after the other are the output's columns.
struct Weights {
  DType dtype;
  const Matrix* matrices;
  int64_t count, depth;
  int64_t group;  // columns that share a scale; 0: all
  DType offsets_dtype;
};

// How a query's scores are made and which keys it sees.
struct Scoring {
  float scale;
  float soft_cap;  // a score s becomes soft_cap * tanh(s / soft_cap); 0: stays s
  int64_t window;  // the latest keys that a query sees, its own included; INT64_MAX: all

  int64_t first_visible(int64_t position) const { return position < window ? 0 : position - window + 1; }
};

// A linear layer. bias (or null): one value for each column of the output.
struct Linear {
  Weights weights;
  const void* bias;
};

// What an attention stage does between its linears. Norms [head_dim] or null; cos, sin: [num_positions, rotary_pairs].
struct Attention {
  const void* query_norm;
  const void* key_norm;
  const float* cos;
  const float* sin;
  int64_t num_positions;
  int64_t rotary_pairs;
  Scoring scoring;
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

// Half of a decoder layer: what the stage before added (normalised if delta_norm is not null) joins the residual
// stream, whose norm goes through `first`, then attention or (null) a gate, then `second`.
struct Stage {
  const void* delta_norm;
  const void* norm;
  Linear first, second;
  const Attention* attention;
  Activation activation;
};

// Stage s belongs to layer s / 2. max_wide, max_narrow: the largest widths between the linears of a stage.
struct Decoder {
  const Stage* stages;
  int64_t num_stages, hidden, heads, kv_heads, head_dim, max_wide, max_narrow;
  float eps;
};

// What stands before and behind a decoder's stages: rows of the embedding, scaled, go in; what comes out (the last
// delta normalised if delta_norm is not null) is normalised and goes through `head`.
struct Ends {
  DType embedding_dtype;  // BFLOAT16 or that of the computation
  const void* embedding;  // [vocab, hidden]
  int64_t vocab, embedding_stride;
  float embedding_scale;
  const void* delta_norm;
  const void* norm;
  Linear head;
};

// One token each of the decode sequences, then the runs of the prefill sequences.
struct Step {
  int64_t tokens;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slot_mapping;
  Context decodes, prefills;
  const int32_t* cu_seqlens;   // [prefills + 1], from 0
  const int64_t* sample_rows;  // [samples], tokens whose logits are wanted
  int64_t samples;
};

// Rows [tokens, hidden], contiguous: the residual stream and what is still to be added to it.
struct Stream {
  void* delta;
  void* residual;
};

// How a row's token is drawn: top_k 0 and top_p 1 keep all; min_gap: of a logit to the first one's, or -inf.
struct Draw {
  float temperature;
  int64_t top_k;
  double top_p, min_gap, uniform;
};

struct Ops {
  const char* isa;
  int64_t (*paged_decode)(DType, const Heads& q, const Cache&, const Context&, const Scoring&, const Heads& out,
                          int threads);
  int64_t (*paged_prefill)(DType, const Heads& q, const Cache&, const Context&, const int32_t* cu_seqlens,
                           const Scoring&, const Heads& out, int threads);
  int64_t (*kv_write)(DType, const Heads& k, const Heads& v, const Cache&, const int64_t* slot_mapping, int threads);
  // residual and new_residual are null for a plain rms_norm.
  int64_t (*rms_norm)(DType, const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                      const void* weight, float eps, void* out, void* new_residual, int64_t rows, int64_t columns,
                      int threads);
  int64_t (*rope)(DType, const Heads& q, const Heads& k, int64_t pairs, const int64_t* positions, const float* cos,
                  const float* sin, int64_t num_positions, int threads);
  int64_t (*silu_mul)(DType, const void* gate_up, int64_t row_stride, void* out, int64_t rows, int64_t columns,
                      int threads);
  int64_t (*gelu_mul)(DType, const void* gate_up, int64_t row_stride, void* out, int64_t rows, int64_t columns,
                      int threads);
  // x: [rows, depth]; bias (or null): one value for each column of out; out: contiguous.
  int64_t (*linear)(DType, const void* x, int64_t x_stride, int64_t rows, const Weights&, const void* bias, void* out,
                    int threads);
  // Stages [first, last). caches: one for each layer. workspace: tokens * (hidden + max_wide + max_narrow) elements.
  // Returns 0 when any token or sequence leaves its table.
  int64_t (*run_stages)(DType, const Decoder&, int64_t first, int64_t last, const Step&, const Cache* caches,
                        const Stream& in, const Stream& out, void* workspace, int threads);
  // All of a step, from token ids to logits [samples, columns of the head]. workspace: hidden * 2 elements more a
  // token. Returns 0 when any token or sequence leaves its table, or there are more samples than tokens.
  int64_t (*forward)(DType, const Decoder&, const Ends&, const Step&, const Cache* caches, void* logits,
                     void* workspace, int threads);
  // Row target_rows[i] of target becomes row source_rows[i] of source; strides count bytes, targets are distinct.
  int64_t (*copy_rows)(const void* source, int64_t source_stride, void* target, int64_t target_stride,
                       int64_t row_bytes, const int64_t* source_rows, const int64_t* target_rows, int64_t rows,
                       int threads);
  // draws: one a row, or null: all greedy. scratch: [rows, vocab], or null when all are greedy.
  int64_t (*sample)(DType, const void* logits, int64_t row_stride, int64_t rows, int64_t vocab, const Draw* draws,
                    uint64_t* scratch, int64_t* tokens, int threads);
};

// An OpenMP thread pool, as GCC's and LLVM's runtimes both export it. Null: everything runs on the calling thread.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* context, unsigned threads, unsigned flags);  // GOMP_parallel
  int (*num_threads)();  // omp_get_num_threads: of the region around it
};
extern OpenMp openmp;

// The parallel region that a thread runs in, or null, and its number there (parallel.h). All builds share it: the ops
// of one may call another's. `__thread`: a C++ thread_local would come with a function that the linker merges.
struct Membership {
  void* team;
  int64_t number;
};
extern __thread Membership membership;

// A build that gains from its instructions in a few ops alone takes the others from this one.
#ifdef BASE_OPS
extern const Ops BASE_OPS;
#endif
