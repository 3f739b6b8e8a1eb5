// The vocabulary loops of rows.h. Floating-point choices are made on the bits, as in tree.h, so
// that they vectorise under strict semantics.
#include "rows.h"

#include <cstring>
#include <limits>

#include "../tree.h"

// One body, one copy per instruction set, chosen when the library is loaded. Fused multiply-adds
// are explicit in what the copies call, so all copies give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define EAGLE2_PER_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EAGLE2_PER_ISA
#endif

namespace eagle2 {
namespace {

constexpr int kLanes = 16;

inline float clean(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t finite = bits == 0x7f800000u ? 0x7f7fffffu : bits;
  return bits_float(magnitude > 0x7f800000u ? 0xff800000u : finite);
}

inline double clean(double x) {
  if (std::isnan(x)) return -INFINITY;
  return x == INFINITY ? std::numeric_limits<double>::max() : x;
}

EAGLE2_PER_ISA void read_float(const float* in, int64_t count, int64_t stride, float* out) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = clean(in[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = clean(in[i * stride]);
  }
}

EAGLE2_PER_ISA void read_bfloat16(const uint16_t* in, int64_t count, int64_t stride, float* out) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = clean(bits_float(uint32_t{in[i]} << 16));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = clean(bits_float(uint32_t{in[i * stride]} << 16));
    }
  }
}

// The exponent is rebased by an exact product, which also normalises subnormals; infinities and
// NaN (all exponent bits set) get float's exponent.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  const uint32_t scaled = float_bits(bits_float(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return bits_float(sign | (magnitude >= 0x7c00u ? special : scaled));
}

EAGLE2_PER_ISA void read_half(const uint16_t* in, int64_t count, int64_t stride, float* out) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = clean(half_to_float(in[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = clean(half_to_float(in[i * stride]));
  }
}

// Between the bits of a float and an integer that orders as the float does; its own inverse.
inline int32_t flip_negative(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

}  // namespace

Logits logits_view(const Tensor& tensor, const char* name) {
  Logits logits;
  logits.type = tensor.scalar_type();
  if (logits.type != ScalarType::Float && logits.type != ScalarType::Double &&
      logits.type != ScalarType::Half && logits.type != ScalarType::BFloat16) {
    fail(name, ": expected a float dtype, got ", torch::headeronly::toString(logits.type));
  }
  if (tensor.dim() != 3) fail(name, ": expected 3 dimensions, got ", tensor.dim());
  if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor");
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int i = 0; i < 3; ++i) {
    logits.size[i] = sizes[i];
    logits.stride[i] = strides[i];
  }
  if (logits.size[2] < 1) fail(name, ": expected a vocabulary of at least 1, got 0");
  logits.item = static_cast<int64_t>(tensor.element_size());
  logits.data = static_cast<const char*>(tensor.const_data_ptr());
  return logits;
}

void read_logits(const Logits& logits, int64_t b, int64_t n, int64_t first, int64_t count,
                 float* out) {
  const void* in = logits.at(b, n, first);
  switch (logits.type) {
    case ScalarType::Float:
      return read_float(static_cast<const float*>(in), count, logits.stride[2], out);
    case ScalarType::BFloat16:
      return read_bfloat16(static_cast<const uint16_t*>(in), count, logits.stride[2], out);
    default:
      return read_half(static_cast<const uint16_t*>(in), count, logits.stride[2], out);
  }
}

void read_logits(const Logits& logits, int64_t b, int64_t n, int64_t first, int64_t count,
                 double* out) {
  const double* in = static_cast<const double*>(logits.at(b, n, first));
  for (int64_t i = 0; i < count; ++i) out[i] = clean(in[i * logits.stride[2]]);
}

EAGLE2_PER_ISA float largest(const float* x, int64_t count) {
  int32_t best = flip_negative(static_cast<int32_t>(0xff800000u));
  for (int64_t i = 0; i < count; ++i) {
    best = std::max(best, flip_negative(static_cast<int32_t>(float_bits(x[i]))));
  }
  return bits_float(static_cast<uint32_t>(flip_negative(best)));
}

double largest(const double* x, int64_t count) {
  double best = -INFINITY;
  for (int64_t i = 0; i < count; ++i) best = std::max(best, x[i]);
  return best;
}

EAGLE2_PER_ISA void exp_logits(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = exp_poly(x[i]);
}

void exp_logits(const double* x, int64_t count, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::exp(x[i]);
}

EAGLE2_PER_ISA void exp_masses(const float* x, int64_t count, float* out) {
  const uint32_t step = float_bits(0x1p-10f);  // from here on floats are multiples of 2^-33
  for (int64_t i = 0; i < count; ++i) {
    const float mass = exp_poly(x[i]);
    const uint32_t rounded = float_bits((mass + 0x1p-10f) - 0x1p-10f);
    out[i] = bits_float(float_bits(mass) < step ? rounded : float_bits(mass));
  }
}

void exp_masses(const double* x, int64_t count, double* out) {
  constexpr double kShift = 0x1.8p19;  // its last bit is 2^-33
  for (int64_t i = 0; i < count; ++i) out[i] = (std::exp(x[i]) + kShift) - kShift;
}

EAGLE2_PER_ISA double sum_exp(const float* x, int64_t count, float peak) {
  float terms[kChunk];
  double total = 0;
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t n = std::min(kChunk, count - first);
    for (int64_t i = 0; i < n; ++i) terms[i] = exp_poly(x[first + i] - peak);
    // A fixed number of partial sums: the same bits at any vector width.
    float partial[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) partial[lane] += terms[i + lane];
    }
    for (; i < n; ++i) partial[i % kLanes] += terms[i];
    for (int lane = 0; lane < kLanes; ++lane) total += partial[lane];
  }
  return total;
}

double sum_exp(const double* x, int64_t count, double peak) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += std::exp(x[i] - peak);
  return total;
}

EAGLE2_PER_ISA double sum_of(const float* x, int64_t count) {
  double partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) partial[lane] += static_cast<double>(x[i + lane]);
  }
  for (; i < count; ++i) partial[i % kLanes] += static_cast<double>(x[i]);
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += partial[lane];
  return total;
}

double sum_of(const double* x, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += x[i];
  return total;
}

EAGLE2_PER_ISA void scale_logits(const float* x, int64_t count, float peak, float temperature,
                                 float* out) {
  for (int64_t i = 0; i < count; ++i) {
    // An infinite temperature would make NaN of -inf.
    const uint32_t bits = float_bits((x[i] - peak) / temperature);
    out[i] = bits_float(float_bits(x[i]) == 0xff800000u ? 0xff800000u : bits);
  }
}

void scale_logits(const double* x, int64_t count, double peak, double temperature, double* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = x[i] == -INFINITY ? -INFINITY : (x[i] - peak) / temperature;
  }
}

EAGLE2_PER_ISA void clear_banned(const int32_t* mask, int64_t first, int64_t count, float* x) {
  for (int64_t i = 0; i < count; i += 32) {
    const uint32_t word = static_cast<uint32_t>(mask[(first + i) / 32]);
    const int64_t n = std::min<int64_t>(32, count - i);
    for (int64_t bit = 0; bit < n; ++bit) {
      x[i + bit] = bits_float(word >> bit & 1 ? float_bits(x[i + bit]) : 0xff800000u);
    }
  }
}

void clear_banned(const int32_t* mask, int64_t first, int64_t count, double* x) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = static_cast<uint32_t>(mask[(first + i) / 32]);
    if (!(word >> (i % 32) & 1)) x[i] = -INFINITY;
  }
}

EAGLE2_PER_ISA void noise_of(uint64_t seed, uint64_t position, int64_t first, int64_t count,
                             float* out) {
  constexpr int kBlocks = 64;  // Philox blocks of four words at a time
  uint32_t words[4][kBlocks];
  float noise[4][kBlocks];
  for (int64_t done = 0; done < count; done += 4 * kBlocks) {
    const uint32_t block = static_cast<uint32_t>((first + done) / 4);
    for (int i = 0; i < kBlocks; ++i) {
      uint32_t four[4];
      philox4x32(seed, position, block + static_cast<uint32_t>(i), four);
      for (int k = 0; k < 4; ++k) words[k][i] = four[k];
    }
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < kBlocks; ++i) noise[k][i] = gumbel(words[k][i]);
    }
    const int64_t n = std::min<int64_t>(4 * kBlocks, count - done);
    for (int64_t i = 0; i < n; ++i) out[done + i] = noise[i % 4][i / 4];
  }
}

EAGLE2_PER_ISA int64_t find_above(const float* x, int64_t count, float floor) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    int32_t any = 0;
    for (int lane = 0; lane < 4 * kLanes; ++lane) any |= x[i + lane] > floor;
    if (any) break;
  }
  while (i < count && !(x[i] > floor)) ++i;
  return i;
}

int64_t find_above(const double* x, int64_t count, double floor) {
  int64_t i = 0;
  while (i < count && !(x[i] > floor)) ++i;
  return i;
}

}  // namespace eagle2
