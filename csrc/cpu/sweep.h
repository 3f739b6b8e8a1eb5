// One sweep over a row of logits, each read once: the sum of exponentials, and ranks of groups of
// elements that leave little more than the k best to be looked at again. Compiled once per
// instruction set (sweep_<level>.cpp).
#pragma once

#include <cstdint>

namespace eagle2 {

// Sums are of terms 2^(x log2(e) - exponent). Any exponent near the largest x does.
struct SweepState {
  static constexpr int32_t kUnset = INT32_MIN;
  int32_t exponent = kUnset;
  bool hostile = false;  // NaN or an infinity was met
  bool skipped = false;  // finite elements far below zero were left out
  double total = 0;
};

constexpr int64_t kMostSweepGroups = 64;

struct SweepKernel {
  int64_t groups;  // of a part; an element's group is its index modulo this
  int64_t part;    // elements, a multiple of `groups`
  int64_t chunk;   // the most elements a call takes, a multiple of `part`

  // Takes `count` elements, a multiple of `groups`: adds their terms to `state` and writes, for
  // each part (the last may be shorter), the rank of each group's largest element. Ranks are
  // positive and order as the elements do, but elements close to each other share one, and so do
  // all that are too small to add anything; 0 stands for a group without an element. NaN counts as
  // -inf. Where an element is out of the sweep's reach (+inf among them) it returns false and the
  // row has to be read in another way.
  bool (*floats)(const float* x, int64_t count, SweepState* state, float* ranks);
  // The same; groups change places, `reached` knows how.
  bool (*bfloat16s)(const uint16_t* x, int64_t count, SweepState* state, float* ranks);

  // Whether the sum is that of the row; false where there is none, or it leaves out what may count.
  bool (*complete)(const SweepState& state);

  // The term of one element, with the bits it has in the sum.
  float (*term)(float x, const SweepState& state);

  // A rank that at least k of the elements reach and hardly more, of a row whose chunks have
  // written `count` ranks; 0 where it finds none.
  float (*bound)(const float* ranks, int64_t count, const SweepState& state, int64_t k);

  // An element below this has a lower rank.
  float (*least)(float rank);

  // Moves `*part` on to the first part of which a group reaches `bound`, writes these groups in
  // ascending order and returns their number; 0 where none is left. The first `mixed_parts` were
  // read by bfloat16s.
  int64_t (*reached)(const float* ranks, int64_t parts, int64_t mixed_parts, float bound,
                     int64_t* part, int32_t* groups);
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
