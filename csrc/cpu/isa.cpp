#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace eagle2 {
namespace {

constexpr Isa kLevels[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

Isa best_isa() {
#ifdef EAGLE2_X86_LEVELS
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return Isa::kPortable;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx2;
  }
  return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
#else
  return Isa::kPortable;
#endif
}

Isa choose_isa(const char* wish, Isa best) {
  if (wish == nullptr || *wish == '\0') return best;
  for (const Isa isa : kLevels) {
    if (std::strcmp(wish, isa_name(isa)) != 0) continue;
    if (isa <= best) return isa;
    throw std::runtime_error(std::string("EAGLE2_CPU_ISA: this CPU has no ") + wish +
                             ", its best level is " + isa_name(best));
  }
  throw std::runtime_error(
      std::string("EAGLE2_CPU_ISA: expected portable, avx2, avx512 or avx512_bf16 (there are no "
                  "kernels for AMX), got '") +
      wish + "'");
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    default:
      return "portable";
  }
}

Isa cpu_isa() {
  static const Isa isa = choose_isa(std::getenv("EAGLE2_CPU_ISA"), best_isa());
  return isa;
}

}  // namespace eagle2

// For `python -m eagle2_kernels.env` and the tests: the level that `wish` gives on a CPU whose best
// is `best`, or why there is none. Null: what EAGLE2_CPU_ISA says; the best of this CPU.
extern "C" __attribute__((visibility("default"))) const char* eagle2_choose_isa(const char* wish,
                                                                                const char* best) {
  static thread_local std::string words;
  try {
    if (wish == nullptr && best == nullptr) return eagle2::isa_name(eagle2::cpu_isa());
    eagle2::Isa most = eagle2::best_isa();
    for (const eagle2::Isa isa : eagle2::kLevels) {
      if (best != nullptr && std::strcmp(best, eagle2::isa_name(isa)) == 0) most = isa;
    }
    return eagle2::isa_name(eagle2::choose_isa(wish, most));
  } catch (const std::exception& error) {
    words = error.what();
    return words.c_str();
  }
}
