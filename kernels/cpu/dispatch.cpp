// Chooses, at run time, the build of the kernels that this processor can run. One binary serves every machine.
#include <cstring>

#include "ops.h"

#ifdef HAVE_X86_LEVELS
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

OpenMp openmp = {};
__thread Membership membership = {};

extern const Ops ops_baseline;
#ifdef HAVE_X86_LEVELS
extern const Ops ops_avx2;
extern const Ops ops_avx512;
extern const Ops ops_avx512bf16;
extern const Ops ops_amx;

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

// Older compilers know no names for these either. The build also multiplies bytes by VNNI.
static bool has_avx512bf16() {
  constexpr unsigned AVX512_VNNI = 1 << 11, AVX512_BF16 = 1 << 5;
  unsigned a, b, c, d;
  if (!has_avx512() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (c & AVX512_VNNI) == 0) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & AVX512_BF16) != 0;
}

#if defined(__linux__)
// Linux gives the tile registers to no process that has not asked for them; once for all its threads is enough.
static bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static bool has_amx() {
  constexpr unsigned AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24;
  unsigned a, b, c, d;
  if (!has_avx512bf16() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & AMX_BF16) != 0 && (d & AMX_TILE) != 0 && may_use_tiles();
}
#else
static bool has_amx() { return false; }
#endif
#endif

// The best build that runs here, or the one named `isa`; null when that one is unknown or cannot run here.
EXPORT const Ops* pdserve_ops(const char* isa) {
  const auto wanted = [isa](const Ops& ops) { return isa == nullptr || std::strcmp(isa, ops.isa) == 0; };
#ifdef HAVE_X86_LEVELS
  if (wanted(ops_amx) && has_amx()) return &ops_amx;
  if (wanted(ops_avx512bf16) && has_avx512bf16()) return &ops_avx512bf16;
  if (wanted(ops_avx512) && has_avx512()) return &ops_avx512;
  if (wanted(ops_avx2) && has_avx2()) return &ops_avx2;
#endif
  return wanted(ops_baseline) ? &ops_baseline : nullptr;
}

// Runs the kernels on this thread pool: torch's own, so that the two never compete for cores.
EXPORT void pdserve_use_pool(decltype(OpenMp::parallel) parallel, decltype(OpenMp::num_threads) num_threads) {
  openmp = {parallel, num_threads};
}
