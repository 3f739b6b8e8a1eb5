// One sweep over a row of float32 logits: maximum, sum of exponentials, and a bound that leaves
// little more than the k best. Compiled once per instruction set (sweep_<level>.cpp).
#pragma once

#include <cmath>
#include <cstdint>

namespace eagle2 {

constexpr int64_t kSweepChunk = 2048;
constexpr int64_t kSweepGroups = 64;  // a chunk's elements by their index modulo 64

struct SweepState {
  float peak = -INFINITY;  // the largest element so far
  double total = 0;        // the sum of e^(x - peak)
};

struct SweepKernel {
  // Takes one chunk, the last one filled up with -inf: updates `state`, and writes the largest
  // element of each group. NaN counts as -inf. Where an element is +inf it returns false and does
  // neither.
  bool (*floats)(const float* x, SweepState* state, float* group_peaks);
  bool (*bfloat16s)(const uint16_t* x, SweepState* state, float* group_peaks);

  // A bound b such that at least k of the `count` elements (a multiple of 64, `peak` the largest)
  // are >= b, and hardly more unless they tie; -inf where it finds none. Of group peaks it is one
  // for the elements of all groups, since each peak is an element.
  float (*bound)(const float* group_peaks, int64_t count, float peak, int64_t k);

  // Writes the indices of the elements >= bound in ascending order and returns their number.
  int64_t (*from)(const float* group_peaks, int64_t count, float bound, int32_t* indices);
};

// The kernel of cpu_isa().
const SweepKernel& sweep_kernel();

namespace portable {
extern const SweepKernel kSweepKernel;
}
namespace avx2 {
extern const SweepKernel kSweepKernel;
}
namespace avx512 {
extern const SweepKernel kSweepKernel;
}

}  // namespace eagle2
