// Rows of a decoder layer for what the compiler targets by itself, those of float64, and the choice
// between levels.
#include "attention_includes.h"
#include "layer.h"

namespace eagle2::portable {
#define EAGLE2_VECTOR_BYTES 16
#include "layer_kernel.h"
}  // namespace eagle2::portable

namespace eagle2 {
namespace {

// Float64 rows are for checking: one element after another.
namespace f64 {

void scale_row(const double* x, const double* weight, int64_t width, float eps, double* out) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) {
    const float value = static_cast<float>(x[i]);
    sum += static_cast<double>(value) * value;
  }
  const float mean = static_cast<float>(sum / static_cast<double>(width));
  const float scale = 1.0f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < width; ++i) out[i] = static_cast<float>(x[i]) * scale * weight[i];
}

void rms_norm(const void* x, const void* weight, int64_t width, float eps, void* out) {
  scale_row(static_cast<const double*>(x), static_cast<const double*>(weight), width, eps,
            static_cast<double*>(out));
}

void add(const void* x, void* residual, int64_t width) {
  const double* row = static_cast<const double*>(x);
  double* sum = static_cast<double*>(residual);
  for (int64_t i = 0; i < width; ++i) sum[i] += row[i];
}

void add_rms_norm(void* x, void* residual, const void* weight, int64_t width, float eps) {
  add(x, residual, width);
  scale_row(static_cast<double*>(residual), static_cast<const double*>(weight), width, eps,
            static_cast<double*>(x));
}

void silu_and_mul(const void* gate, const void* up, int64_t width, void* out) {
  const double* g = static_cast<const double*>(gate);
  const double* u = static_cast<const double*>(up);
  double* target = static_cast<double*>(out);
  for (int64_t i = 0; i < width; ++i) target[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
}

template <typename C>
void rotate_row(const double* x, const C* cos, const C* sin, int64_t width, double* out) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double first = x[i], second = x[half + i];
    out[i] = first * cos[i] - second * sin[i];
    out[half + i] = second * cos[half + i] + first * sin[half + i];
  }
}

void rotate(const void* x, const void* cos, const void* sin, int64_t width, void* out) {
  rotate_row(static_cast<const double*>(x), static_cast<const double*>(cos),
             static_cast<const double*>(sin), width, static_cast<double*>(out));
}

void rotate_wide(const void* x, const float* cos, const float* sin, int64_t width, void* out) {
  rotate_row(static_cast<const double*>(x), cos, sin, width, static_cast<double*>(out));
}

constexpr LayerKernel kKernel = {&rms_norm,     &add_rms_norm, &add,
                                 &silu_and_mul, &rotate,       &rotate_wide};

}  // namespace f64

LayerKernels& kernels_of_level() {
  switch (cpu_isa()) {
#ifdef EAGLE2_X86_LEVELS
    case Isa::kAvx2:
      return avx2::kLayerKernels;
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
      return avx512::kLayerKernels;
#endif
    default:
      return portable::kLayerKernels;
  }
}

}  // namespace

const LayerKernel& layer_kernel(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Float:
      return kernels_of_level()[0];
    case ScalarType::Half:
      return kernels_of_level()[1];
    case ScalarType::BFloat16:
      return kernels_of_level()[2];
    case ScalarType::Double:
      return f64::kKernel;
    default:
      fail(name, ": expected dtype float32, float64, float16 or bfloat16, got ",
           torch::headeronly::toString(type));
  }
}

}  // namespace eagle2
