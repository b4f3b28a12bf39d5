// Runs each build of the CPU kernels on one processor, an emulated one, and compares its results with the portable
// build's.
//
// There is no operating system and no library underneath: boot.S calls run(), the report leaves by the serial port.
#include "driver.h"

extern const Ops ops_baseline, ops_avx512, ops_avx512bf16, ops_amx;

namespace {

const Ops* const BUILDS[] = {&ops_avx512, &ops_avx512bf16, &ops_amx};

// One op with its inputs, as any build can run it into `out`. more_on_bf16: what products of bfloat16 add to the
// tolerance.
template <class T, class Run>
void compare(const char* what, int64_t size, float tolerance, const Run& run, float more_on_bf16 = 0) {
  Reserve reserve;
  T *expected = reserve.get<T>(size), *actual = reserve.get<T>(size);
  run(ops_baseline, expected);
  for (const Ops* build : BUILDS) {
    run(*build, actual);
    const float allowed = tolerance + (build == &ops_avx512 ? 0 : more_on_bf16);
    report(build->isa, what, type_name<T>(), worst_error(expected, actual, size), allowed);
  }
}

template <class T>
constexpr float TOLERANCE = sizeof(T) == 2 ? 1.01f / 128 : 1e-4f;  // two units of bfloat16's last place at most

template <class X>
void linear_case(const char* what, const Weights& weights, int64_t rows, bool with_bias) {
  Reserve reserve;
  const int64_t stride = weights.depth + 3;
  int64_t columns = 0;
  for (int64_t i = 0; i < weights.count; i++) columns += weights.matrices[i].rows;
  const X *x = random<X>(reserve, rows * stride), *bias = random<X>(reserve, columns);
  const auto run = [&](const Ops& ops, X* out) {
    ops.linear(type_of<X>(), x, stride, rows, weights, with_bias ? bias : nullptr, out, 1);
  };
  compare<X>(what, rows * columns, TOLERANCE<X>, run);
  for (const Ops* build : BUILDS) {  // a row alone has the same bits
    X *all = reserve.get<X>(rows * columns), *alone = reserve.get<X>(columns);
    run(*build, all);
    build->linear(type_of<X>(), x + (rows - 1) * stride, stride, 1, weights, with_bias ? bias : nullptr, alone, 1);
    const bool same = __builtin_memcmp(alone, all + (rows - 1) * columns, columns * sizeof(X)) == 0;
    report(build->isa, "linear, a row alone", type_name<X>(), same ? 0 : 1, 0);
  }
}

// Rows [rows, depth], `stride` apart, in the order of kernels/panels.py.
template <class W>
Matrix in_panels(Reserve& reserve, const W* data, int64_t rows, int64_t depth, int64_t stride) {
  constexpr int64_t PANEL = 16, UNIT = sizeof(W) == 2 ? 2 : 1;  // columns that lie side by side
  const int64_t panels = (rows + PANEL - 1) / PANEL, panel_size = (depth + UNIT - 1) / UNIT * UNIT * PANEL;
  W* packed = reserve.get<W>(panels * panel_size);
  __builtin_memset(packed, 0, panels * panel_size * sizeof(W));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < depth; k++)
      packed[r / PANEL * panel_size + (k / UNIT * PANEL + r % PANEL) * UNIT + k % UNIT] = data[r * stride + k];
  return {packed, rows, panel_size, nullptr, nullptr, nullptr};
}

template <class X, class W>
void float_linears() {
  const int64_t depths[] = {1, 31, 32, 33, 100, 576, 1540}, widths[] = {1, 15, 16, 33, 64, 97};
  const int64_t counts[] = {1, 2, 9, 17, 33, 50, 150};
  int next = 0;
  for (int64_t depth : depths)
    for (int64_t width : widths) {
      Reserve reserve;
      const int64_t stride = depth + 5, rows = counts[next++ % 7], parts = next % 3 == 0 ? 2 : 1;
      const W* data = random<W>(reserve, (width + 40) * stride);
      const Matrix packed[] = {in_panels(reserve, data, width, depth, stride),
                               in_panels(reserve, data + width * stride, 40, depth, stride)};
      linear_case<X>(sizeof(W) == 2 ? "linear over bfloat16" : "linear over float32",
                     {type_of<W>(), packed, parts, depth, 0, FLOAT32}, rows, next % 2 == 0);
    }
}

template <class X>
void integer_linears(DType dtype) {
  // Whole pieces of memory: the columns that only fill a last one would have to be zeros.
  const int64_t depths[] = {64, 104, 576}, widths[] = {1, 16, 49}, counts[] = {1, 3, 20};
  for (int64_t depth : depths)
    for (int64_t width : widths)
      for (int64_t rows : counts) {
        Reserve reserve;
        const int64_t panels = (width + 15) / 16, steps = (depth + 7) / 8, group = dtype == INT4 ? 32 : 0;
        const int64_t groups = (depth + 31) / 32;
        auto* data = reserve.get<uint8_t>(panels * steps * 128);
        for (int64_t i = 0; i < panels * steps * 128; i++) data[i] = static_cast<uint8_t>(draw());
        const float* row_scales = random<float>(reserve, panels * 16);
        auto* scales = reserve.get<uint16_t>(panels * groups * 16);
        for (int64_t i = 0; i < panels * groups * 16; i++) scales[i] = static_cast<uint16_t>(0x3000 + draw() % 1024);
        const Matrix part{data, width, 0, dtype == INT4 ? scales : nullptr, nullptr, row_scales};
        linear_case<X>(dtype == INT4 ? "linear over int4" : "linear over int8",
                       {dtype, &part, 1, depth, group, FLOAT32}, rows, true);
      }
}

template <class T>
void row_ops() {
  const int64_t widths[] = {1, 7, 16, 33, 576};
  for (int64_t columns : widths) {
    Reserve reserve;
    const int64_t rows = 5, size = rows * columns;
    const T *x = random<T>(reserve, 2 * size), *residual = random<T>(reserve, size);
    const T* weight = random<T>(reserve, columns);
    compare<T>("rms_norm", size, TOLERANCE<T>, [&](const Ops& ops, T* out) {
      ops.rms_norm(type_of<T>(), x, columns, nullptr, 0, weight, 1e-5f, out, nullptr, rows, columns, 1);
    });
    compare<T>("rms_norm with residual", 2 * size, TOLERANCE<T>, [&](const Ops& ops, T* out) {
      ops.rms_norm(type_of<T>(), x, columns, residual, columns, weight, 1e-5f, out, out + size, rows, columns, 1);
    });
    compare<T>("silu_mul", size, TOLERANCE<T>, [&](const Ops& ops, T* out) {
      ops.silu_mul(type_of<T>(), x, 2 * columns, out, rows, columns, 1);
    });
    compare<T>("gelu_mul", size, TOLERANCE<T>, [&](const Ops& ops, T* out) {
      ops.gelu_mul(type_of<T>(), x, 2 * columns, out, rows, columns, 1);
    });
  }
  const int64_t dims[] = {2, 24, 64, 80, 256};
  for (int64_t dim : dims) {
    Reserve reserve;
    const int64_t tokens = 3, heads = 2, size = tokens * heads * dim, positions[] = {0, 5, 9};
    const T *q = random<T>(reserve, size), *k = random<T>(reserve, size);
    const float *cos = random<float>(reserve, 10 * dim), *sin = random<float>(reserve, 10 * dim);
    compare<T>("rope", 2 * size, TOLERANCE<T>, [&](const Ops& ops, T* out) {
      __builtin_memcpy(out, q, size * sizeof(T));
      __builtin_memcpy(out + size, k, size * sizeof(T));
      ops.rope(type_of<T>(), {out, tokens, heads, heads * dim, dim}, {out + size, tokens, heads, heads * dim, dim}, dim,
               positions, cos, sin, 10, 1);
    });
  }
}

struct AttentionCase {
  int64_t dim, block_size = 16, heads = 4;
  CacheFormat format = CacheFormat::AS_COMPUTED;
  int64_t window = INT64_MAX;
  float soft_cap = 0;
};

// Three sequences in a cache that the portable build has written.
template <class T>
struct Contexts {
  static constexpr int64_t KV_HEADS = 2, SEQUENCES = 3, LONGEST = 140, NEW_TOKENS = 76;
  const AttentionCase& how;
  Reserve reserve;
  int64_t blocks_each = LONGEST / how.block_size + 1, blocks = SEQUENCES * blocks_each;
  int64_t slots = blocks * how.block_size;
  int32_t tables[SEQUENCES * (LONGEST + 1)], lengths[SEQUENCES] = {1, 50, LONGEST};
  int32_t starts[SEQUENCES + 1] = {0, 1, 10, NEW_TOKENS};
  Cache cache;
  T *k = random<T>(reserve, slots * KV_HEADS * how.dim), *v = random<T>(reserve, slots * KV_HEADS * how.dim);
  T* q = random<T>(reserve, NEW_TOKENS * how.heads * how.dim);
  int64_t* mapping = reserve.get<int64_t>(slots);

  explicit Contexts(const AttentionCase& wanted) : how(wanted) {
    for (int32_t i = 0; i < blocks; i++) tables[i] = i * 7 % static_cast<int32_t>(blocks);
    for (int64_t i = 0; i < slots; i++) mapping[i] = i * 7 % slots;
    cache = {reserve.get<char>(bytes()), reserve.get<char>(bytes()), blocks, KV_HEADS, how.block_size, how.dim,
             KV_HEADS * how.block_size * how.dim, how.block_size * how.dim, how.dim, nullptr, nullptr, 0, 0,
             how.format};
    if (!quantised()) return;
    cache.k_scales = reserve.get<float>(slots * KV_HEADS), cache.v_scales = reserve.get<float>(slots * KV_HEADS);
    cache.scale_block_stride = KV_HEADS * how.block_size, cache.scale_head_stride = how.block_size;
  }

  bool quantised() const { return how.format == CacheFormat::INT8 || how.format == CacheFormat::FP8_E4M3; }
  int64_t bytes() const {
    const int64_t element = quantised() ? 1 : how.format == CacheFormat::BFLOAT16 ? sizeof(bf16) : sizeof(T);
    return slots * KV_HEADS * how.dim * element;
  }
  Context context(const int32_t* first_lengths, int64_t first, int64_t count) const {
    return {tables + first * blocks_each, blocks_each, blocks_each, count, first_lengths};
  }
  Heads rows(T* data, int64_t tokens, int64_t heads) const { return {data, tokens, heads, heads * how.dim, how.dim}; }
  Scoring scoring() const { return {0.2f, how.soft_cap, how.window}; }

  void write(const Ops& ops) const {
    ops.kv_write(type_of<T>(), rows(k, slots, KV_HEADS), rows(v, slots, KV_HEADS), cache, mapping, 1);
  }

  // `count` of the last sequence's new tokens, those from `begin` on.
  void prefill_chunk(const Ops& ops, int64_t begin, int64_t count, T* out) const {
    const int64_t at = (starts[SEQUENCES - 1] + begin) * how.heads * how.dim;
    const int32_t chunk[] = {0, static_cast<int32_t>(count)};
    const int32_t length = static_cast<int32_t>(LONGEST - (NEW_TOKENS - starts[SEQUENCES - 1]) + begin + count);
    ops.paged_prefill(type_of<T>(), rows(q + at, count, how.heads), cache, context(&length, SEQUENCES - 1, 1), chunk,
                      scoring(), rows(out + at, count, how.heads), 1);
  }

  void prefill(const Ops& ops, T* out) const {
    ops.paged_prefill(type_of<T>(), rows(q, NEW_TOKENS, how.heads), cache, context(lengths, 0, SEQUENCES), starts,
                      scoring(), rows(out, NEW_TOKENS, how.heads), 1);
  }
};

// The KV of a portable build's writes, decode and prefill over it, and prefill in chunks, which have the same bits.
template <class T>
void attention(const AttentionCase& how) {
  Contexts<T> it(how);
  const int64_t bytes = it.bytes(), row = how.heads * how.dim, size = it.NEW_TOKENS * row;
  compare<char>("kv_write", 2 * bytes, 0, [&](const Ops& ops, char* out) {
    it.write(ops);
    __builtin_memcpy(out, it.cache.k, bytes);
    __builtin_memcpy(out + bytes, it.cache.v, bytes);
  });
  it.write(ops_baseline);
  const float weights_rounded = sizeof(T) == 2 ? 0.02f : 0;
  compare<T>("paged_decode", it.SEQUENCES * row, TOLERANCE<T>, [&](const Ops& ops, T* out) {
    ops.paged_decode(type_of<T>(), it.rows(it.q, it.SEQUENCES, how.heads), it.cache,
                     it.context(it.lengths, 0, it.SEQUENCES), it.scoring(), it.rows(out, it.SEQUENCES, how.heads), 1);
  }, weights_rounded);
  const auto prefill = [&](const Ops& ops, T* out) { it.prefill(ops, out); };
  compare<T>("paged_prefill", size, TOLERANCE<T>, prefill, weights_rounded);
  for (const Ops* build : BUILDS) {
    Reserve reserve;
    T *whole = reserve.get<T>(size), *chunks = reserve.get<T>(size);
    it.prefill(*build, whole);
    __builtin_memcpy(chunks, whole, size * sizeof(T));
    const int64_t ends[] = {0, 33, 34, 66};
    for (int i = 0; i < 3; i++) it.prefill_chunk(*build, ends[i], ends[i + 1] - ends[i], chunks);
    const bool same = __builtin_memcmp(chunks, whole, size * sizeof(T)) == 0;
    report(build->isa, "paged_prefill in chunks", type_name<T>(), same ? 0 : 1, 0);
  }
}

template <class T>
void attentions() {
  const CacheFormat formats[] = {CacheFormat::AS_COMPUTED, CacheFormat::INT8, CacheFormat::FP8_E4M3,
                                 CacheFormat::BFLOAT16};
  const int64_t dims[] = {8, 20, 96, 256}, windows[] = {1, 21, 70, 100};
  for (CacheFormat format : formats)
    for (int64_t dim : dims) attention<T>({dim, 16, 4, format});
  for (int64_t window : windows) attention<T>({64, 5, 2, CacheFormat::AS_COMPUTED, window});
  attention<T>({80, 1, 18, CacheFormat::AS_COMPUTED, INT64_MAX, 10});
}

template <class T>
void sampling() {
  Reserve reserve;
  const int64_t rows = 6, vocab = 1003;
  const T* logits = random<T>(reserve, rows * vocab);
  const double infinity = __builtin_inf();
  const Draw draws[rows] = {{0, 0, 1, -infinity, 0},      {1, 0, 1, -infinity, 0.7},   {0.5f, 40, 1, -infinity, 0.2},
                            {1, 0, 0.9, -infinity, 0.99}, {2, 7, 0.5, -infinity, 0.4}, {1, 0, 1, -1.5, 0.5}};
  auto* scratch = reserve.get<uint64_t>(rows * vocab);
  constexpr bool narrow = sizeof(T) == 2;
  compare<int64_t>(narrow ? "sample bfloat16" : "sample", rows, 0, [&](const Ops& ops, int64_t* out) {
    ops.sample(type_of<T>(), logits, vocab, rows, vocab, draws, scratch, out, 1);
  });
  compare<int64_t>(narrow ? "sample bfloat16 greedily" : "sample greedily", rows, 0, [&](const Ops& ops, int64_t* out) {
    ops.sample(type_of<T>(), logits, vocab, rows, vocab, nullptr, nullptr, out, 1);
  });
}

}  // namespace

extern "C" void run() {
  start_report();
  float_linears<bf16, bf16>();
  float_linears<float, bf16>();
  float_linears<float, float>();
  float_linears<bf16, float>();
  for (DType dtype : {INT8, INT4}) {
    integer_linears<float>(dtype);
    integer_linears<bf16>(dtype);
  }
  row_ops<float>();
  row_ops<bf16>();
  attentions<float>();
  attentions<bf16>();
  sampling<float>();
  sampling<bf16>();
  end_report();
}
