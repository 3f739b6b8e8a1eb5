// The attention kernel for bfloat16 caches on the matrix unit (AMX). No machine of this project has
// one: this file is compiled and disassembled, attention_amx_model.cpp is what runs.
#include "attention_includes.h"

#ifdef EAGLE2_X86_LEVELS
#if defined(__clang__)
#pragma clang attribute push(                                                            \
    __attribute__((                                                                      \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")
#endif
#include "tiles.h"
namespace eagle2::amx {
#define EAGLE2_VECTOR_BYTES 64
#define EAGLE2_BF16_PAIRS
#define EAGLE2_TILES TileUnit
#include "attention_kernel.h"
}  // namespace eagle2::amx

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // EAGLE2_X86_LEVELS
