// A linear layer over a packed weight: what the operator hands to the kernels, which are compiled
// once per instruction set (linear_<level>.cpp).
#pragma once

#include <cstdint>

namespace eagle2 {

// Columns of a panel of the packed weight [ceil(out / 32), ceil(in / 2), 32, 2].
constexpr int64_t kPanel = 32;

// Rows of x in order: any strides between them, none inside.
struct LinearRows {
  static constexpr int kDims = 16;
  const uint16_t* data = nullptr;
  int dims = 0;
  int64_t size[kDims], stride[kDims];

  const uint16_t* at(int64_t row) const {
    int64_t offset = 0;
    for (int i = dims; i-- > 0; row /= size[i]) offset += row % size[i] * stride[i];
    return data + offset;
  }
};

// y[r][c] = bfloat16(sum over k of x[r][k] w[c][k] + bias[c]), sums in float32. A task is a group
// of rows and `unit` neighbouring columns; all columns of a group come before the next group.
struct Linear {
  LinearRows x;
  const uint16_t* packed;
  const uint16_t* bias;  // or null
  uint16_t* out;         // [rows, out_features]
  int64_t rows, in_features, out_features;
  int64_t unit;    // kPanel, or half of it
  int64_t groups;  // of rows, as equal as they can be

  int64_t pairs() const { return (in_features + 1) / 2; }
  int64_t units() const { return (out_features + unit - 1) / unit; }
};

struct LinearKernel {
  int64_t block;      // rows that a pass over a panel takes at most
  int64_t row_bytes;  // of a row of x as the kernel stages it, per pair of k
  // Tasks [begin, end). Throws std::bad_alloc.
  void (*run)(const Linear& linear, int64_t begin, int64_t end);
};

// The kernel of cpu_level().
const LinearKernel& linear_kernel();

namespace portable {
extern const LinearKernel kLinearKernel;
}
namespace avx2 {
extern const LinearKernel kLinearKernel;
}
namespace avx512 {
extern const LinearKernel kLinearKernel;
}
namespace avx512_bf16 {
extern const LinearKernel kLinearKernel;
}
namespace amx {
extern const LinearKernel kLinearKernel;
}
namespace amx_model {
extern const LinearKernel kLinearKernel;
}

}  // namespace eagle2
