// The linear kernel with AVX-512 and its products of bfloat16 pairs.
#include "linear_includes.h"

#ifdef EAGLE2_X86_LEVELS
#if defined(__clang__)
#pragma clang attribute push(                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#endif
namespace eagle2::avx512_bf16 {
#define EAGLE2_VECTOR_BYTES 64
#define EAGLE2_BF16_PAIRS
#include "linear_kernel.h"
}  // namespace eagle2::avx512_bf16

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // EAGLE2_X86_LEVELS
