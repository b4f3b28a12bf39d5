// Runs each build of the CPU kernels on one processor, an emulated one, and compares its results with the portable
// build's.
//
// There is no operating system and no library underneath: boot.S calls run(), the report leaves by the serial port.
#include "driver.h"

extern const Ops ops_baseline, ops_avx512, ops_avx512bf16, ops_amx;

namespace {

const Ops* const BUILDS[] = {&ops_avx512, &ops_avx512bf16, &ops_amx};

// One op with its inputs, as any build can run it into `out`.
template <class T, class Run>
void compare(const char* what, int64_t size, float tolerance, const Run& run) {
  Reserve reserve;
  T *expected = reserve.get<T>(size), *actual = reserve.get<T>(size);
  run(ops_baseline, expected);
  for (const Ops* build : BUILDS) {
    run(*build, actual);
    report(build->isa, what, type_name<T>(), worst_error(expected, actual, size), tolerance);
  }
}

template <class T>
constexpr float TOLERANCE = sizeof(T) == 2 ? 1.01f / 128 : 1e-4f;  // two units of bfloat16's last place at most

// `by_rows` (or null): the same weights for the builds that take rows as they are.
template <class X>
void linear_case(const char* what, const Weights& weights, const Weights* by_rows, int64_t rows, bool with_bias) {
  Reserve reserve;
  const auto weights_for = [&](const Ops& ops) -> const Weights& {
    return by_rows != nullptr && (&ops == &ops_avx512bf16 || &ops == &ops_amx) ? *by_rows : weights;
  };
  const int64_t stride = weights.depth + 3;
  int64_t columns = 0;
  for (int64_t i = 0; i < weights.count; i++) columns += weights.matrices[i].rows;
  const X *x = random<X>(reserve, rows * stride), *bias = random<X>(reserve, columns);
  const auto run = [&](const Ops& ops, X* out) {
    ops.linear(type_of<X>(), x, stride, rows, weights_for(ops), with_bias ? bias : nullptr, out, 1);
  };
  compare<X>(what, rows * columns, TOLERANCE<X>, run);
  for (const Ops* build : BUILDS) {  // a row alone has the same bits
    X *all = reserve.get<X>(rows * columns), *alone = reserve.get<X>(columns);
    run(*build, all);
    build->linear(type_of<X>(), x + (rows - 1) * stride, stride, 1, weights_for(*build), with_bias ? bias : nullptr, alone,
                  1);
    const bool same = __builtin_memcmp(alone, all + (rows - 1) * columns, columns * sizeof(X)) == 0;
    report(build->isa, "linear, a row alone", type_name<X>(), same ? 0 : 1, 0);
  }
}

// `rows` in the order of kernels/panels.py.
template <class W>
Matrix in_panels(Reserve& reserve, const Matrix& rows, int64_t depth) {
  constexpr int64_t PANEL = 16;
  W* packed = reserve.get<W>((rows.rows + PANEL - 1) / PANEL * PANEL * depth);
  __builtin_memset(packed, 0, (rows.rows + PANEL - 1) / PANEL * PANEL * depth * sizeof(W));
  for (int64_t r = 0; r < rows.rows; r++)
    for (int64_t k = 0; k < depth; k++) {
      const int64_t within = r % PANEL, half = PANEL / 2;
      const int64_t place = sizeof(W) == 2 ? 2 * (within % half) + within / half : within;
      packed[(r / PANEL * depth + k) * PANEL + place] = static_cast<const W*>(rows.data)[r * rows.stride + k];
    }
  return {packed, rows.rows, depth * PANEL, nullptr, nullptr, nullptr};
}

template <class X, class W>
void float_linears() {
  const int64_t depths[] = {1, 31, 32, 33, 100, 576, 1540}, widths[] = {1, 15, 16, 33, 64, 97};
  const int64_t counts[] = {1, 2, 9, 17, 33, 50, 150};
  constexpr bool BY_ROWS = sizeof(X) == 2 && sizeof(W) == 2;
  int next = 0;
  for (int64_t depth : depths)
    for (int64_t width : widths) {
      Reserve reserve;
      const int64_t stride = depth + 5, rows = counts[next++ % 7], parts = next % 3 == 0 ? 2 : 1;
      const W* data = random<W>(reserve, (width + 40) * stride);
      const Matrix plain[] = {{data, width, stride, nullptr, nullptr, nullptr},
                              {data + width * stride, 40, stride, nullptr, nullptr, nullptr}};
      const Matrix packed[] = {in_panels<W>(reserve, plain[0], depth), in_panels<W>(reserve, plain[1], depth)};
      const Weights by_rows{type_of<W>(), plain, parts, depth, 0, FLOAT32, Layout::ROWS};
      linear_case<X>(sizeof(W) == 2 ? "linear over bfloat16" : "linear over float32",
                     {type_of<W>(), packed, parts, depth, 0, FLOAT32, Layout::PANELS}, BY_ROWS ? &by_rows : nullptr, rows,
                     next % 2 == 0);
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
                       {dtype, &part, 1, depth, group, FLOAT32, Layout::PANELS}, nullptr, rows, true);
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

// A cache that `ops` itself has written, then decode and prefill over it.
template <class T>
void attention(int64_t dim, CacheFormat format, int64_t window, float soft_cap) {
  Reserve reserve;
  const int64_t blocks = 12, block_size = 16, kv_heads = 2, heads = 6, slots = blocks * block_size;
  const bool quantised = format == CacheFormat::INT8 || format == CacheFormat::FP8_E4M3;
  const int64_t rows = blocks * kv_heads * block_size;
  const int64_t element = quantised ? 1 : format == CacheFormat::BFLOAT16 ? sizeof(bf16) : sizeof(T);
  const int64_t bytes = rows * dim * element;
  Cache cache{reserve.get<char>(bytes), reserve.get<char>(bytes), blocks, kv_heads, block_size, dim,
              kv_heads * block_size * dim, block_size * dim, dim, nullptr, nullptr, 0, 0, format};
  if (quantised) {
    cache.k_scales = reserve.get<float>(rows), cache.v_scales = reserve.get<float>(rows);
    cache.scale_block_stride = kv_heads * block_size, cache.scale_head_stride = block_size;
  }
  T *k = random<T>(reserve, slots * kv_heads * dim), *v = random<T>(reserve, slots * kv_heads * dim);
  auto* mapping = reserve.get<int64_t>(slots);
  for (int64_t i = 0; i < slots; i++) mapping[i] = i * 7 % slots;
  const auto write = [&](const Ops& ops) {
    ops.kv_write(type_of<T>(), {k, slots, kv_heads, kv_heads * dim, dim}, {v, slots, kv_heads, kv_heads * dim, dim},
                 cache, mapping, 1);
  };
  compare<char>("kv_write", 2 * bytes, 0, [&](const Ops& ops, char* out) {
    write(ops);
    __builtin_memcpy(out, cache.k, bytes);
    __builtin_memcpy(out + bytes, cache.v, bytes);
  });
  write(ops_baseline);
  const int32_t tables[] = {3, 1, 8, 5, 0, 2, 7, 4, 11, 6, 9, 10}, lengths[] = {1, 50, 64}, starts[] = {0, 1, 40, 57};
  const Context context{tables, 4, 4, 3, lengths};
  const Scoring scoring{0.2f, soft_cap, window};
  T* q = random<T>(reserve, 57 * heads * dim);
  compare<T>("paged_decode", 3 * heads * dim, TOLERANCE<T>, [&](const Ops& ops, T* out) {
    ops.paged_decode(type_of<T>(), {q, 3, heads, heads * dim, dim}, cache, context, scoring,
                     {out, 3, heads, heads * dim, dim}, 1);
  });
  compare<T>("paged_prefill", 57 * heads * dim, TOLERANCE<T>, [&](const Ops& ops, T* out) {
    ops.paged_prefill(type_of<T>(), {q, 57, heads, heads * dim, dim}, cache, context, starts, scoring,
                      {out, 57, heads, heads * dim, dim}, 1);
  });
}

template <class T>
void attentions() {
  const CacheFormat formats[] = {CacheFormat::AS_COMPUTED, CacheFormat::INT8, CacheFormat::FP8_E4M3,
                                 CacheFormat::BFLOAT16};
  const int64_t dims[] = {8, 20, 64, 96, 256};
  for (CacheFormat format : formats)
    for (int64_t dim : dims) attention<T>(dim, format, INT64_MAX, 0);
  attention<T>(64, CacheFormat::AS_COMPUTED, 21, 0);
  attention<T>(64, CacheFormat::AS_COMPUTED, INT64_MAX, 10);
}

void sampling() {
  Reserve reserve;
  const int64_t rows = 6, vocab = 1003;
  const float* logits = random<float>(reserve, rows * vocab);
  const double infinity = __builtin_inf();
  const Draw draws[rows] = {{0, 0, 1, -infinity, 0},      {1, 0, 1, -infinity, 0.7},   {0.5f, 40, 1, -infinity, 0.2},
                            {1, 0, 0.9, -infinity, 0.99}, {2, 7, 0.5, -infinity, 0.4}, {1, 0, 1, -1.5, 0.5}};
  auto* scratch = reserve.get<uint64_t>(rows * vocab);
  compare<int64_t>("sample", rows, 0, [&](const Ops& ops, int64_t* out) {
    ops.sample(logits, vocab, rows, vocab, draws, scratch, out, 1);
  });
  compare<int64_t>("sample greedily", rows, 0, [&](const Ops& ops, int64_t* out) {
    ops.sample(logits, vocab, rows, vocab, nullptr, nullptr, out, 1);
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
  sampling();
  end_report();
}
