// All CPU kernels for one instruction set. build.py compiles this file once for each, with -DISA=<name>.
#include "block_copy.h"
#include "decoder.h"
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

namespace {

template <auto FLOAT32_OP, auto BFLOAT16_OP, class... Arguments>
int64_t by_type(DType dtype, Arguments... arguments) {
  return dtype == BFLOAT16 ? BFLOAT16_OP(arguments...) : FLOAT32_OP(arguments...);
}

}  // namespace

extern const Ops JOIN(ops_, ISA);
const Ops JOIN(ops_, ISA) = {
    TEXT(ISA),
    by_type<paged_decode<float>, paged_decode<bf16>>,
    by_type<paged_prefill<float>, paged_prefill<bf16>>,
    by_type<kv_write<float>, kv_write<bf16>>,
    by_type<rms_norm<float>, rms_norm<bf16>>,
    by_type<rope<float>, rope<bf16>>,
    by_type<silu_mul<float>, silu_mul<bf16>>,
    by_type<gelu_mul<float>, gelu_mul<bf16>>,
    by_type<linear<float>, linear<bf16>>,
    by_type<run_stages<float>, run_stages<bf16>>,
    by_type<forward<float>, forward<bf16>>,
    copy_rows,
    sample,
};
