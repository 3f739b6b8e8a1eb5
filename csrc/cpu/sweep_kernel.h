// The sweep of sweep.h, included once per instruction set: inside a namespace of its own, with the
// target's options switched on and EAGLE2_VECTOR_BYTES set. No include guard, no includes.
//
// An element's rank is x log2(e), rounded to 2^-kTableBits by adding a number whose last bit has
// that weight. The rank's low bits then index a table of 2^(i / 2^kTableBits), the others are the
// exponent, and a short polynomial makes up for what was rounded: eleven operations a vector, of
// which the maximum is one. Ranks do not depend on the exponent that the sums are relative to, so
// chunks may differ in it.
//
// A level without fused multiply-adds rounds the product too, which moves an element by half of its
// last bit; it takes smaller elements only. So sums differ in their last bits between levels; the
// choice of candidates does not.

namespace {

typedef float F32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
typedef int32_t I32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));

constexpr int kLanes = EAGLE2_VECTOR_BYTES / 4;
constexpr int kVectors = 4;
constexpr int64_t kGroups = kVectors * kLanes;
constexpr int64_t kPart = 8 * kGroups;
constexpr int64_t kChunk = 8 * kPart;
static_assert(kGroups <= kMostSweepGroups);
constexpr int kTableBits = EAGLE2_VECTOR_BYTES == 64 ? 4 : EAGLE2_VECTOR_BYTES == 32 ? 3 : 0;

constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kZeroRank = 12582912.0f / (1 << kTableBits);  // 1.5 * 2^23, of the weight above
#if EAGLE2_VECTOR_BYTES > 16 || defined(__aarch64__)
#define EAGLE2_FUSED 1
#else
#define EAGLE2_FUSED 0
#endif
// Exponents lie between -kReach and kReach, and a term's error stays small: logits seldom need
// more.
constexpr int32_t kReach = EAGLE2_FUSED ? 4096 : 128;
constexpr int32_t kRise = 64;   // above a sum's exponent: a chunk of such terms does not overflow
constexpr int32_t kFall = 125;  // below it: terms are not told apart, and nothing beside one of 1

// The bits of 2^(i / 16), less i times 2^19: what the shifted rank adds of the index.
alignas(64) constexpr uint32_t kTable[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

inline F32 load(const float* p) {
  F32 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, F32 x) { __builtin_memcpy(p, &x, sizeof x); }

// Two vectors of elements: in their order, or those of even index and those of odd index.
inline void load_two(const float* p, F32* x) {
  x[0] = load(p);
  x[1] = load(p + kLanes);
}

inline void load_two(const uint16_t* p, F32* x) {
  U32 words;
  __builtin_memcpy(&words, p, sizeof words);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  x[0] = (F32)(words << 16);
  x[1] = (F32)(words & 0xffff0000u);
#else
  x[0] = (F32)(words & 0xffff0000u);
  x[1] = (F32)(words << 16);
#endif
}

inline F32 broadcast(float x) { return x - F32{}; }

// a * b + c, rounded once where the level can: everywhere alike, so that a term has the same bits
// alone and in a sum. What the compiler makes of a sum of products may differ from place to place.
inline F32 fused(F32 a, F32 b, F32 c) {
#if EAGLE2_VECTOR_BYTES == 64
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif EAGLE2_VECTOR_BYTES == 32
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// b where either is NaN.
inline F32 larger(F32 a, F32 b) { return a > b ? a : b; }

// Of ranks, whose bits order as integers: the unit of products has enough to do.
inline F32 larger_rank(F32 a, F32 b) {
#if EAGLE2_VECTOR_BYTES == 64
  return (F32)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif EAGLE2_VECTOR_BYTES == 32
  return (F32)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return larger(a, b);
#endif
}

// Quarters of a vector: what is left of it is reduced there.
typedef float F32x4 __attribute__((vector_size(16)));
typedef double F64x4 __attribute__((vector_size(32)));

inline F32x4 quarter(F32 x, int i) {
  F32x4 part[kLanes / 4];
  __builtin_memcpy(part, &x, sizeof x);
  return part[i];
}

inline float largest_lane(F32 x) {
  F32x4 best = quarter(x, 0);
  for (int i = 1; i < kLanes / 4; ++i) {
    const F32x4 other = quarter(x, i);
    best = best > other ? best : other;
  }
  const float a = best[0] > best[1] ? best[0] : best[1];
  const float b = best[2] > best[3] ? best[2] : best[3];
  return a > b ? a : b;
}

// In float64, so that a short row's sum does not depend on the order of its elements.
inline double sum_lanes(const F32* x) {
  F64x4 sum{};
  for (int j = 0; j < kVectors; ++j) {
    for (int i = 0; i < kLanes / 4; ++i) sum += __builtin_convertvector(quarter(x[j], i), F64x4);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <size_t Count>
using Coefficients = std::array<float, Count>;

// What adds terms relative to one exponent. The quick kind adds 0 for what is far below it, but
// NaN for an infinity, NaN and a number that leaves float32 on its way.
template <bool Quick>
class Terms {
 public:
  explicit Terms(int32_t exponent)
      : least_(broadcast(Quick ? kZeroRank + static_cast<float>(exponent - 127)
                               : static_cast<float>(exponent - kFall) / kLog2E)) {
    for (int lane = 0; lane < kLanes; ++lane) {
      table_[lane] = kTable[kTableBits == 0 ? 0 : lane * 16 / kLanes] -
                     (static_cast<uint32_t>(exponent) << 23);
    }
  }

  // Returns x's ranks and adds its terms.
  F32 add(F32 x, F32* sum) const {
    if constexpr (!Quick) x = larger(x, least_);
    const F32 log2e = broadcast(kLog2E);
    F32 rank = fused(x, log2e, broadcast(kZeroRank));
    if constexpr (Quick) rank = larger_rank(rank, least_);
    const F32 r = fused(x, log2e, kZeroRank - rank);
    // minimax polynomials of 2^r, exactly 1 at 0; relative errors 4.3e-7 (both signs alike, so that
    // sums have less), 2.6e-8 and 9.2e-8
    constexpr auto c = [] {
      if constexpr (kTableBits == 4) return Coefficients<3>{1.0f, 0.693187714f, 0.240226433f};
      if constexpr (kTableBits == 3) {
        return Coefficients<4>{1.0f, 0.693147242f, 0.240257636f, 0.0554962233f};
      }
      if constexpr (kTableBits == 0) {
        return Coefficients<6>{1.0f,           0.693147004f,   0.240222424f,
                               5.55073358e-2f, 9.67151299e-3f, 1.32647273e-3f};
      }
    }();
    F32 y = broadcast(c.back());
    for (size_t i = c.size() - 1; i-- > 0;) y = fused(y, r, broadcast(c[i]));
    const U32 scale = look_up((U32)rank) + ((U32)rank << (23 - kTableBits));
    *sum = fused((F32)scale, y, *sum);
    return rank;
  }

 private:
  U32 look_up(U32 rank) const {
#if EAGLE2_VECTOR_BYTES == 64
    return (U32)_mm512_permutexvar_epi32((__m512i)rank, (__m512i)table_);
#elif EAGLE2_VECTOR_BYTES == 32
    return (U32)_mm256_permutevar8x32_epi32((__m256i)table_, (__m256i)rank);
#else
    (void)rank;
    return table_;
#endif
  }

  F32 least_;
  U32 table_;
};

template <typename T>
float largest(const T* x, int64_t count) {
  F32 best[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    F32 two[2];
    load_two(x + i, two);
    for (int j = 0; j < 2; ++j) best[j] = larger(two[j], best[j]);
  }
  return largest_lane(larger(best[0], best[1]));
}

// Writes the ranks of `count` elements and returns the sum of their terms relative to 2^exponent.
template <bool Quick, typename T>
double add_chunk(const T* x, int64_t count, int32_t exponent, float* ranks) {
  constexpr int64_t kAhead = 4096 / sizeof(T);
  const Terms<Quick> terms(exponent);
  F32 sums[kVectors] = {};
  for (int64_t part = 0; part < count; part += kPart, ranks += kGroups) {
    F32 best[kVectors] = {};
    const int64_t end = part + kPart < count ? part + kPart : count;
    for (int64_t i = part; i < end; i += kGroups) {
      for (int64_t j = 0; j < kGroups * static_cast<int64_t>(sizeof(T)); j += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(x + i + kAhead) + j);
      }
      for (int j = 0; j < kVectors; j += 2) {
        F32 two[2];
        load_two(x + i + j * kLanes, two);
        best[j] = larger_rank(terms.add(two[0], &sums[j]), best[j]);
        best[j + 1] = larger_rank(terms.add(two[1], &sums[j + 1]), best[j + 1]);
      }
    }
    for (int j = 0; j < kVectors; ++j) store(ranks + j * kLanes, best[j]);
  }
  return sum_lanes(sums);
}

inline float largest_rank(const float* ranks, int64_t count) {
  F32 best[kVectors] = {};
  for (int64_t i = 0; i < count; i += kGroups) {
    for (int j = 0; j < kVectors; ++j) best[j] = larger_rank(load(ranks + i + j * kLanes), best[j]);
  }
  return largest_lane(larger_rank(larger_rank(best[0], best[1]), larger_rank(best[2], best[3])));
}

template <typename T>
bool sweep_chunk(const T* x, int64_t count, SweepState* state, float* ranks) {
  const int64_t groups = (count + kPart - 1) / kPart * kGroups;
  if (state->exponent == SweepState::kUnset) {
    float top = largest(x, kGroups);
    if (!(top * kLog2E >= -kReach)) top = largest(x, count);
    if (!(top * kLog2E <= kReach)) return false;
    if (!(top * kLog2E >= -kReach)) {
      state->skipped |= top != -kInfinity;
      for (int64_t g = 0; g < groups; g += kLanes) store(ranks + g, F32{});
      return true;
    }
    state->exponent = static_cast<int32_t>(top * kLog2E);
  }
  for (;;) {
    const double sum = state->hostile ? add_chunk<false>(x, count, state->exponent, ranks)
                                      : add_chunk<true>(x, count, state->exponent, ranks);
    if (sum != sum && !state->hostile) {
      state->hostile = true;
      continue;
    }
    const float top = largest_rank(ranks, groups) - kZeroRank;
    if (!(top <= kReach)) return false;
    if (top <= static_cast<float>(state->exponent + kRise)) {
      state->total += sum;
      return true;
    }
    const int32_t exponent = static_cast<int32_t>(top);
    state->total = std::ldexp(state->total, state->exponent - exponent);
    state->exponent = exponent;
  }
}

// What was skipped lies below -kReach.
bool complete(const SweepState& state) {
  return state.exponent != SweepState::kUnset &&
         (!state.skipped || state.exponent - kFall >= -kReach);
}

float term(float x, const SweepState& state) {
  F32 sum{};
  Terms<true>(state.exponent).add(broadcast(x), &sum);
  return sum[0];
}

// Which lanes reach `bound`, a bit each.
inline uint64_t lanes_from(F32 x, F32 bound) {
#if EAGLE2_VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)x, (__m512)bound, _CMP_GE_OQ);
#elif EAGLE2_VECTOR_BYTES == 32
  return static_cast<uint64_t>(_mm256_movemask_ps((__m256)(F32)(x >= bound)));
#else
  const I32 above = x >= bound;
  uint64_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint64_t>(above[lane] & 1) << lane;
  return bits;
#endif
}

int64_t count_from(const float* x, int64_t count, float bound) {
  const F32 b = broadcast(bound);
  int64_t total = 0;
#if EAGLE2_VECTOR_BYTES > 16
  for (int64_t i = 0; i < count; i += kLanes) {
    total += __builtin_popcountll(lanes_from(load(x + i), b));
  }
#else
  I32 above = {};
  for (int64_t i = 0; i < count; i += kLanes) above -= load(x + i) >= b;
  for (int lane = 0; lane < kLanes; ++lane) total += above[lane];
#endif
  return total;
}

// Bisection by value, from the largest down in doubling steps until k are found, then between the
// last two. A rank is that of an element, so what k groups reach, k elements reach. Of many
// groups, each element of `folded` is the largest of some.
float bound(const float* ranks, int64_t count, const SweepState& state, int64_t k) {
  float folded[4 * kGroups];
  const int64_t width = k <= kGroups / 4 ? kGroups : 4 * kGroups;
  if (count > width && k <= width / 4) {
    for (int64_t i = 0; i < width; i += kLanes) {
      F32 best = load(ranks + i);
      for (int64_t j = i + width; j < count; j += width) best = larger_rank(load(ranks + j), best);
      store(folded + i, best);
    }
    ranks = folded;
    count = width;
  }
  const float top = largest_rank(ranks, count);
  // Ranks up to here are shared by all that is smaller, whatever the chunk's exponent.
  const float shared = kZeroRank + static_cast<float>(state.exponent - kFall + 1);

  float low = top, high = top, step = 1.0f;
  int64_t found = count_from(ranks, count, low);
  while (found < k) {
    high = low;
    low = top - step;
    step *= 2;
    if (!(low > shared)) return 0;
    found = count_from(ranks, count, low);
  }
  while (found > 2 * k) {
    const float middle = low + (high - low) / 2;
    if (!(middle > low && middle < high)) break;
    const int64_t at_middle = count_from(ranks, count, middle);
    if (at_middle >= k) {
      low = middle;
      found = at_middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// One step of the rank further down than rounding reaches.
float least(float rank) { return (rank - kZeroRank - 1.0f / (1 << kTableBits)) / kLog2E; }

// Bits of groups as load_two has them to bits of elements.
inline uint64_t in_order(uint64_t groups) {
  uint64_t elements = 0;
  for (; groups != 0; groups &= groups - 1) {
    const int g = __builtin_ctzll(groups), odd = g / kLanes % 2;
    elements |= uint64_t{1} << (g / (2 * kLanes) * (2 * kLanes) + 2 * (g % kLanes) + odd);
  }
  return elements;
}

int64_t reached(const float* ranks, int64_t parts, int64_t mixed_parts, float bound, int64_t* part,
                int32_t* groups) {
  const F32 b = broadcast(bound);
  for (; *part < parts; ++*part) {
    F32 best[kVectors];
    for (int j = 0; j < kVectors; ++j) best[j] = load(ranks + *part * kGroups + j * kLanes);
    const F32 all = larger_rank(larger_rank(best[0], best[1]), larger_rank(best[2], best[3]));
    if (lanes_from(all, b) == 0) continue;
    uint64_t bits = 0;
    for (int j = 0; j < kVectors; ++j) bits |= lanes_from(best[j], b) << (j * kLanes);
    if (*part < mixed_parts) bits = in_order(bits);
    int64_t found = 0;
    for (; bits != 0; bits &= bits - 1) groups[found++] = __builtin_ctzll(bits);
    return found;
  }
  return 0;
}

}  // namespace

const SweepKernel kSweepKernel{
    kGroups, kPart, kChunk, sweep_chunk<float>, sweep_chunk<uint16_t>, complete, term,
    bound,   least, reached};
