// Chooses, at run time, the build of the kernels that this processor can run. One binary serves every machine.
#include <cstring>

#include "ops.h"

#ifdef HAVE_X86_LEVELS
#include <cpuid.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

OpenMp openmp = {};

extern const Ops ops_baseline;
#ifdef HAVE_X86_LEVELS
extern const Ops ops_avx2;
extern const Ops ops_avx512;

// Older compilers know no name for it.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The best build that runs here, or the one named `isa`; null when that one is unknown or cannot run here.
EXPORT const Ops* pdserve_ops(const char* isa) {
  const auto wanted = [isa](const Ops& ops) { return isa == nullptr || std::strcmp(isa, ops.isa) == 0; };
#ifdef HAVE_X86_LEVELS
  if (wanted(ops_avx512) && has_avx512()) return &ops_avx512;
  if (wanted(ops_avx2) && has_avx2()) return &ops_avx2;
#endif
  return wanted(ops_baseline) ? &ops_baseline : nullptr;
}

// Runs the kernels on this thread pool: torch's own, so that the two never compete for cores.
EXPORT void pdserve_use_pool(decltype(OpenMp::parallel) parallel, decltype(OpenMp::num_threads) num_threads) {
  openmp = {parallel, num_threads};
}
