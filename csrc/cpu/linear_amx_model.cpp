// linear_amx.cpp on the software model of the matrix unit, for tests.
#include "linear_includes.h"

#ifdef EAGLE2_X86_LEVELS
#if defined(__clang__)
#pragma clang attribute push(                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#endif
#include "tiles.h"
namespace eagle2::amx_model {
#define EAGLE2_VECTOR_BYTES 64
#define EAGLE2_BF16_PAIRS
#define EAGLE2_TILES TileModel
#include "linear_kernel.h"
}  // namespace eagle2::amx_model

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // EAGLE2_X86_LEVELS
