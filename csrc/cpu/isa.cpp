#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef EAGLE2_X86_LEVELS
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace eagle2 {
namespace {

constexpr Level kLevels[] = {
    {"portable", Isa::kPortable, Matrix::kNone},
    {"avx2", Isa::kAvx2, Matrix::kNone},
    {"avx512", Isa::kAvx512, Matrix::kNone},
    {"avx512_bf16", Isa::kAvx512Bf16, Matrix::kNone},
    {"amx_model", Isa::kAvx512Bf16, Matrix::kModel},
    {"amx", Isa::kAvx512Bf16, Matrix::kAmx},
};

const Level& level_of(Isa isa, Matrix matrix) {
  for (const Level& level : kLevels) {
    if (level.isa == isa && level.matrix == matrix) return level;
  }
  return kLevels[0];
}

// A process uses the tiles when the CPU has them and the kernel lets it: their state is large, so
// that Linux saves it only for a process that has asked. The permission holds for all threads,
// those that run already included.
bool may_use_tiles() {
#if defined(EAGLE2_X86_LEVELS) && defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // CPUID 7.0 EDX
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kGetPermitted = 0x1022, kRequest = 0x1023;  // ARCH_*_XCOMP_PERM, <asm/prctl.h>
  constexpr unsigned long kTileConfig = 17, kTileData = 18;  // bits of XCR0
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0) return false;
  unsigned long permitted = 0;
  if (syscall(SYS_arch_prctl, kGetPermitted, &permitted) != 0) return false;
  return (permitted >> kTileConfig & 1) != 0 && (permitted >> kTileData & 1) != 0;
#else
  return false;
#endif
}

const Level& best_level() {
#ifdef EAGLE2_X86_LEVELS
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return level_of(Isa::kPortable, Matrix::kNone);
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return level_of(Isa::kAvx2, Matrix::kNone);
  }
  if (!__builtin_cpu_supports("avx512bf16")) return level_of(Isa::kAvx512, Matrix::kNone);
  return level_of(Isa::kAvx512Bf16, may_use_tiles() ? Matrix::kAmx : Matrix::kNone);
#else
  return level_of(Isa::kPortable, Matrix::kNone);
#endif
}

const Level& choose_level(const char* wish, const Level& best) {
  if (wish == nullptr || *wish == '\0') return best;
  for (const Level& level : kLevels) {
    if (std::strcmp(wish, level.name) != 0) continue;
    const bool unit = level.matrix != Matrix::kAmx || best.matrix == Matrix::kAmx;
    if (level.isa <= best.isa && unit) return level;
    throw std::runtime_error(std::string("EAGLE2_CPU_ISA: this CPU has no ") + wish +
                             ", its best level is " + best.name);
  }
  throw std::runtime_error(
      std::string(
          "EAGLE2_CPU_ISA: expected portable, avx2, avx512, avx512_bf16, amx_model or amx, got '") +
      wish + "'");
}

}  // namespace

const Level& cpu_level() {
  static const Level& level = choose_level(std::getenv("EAGLE2_CPU_ISA"), best_level());
  return level;
}

}  // namespace eagle2

// For `python -m eagle2_kernels.env` and the tests: the level that `wish` gives on a CPU whose best
// is `best`, or why there is none. Null: what EAGLE2_CPU_ISA says; the best of this CPU.
extern "C" __attribute__((visibility("default"))) const char* eagle2_choose_isa(const char* wish,
                                                                                const char* best) {
  static thread_local std::string words;
  try {
    if (wish == nullptr && best == nullptr) return eagle2::cpu_level().name;
    const eagle2::Level* most = &eagle2::best_level();
    for (const eagle2::Level& level : eagle2::kLevels) {
      if (best != nullptr && std::strcmp(best, level.name) == 0) most = &level;
    }
    return eagle2::choose_level(wish, *most).name;
  } catch (const std::exception& error) {
    words = error.what();
    return words.c_str();
  }
}
