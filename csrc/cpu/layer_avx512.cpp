// Rows of a decoder layer with AVX-512.
#include "attention_includes.h"
#include "layer.h"

#ifdef EAGLE2_X86_LEVELS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
namespace eagle2::avx512 {
#define EAGLE2_VECTOR_BYTES 64
#include "layer_kernel.h"
}  // namespace eagle2::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // EAGLE2_X86_LEVELS
