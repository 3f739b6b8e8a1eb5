// Which instruction set the CPU kernels use: the best level this CPU has, or the one that
// EAGLE2_CPU_ISA names. Sources compiled per level ask cpu_isa() once per call, so that a test can
// run the same table at every level of one machine.
#pragma once

// Levels beyond portable exist where the compiler can switch them on inside a file.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define EAGLE2_X86_LEVELS 1
#endif

namespace eagle2 {

// In ascending order; each includes those before it.
enum class Isa {
  kPortable,    // what the compiler's target has: SSE2, NEON
  kAvx2,        // avx2, fma, f16c
  kAvx512,      // avx512 f, bw, dq, vl
  kAvx512Bf16,  // vdpbf16ps: products of bfloat16 pairs, summed in float32
};

// The matrix unit (AMX: amx-tile, amx-bf16) beside kAvx512Bf16. The model does in software what the
// unit does; only EAGLE2_CPU_ISA=amx_model asks for it, to test the kernel without the unit.
enum class Matrix { kNone, kModel, kAmx };

struct Level {
  const char* name;
  Isa isa;
  Matrix matrix;
};

// portable, avx2, avx512, avx512_bf16, amx_model, amx: the one in use, decided at the first call.
// Throws when EAGLE2_CPU_ISA names no level or one that this CPU does not have: a forced level
// never falls back.
const Level& cpu_level();

inline Isa cpu_isa() { return cpu_level().isa; }

}  // namespace eagle2
