// packed_linear behind its arguments: checks, and the product in threads, for operators that hold
// one among other things.
#pragma once

#include "common.h"
#include "linear.h"

namespace eagle2 {

// A packed weight and its bias, checked.
struct PackedLinear {
  const uint16_t* packed;
  const uint16_t* bias;  // or null
  int64_t in_features, out_features;
};

PackedLinear packed_layer(const Tensor& packed, const char* name, const std::optional<Tensor>& bias,
                          const char* bias_name, int64_t in_features, int64_t out_features);

// The rows of x [..., in] in bfloat16: dimensions that follow each other in memory are one. x has
// 1 to LinearRows::kDims dimensions.
LinearRows linear_rows(const Tensor& x, const char* name);

// out [rows, out_features] = x W^T + b.
void run_linear(const LinearRows& x, int64_t rows, const PackedLinear& layer, uint16_t* out);

}  // namespace eagle2
