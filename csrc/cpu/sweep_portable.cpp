// The sweep for what the compiler targets by itself, and the choice between levels.
#include <array>
#include <cmath>
#include <limits>

#include "isa.h"
#include "sweep.h"

#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace eagle2::portable {
#define EAGLE2_VECTOR_BYTES 16
#include "sweep_kernel.h"
}  // namespace eagle2::portable

namespace eagle2 {

const SweepKernel& sweep_kernel() {
  switch (cpu_isa()) {
#ifdef EAGLE2_X86_LEVELS
    case Isa::kAvx2:
      return avx2::kSweepKernel;
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
      return avx512::kSweepKernel;
#endif
    default:
      return portable::kSweepKernel;
  }
}

}  // namespace eagle2
