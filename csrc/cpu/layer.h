// What a decoder layer does to one row between its matrix products: norm, activation, rotation.
// Compiled once per instruction set (layer_<level>.cpp). A row's result depends on nothing beside
// it, and values are rounded to the row's dtype where transformers' own layers round them, so that
// only the order of a norm's sum tells them apart.
#pragma once

#include <cstdint>

#include "common.h"

namespace eagle2 {

struct LayerKernel {
  // out = weight * round(x / sqrt(mean(x^2) + eps)), the quotient in float32. `out` may be `x`.
  void (*rms_norm)(const void* x, const void* weight, int64_t width, float eps, void* out);
  // residual = round(residual + x), then x = rms_norm(residual).
  void (*add_rms_norm)(void* x, void* residual, const void* weight, int64_t width, float eps);
  // residual = round(residual + x).
  void (*add)(const void* x, void* residual, int64_t width);
  // out = round(silu(gate)) * up; silu(x) = x / (1 + e^-x). `out` may be `gate`.
  void (*silu_and_mul)(const void* gate, const void* up, int64_t width, void* out);
  // out = x cos + [-second half of x; first half] sin, of `width` (even) elements. With cos and sin
  // in the row's dtype both products are rounded to it before they are added.
  void (*rotate)(const void* x, const void* cos, const void* sin, int64_t width, void* out);
  // The same with cos and sin in float32: only the sum is rounded to the row's dtype.
  void (*rotate_wide)(const void* x, const float* cos, const float* sin, int64_t width, void* out);
};

// float32, float16, bfloat16, in this order.
using LayerKernels = const LayerKernel[3];

// The kernel of cpu_isa() for rows of this dtype; float64 has one for all levels. `name` is for the
// error about another dtype.
const LayerKernel& layer_kernel(ScalarType type, const char* name);

namespace portable {
extern LayerKernels kLayerKernels;
}
namespace avx2 {
extern LayerKernels kLayerKernels;
}
namespace avx512 {
extern LayerKernels kLayerKernels;
}

}  // namespace eagle2
