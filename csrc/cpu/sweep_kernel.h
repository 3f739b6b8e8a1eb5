// The sweep of sweep.h, included once per instruction set: inside a namespace of its own, with the
// target's options switched on and EAGLE2_VECTOR_BYTES set. No include guard, no includes.
//
// A vector of floats costs 13 operations for its exponentials and one for the maximum. Where
// the level has fused multiply-adds the compiler uses them, so a sum may differ in its last bits
// between levels; maxima, and with them the choice of candidates, do not.

namespace {

typedef float F32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
typedef int32_t I32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));

constexpr int kLanes = EAGLE2_VECTOR_BYTES / 4;
constexpr int kVectors = static_cast<int>(kSweepGroups) / kLanes;

inline F32 load(const float* p) {
  F32 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// Bfloat16. GCC 12 makes six instructions of the generic form where one exists.
inline F32 load(const uint16_t* p) {
#if EAGLE2_VECTOR_BYTES == 64
  const I32 words = (I32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif EAGLE2_VECTOR_BYTES == 32
  const I32 words = (I32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  typedef uint16_t U16 __attribute__((vector_size(EAGLE2_VECTOR_BYTES / 2)));
  U16 half;
  __builtin_memcpy(&half, p, sizeof half);
  const I32 words = __builtin_convertvector(half, I32);
#endif
  return (F32)(words << 16);
}

inline void store(float* p, F32 x) { __builtin_memcpy(p, &x, sizeof x); }

// b where either is NaN.
inline F32 larger(F32 a, F32 b) { return a > b ? a : b; }

inline F32 broadcast(float x) { return x - F32{}; }

// e^d for d <= 0; below -87, and for NaN, it stays at 2^-126: nothing beside the peak's 1.
inline F32 exp_nonpositive(F32 d) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  d = larger(d, broadcast(-87.0f));
  const F32 shifted = d * 1.44269504f + kMagic;
  const F32 n = shifted - kMagic;
  const F32 r = d * 1.44269504f - n;
  // minimax polynomial of 2^r on [-1/2, 1/2], relative error 1.1e-7, and exactly 1 at 0: a row of
  // one logit has the log-probability 0
  F32 y = r * 1.32647273e-3f + 9.67151299e-3f;
  y = y * r + 5.55073358e-2f;
  y = y * r + 2.40222424e-1f;
  y = y * r + 6.93147004e-1f;
  y = y * r + 1.0f;
  return (F32)((I32)y + ((I32)shifted << 23));
}

inline float largest_lane(F32 x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
  }
  return lanes[0];
}

// In float64, so that a short row's sum does not depend on the order of its elements.
inline double sum_lanes(const F32* x) {
  float lanes[kSweepGroups];
  for (int j = 0; j < kVectors; ++j) store(lanes + j * kLanes, x[j]);
  double sums[8] = {};
  for (int64_t i = 0; i < kSweepGroups; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += static_cast<double>(lanes[i + lane]);
  }
  for (int width = 4; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

template <typename T>
bool sweep_chunk(const T* x, SweepState* state, float* group_peaks) {
  F32 peaks[kVectors];
  for (int j = 0; j < kVectors; ++j) peaks[j] = broadcast(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < kSweepChunk; i += kSweepGroups) {
    for (int j = 0; j < kVectors; ++j) peaks[j] = larger(load(x + i + j * kLanes), peaks[j]);
  }
  F32 best = peaks[0];
  for (int j = 1; j < kVectors; ++j) best = larger(best, peaks[j]);
  const float peak = largest_lane(best);
  if (peak == std::numeric_limits<float>::infinity()) return false;
  for (int j = 0; j < kVectors; ++j) store(group_peaks + j * kLanes, peaks[j]);
  if (peak == -std::numeric_limits<float>::infinity()) return true;

  if (peak > state->peak) {
    state->total *= std::exp(static_cast<double>(state->peak) - static_cast<double>(peak));
    state->peak = peak;
  }
  const F32 base = broadcast(state->peak);
  F32 sums[kVectors] = {};
  for (int64_t i = 0; i < kSweepChunk; i += kSweepGroups) {
    for (int j = 0; j < kVectors; ++j) {
      // The next chunk arrives while this one is computed.
      __builtin_prefetch(x + kSweepChunk + i + j * kLanes);
      sums[j] += exp_nonpositive(load(x + i + j * kLanes) - base);
    }
  }
  state->total += sum_lanes(sums);
  return true;
}

int64_t count_from(const float* x, int64_t count, float bound) {
  I32 above[kVectors] = {};
  const F32 b = broadcast(bound);
  for (int64_t i = 0; i < count; i += kSweepGroups) {
    for (int j = 0; j < kVectors; ++j) above[j] -= load(x + i + j * kLanes) >= b;
  }
  for (int j = 1; j < kVectors; ++j) above[0] += above[j];
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += above[0][lane];
  return total;
}

// Bisection by value: from the peak down in doubling steps until k elements are found, then
// between the last two.
float group_bound(const float* group_peaks, int64_t count, float peak, int64_t k) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float low = peak, high = peak, step = 1.0f;
  int64_t found = count_from(group_peaks, count, low);
  while (found < k) {
    high = low;
    low = peak - step;
    step *= 2;
    if (!(low >= -0x1.fffffep127f)) return kNone;
    found = count_from(group_peaks, count, low);
  }
  for (int round = 0; round < 24 && found > 2 * k; ++round) {
    const float middle = low + (high - low) / 2;
    if (!(middle > low && middle < high)) break;
    const int64_t at_middle = count_from(group_peaks, count, middle);
    if (at_middle >= k) {
      low = middle;
      found = at_middle;
    } else {
      high = middle;
    }
  }
  return low;
}

int64_t indices_from(const float* group_peaks, int64_t count, float bound, int32_t* indices) {
  const F32 b = broadcast(bound);
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kSweepGroups) {
    I32 any = {};
    for (int j = 0; j < kVectors; ++j) any |= load(group_peaks + i + j * kLanes) >= b;
    int32_t some = 0;
    for (int lane = 0; lane < kLanes; ++lane) some |= any[lane];
    if (some == 0) continue;
    for (int64_t j = i; j < i + kSweepGroups; ++j) {
      indices[found] = static_cast<int32_t>(j);
      found += group_peaks[j] >= bound;
    }
  }
  return found;
}

}  // namespace

const SweepKernel kSweepKernel{sweep_chunk<float>, sweep_chunk<uint16_t>, group_bound,
                               indices_from};
