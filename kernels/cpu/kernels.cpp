// All CPU kernels for one instruction set. build.py compiles this file once for each, with -DISA=<name>.
#include "block_copy.h"
#include "decoder.h"
#include "gates.h"
#include "linear.h"
#include "ops.h"
#include "paged_decode.h"
#include "paged_prefill.h"
#include "rowwise.h"
#include "sampling.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#ifdef BASE_OPS  // computes float32, which gains nothing from this build's instructions
#define BY_TYPE(op) by_type<&Ops::op, op<bf16>>
#else
#define BY_TYPE(op) by_type<op<float>, op<bf16>>
#endif

namespace {

template <auto FLOAT32_OP, auto BFLOAT16_OP, class... Arguments>
int64_t by_type(DType dtype, Arguments... arguments) {
  if (dtype == BFLOAT16) return BFLOAT16_OP(arguments...);
#ifdef BASE_OPS
  return (BASE_OPS.*FLOAT32_OP)(dtype, arguments...);
#else
  return FLOAT32_OP(arguments...);
#endif
}

}  // namespace

extern const Ops JOIN(ops_, ISA);
const Ops JOIN(ops_, ISA) = {
    TEXT(ISA),
    BY_TYPE(paged_decode),
    BY_TYPE(paged_prefill),
    BY_TYPE(kv_write),
    BY_TYPE(rms_norm),
    BY_TYPE(rope),
    BY_TYPE(silu_mul),
    BY_TYPE(gelu_mul),
    BY_TYPE(linear),
    BY_TYPE(run_stages),
    BY_TYPE(forward),
    copy_rows,
    BY_TYPE(sample),
};
