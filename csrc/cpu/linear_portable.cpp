// The linear kernel for what the compiler targets by itself, and the choice between levels.
#include "linear_includes.h"

namespace eagle2::portable {
#define EAGLE2_VECTOR_BYTES 16
#include "linear_kernel.h"
}  // namespace eagle2::portable

namespace eagle2 {

const LinearKernel& linear_kernel() {
#ifdef EAGLE2_X86_LEVELS
  if (cpu_level().matrix == Matrix::kAmx) return amx::kLinearKernel;
  if (cpu_level().matrix == Matrix::kModel) return amx_model::kLinearKernel;
#endif
  switch (cpu_isa()) {
#ifdef EAGLE2_X86_LEVELS
    case Isa::kAvx2:
      return avx2::kLinearKernel;
    case Isa::kAvx512:
      return avx512::kLinearKernel;
    case Isa::kAvx512Bf16:
      return avx512_bf16::kLinearKernel;
#endif
    default:
      return portable::kLinearKernel;
  }
}

}  // namespace eagle2
