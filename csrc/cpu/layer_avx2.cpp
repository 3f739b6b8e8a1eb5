// Rows of a decoder layer with AVX2.
#include "attention_includes.h"
#include "layer.h"

#ifdef EAGLE2_X86_LEVELS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
namespace eagle2::avx2 {
#define EAGLE2_VECTOR_BYTES 32
#include "layer_kernel.h"
}  // namespace eagle2::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // EAGLE2_X86_LEVELS
