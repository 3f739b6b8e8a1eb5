// The sweep with AVX2 and FMA.
#include <array>
#include <cmath>
#include <limits>

#include "isa.h"
#include "sweep.h"

#ifdef EAGLE2_X86_LEVELS
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
namespace eagle2::avx2 {
#define EAGLE2_VECTOR_BYTES 32
#include "sweep_kernel.h"
}  // namespace eagle2::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // EAGLE2_X86_LEVELS
