// Vectors of one level: loads of every type, exponentials, sums across lanes, transposes.
// A part of attention_kernel.h, which says how it is compiled.

template <typename A>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
  typedef int32_t mask __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
  typedef int64_t mask __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
};

using F32 = Vector<float>::type;
using I32 = Vector<float>::mask;
typedef uint32_t U32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(EAGLE2_VECTOR_BYTES / 2)));
typedef uint8_t U8 __attribute__((vector_size(EAGLE2_VECTOR_BYTES / 4)));

template <typename A>
constexpr int kLanes = EAGLE2_VECTOR_BYTES / sizeof(A);

// Rows that are taken at once. Registers hold kRows x kColumns accumulators, kColumns operands and
// one broadcast; the matrix unit two tiles of rows.
#ifdef EAGLE2_TILES
constexpr int kRows = 32;
#else
constexpr int kRows = 6;
#endif
constexpr int kColumns = EAGLE2_VECTOR_BYTES == 64 ? 4 : 2;

// Elements in a word of the operands: 2 where a lane multiplies pairs of bfloat16 (neighbours in
// the head dim for a score, neighbouring positions for an output) and adds both to a float32. Such
// a product takes subnormals as zeros.
#ifdef EAGLE2_BF16_PAIRS
template <typename C>
constexpr int kPack = std::is_same_v<C, c10::BFloat16> ? 2 : 1;
#else
template <typename C>
constexpr int kPack = 1;
#endif

// Words that a product takes at once, and the keys in them: where a row sees some of these keys and
// others not, they are a product of its own.
#ifdef EAGLE2_TILES
constexpr bool kTiles = true;
constexpr int kDepth = 16;
#else
constexpr bool kTiles = false;
constexpr int kDepth = 1;
#endif
template <typename C>
constexpr int kUnit = kDepth * kPack<C>;

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

template <typename A>
inline typename Vector<A>::type broadcast(A x) {
  return x - typename Vector<A>::type{};  // x - 0 keeps the sign of a zero
}

inline F32 load(const float* p) {
  F32 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

inline Vector<double>::type load(const double* p) {
  Vector<double>::type x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// Sixteen-bit words, zero extended. GCC 12 makes six instructions of the generic form where one
// exists.
inline U32 load_words(const void* p) {
#if EAGLE2_VECTOR_BYTES == 64
  return (U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif EAGLE2_VECTOR_BYTES == 32
  return (U32)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  U16 words;
  __builtin_memcpy(&words, p, sizeof words);
  return __builtin_convertvector(words, U32);
#endif
}

inline U32 load_bytes(const void* p) {
#if EAGLE2_VECTOR_BYTES == 64
  return (U32)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif EAGLE2_VECTOR_BYTES == 32
  return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  U8 bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, U32);
#endif
}

inline F32 load(const c10::BFloat16* p) { return (F32)(load_words(p) << 16); }

// Exact for every half, subnormals, infinities and NaN included: one multiplication rebases the
// exponent.
inline F32 load(const c10::Half* p) {
  const U32 bits = load_words(p);
  const F32 magnitude = (F32)((bits & 0x7fff) << 13) * 0x1p112f;
  const U32 special = (U32)((bits & 0x7c00) == 0x7c00) & 0x7f800000u;
  return (F32)((U32)magnitude | special | ((bits & 0x8000) << 16));
}

// Exact for every float8 e4m3, subnormals and NaN included (it has no infinity). A subnormal
// m * 2^-9 is read as 2^-6 * (1 + m / 8), from which 2^-6 is taken away again: no float32 of its
// own is subnormal, so neither a flush mode nor a slow path of the CPU can matter.
inline F32 load(const c10::Float8_e4m3fn* p) {
  const U32 bits = load_bytes(p);
  const U32 magnitude = bits & 0x7f;
  const U32 subnormal = (U32)(magnitude < 8);
  const U32 nan = (U32)(magnitude == 0x7f) & 0x7fc00000u;
  const U32 biased = (magnitude << 20) + 0x3c000000u + (subnormal & 0x00800000u);
  const F32 value = (F32)biased - (F32)(subnormal & 0x3c800000u);
  return (F32)((U32)value | nan | ((bits & 0x80) << 24));
}

template <typename A>
inline void store(A* p, typename Vector<A>::type x) {
  __builtin_memcpy(p, &x, sizeof x);
}

// The larger of each lane, b where a is NaN.
template <typename V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}
template <typename V>
inline bool any_nan(V x) {
  bool found = false;
  for (size_t i = 0; i < sizeof x / sizeof x[0]; ++i) found |= x[i] != x[i];
  return found;
}
#if EAGLE2_VECTOR_BYTES == 64
inline F32 larger(F32 a, F32 b) { return (F32)_mm512_max_ps((__m512)a, (__m512)b); }
inline bool any_nan(F32 x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0; }
#elif EAGLE2_VECTOR_BYTES == 32
inline F32 larger(F32 a, F32 b) { return (F32)_mm256_max_ps((__m256)a, (__m256)b); }
inline bool any_nan(F32 x) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q)) != 0;
}
#endif

// 2^x for x <= 0. Below the smallest normal number the result is 0; NaN stays NaN.
inline F32 exp2_nonpositive(F32 x) {
#if EAGLE2_VECTOR_BYTES == 64
  const F32 n = (F32)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
  constexpr float kMagic = 12582912.0f;
  const F32 shifted = x + kMagic;
  const F32 n = shifted - kMagic;
#endif
  const F32 r = x - n;  // in [-1/2, 1/2], exact
  // Minimax polynomial of 2^r, relative error 2e-9.
  F32 y = r * 1.53533618e-4f + 1.33988744e-3f;
  y = y * r + 9.61843736e-3f;
  y = y * r + 5.55033247e-2f;
  y = y * r + 2.40226479e-1f;
  y = y * r + 6.93147203e-1f;
  y = y * r + 1.0f;
#if EAGLE2_VECTOR_BYTES == 64
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (F32)_mm512_maskz_scalef_ps(kept, (__m512)y, (__m512)n);
#else
  y = y * (F32)(((U32)shifted << 23) + 0x3f800000u);  // 2^n
  return (F32)((I32)y & ~(x < -126.0f));
#endif
}

inline Vector<double>::type exp2_nonpositive(Vector<double>::type x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp2(x[i]);
  return x;
}

template <typename A>
inline A exp2_nonpositive_scalar(A x) {
  return exp2_nonpositive(broadcast<A>(x))[0];
}

inline F32 hyperbolic_tangent(F32 x) {
  const I32 sign = (I32)x & INT32_MIN;
  const F32 magnitude = (F32)((I32)x & INT32_MAX);
  const F32 decay = exp2_nonpositive(magnitude * -2.88539008f);  // e^-2|x|
  const F32 large = (F32)((I32)((1.0f - decay) / (1.0f + decay)) | sign);
  const F32 square = x * x;
  F32 y = square * -5.70498872745e-3f + 2.06390887954e-2f;
  y = y * square - 5.37397155531e-2f;
  y = y * square + 1.33314422036e-1f;
  y = y * square - 3.33332819422e-1f;
  const F32 cube = square * x;
  const F32 small = y * cube + x;
  const I32 is_small = magnitude < 0.625f;
  return (F32)(((I32)small & is_small) | ((I32)large & ~is_small));
}

inline Vector<double>::type hyperbolic_tangent(Vector<double>::type x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

// x with lanes i and i ^ Half exchanged.
template <typename A, int Half, int... I>
inline typename Vector<A>::type exchange(typename Vector<A>::type x,
                                         std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, (I ^ Half)...);
#else
  return __builtin_shuffle(x, typename Vector<A>::mask{(I ^ Half)...});
#endif
}

// All lanes combined, pairwise and in one fixed order.
template <typename A, int Half = kLanes<A> / 2>
inline A sum_lanes(typename Vector<A>::type x) {
  if constexpr (Half == 0) {
    return x[0];
  } else {
    return sum_lanes<A, Half / 2>(
        x + exchange<A, Half>(x, std::make_integer_sequence<int, kLanes<A>>{}));
  }
}

template <typename A, int Half = kLanes<A> / 2>
inline A max_lanes(typename Vector<A>::type x) {
  if constexpr (Half == 0) {
    return x[0];
  } else {
    const auto y = exchange<A, Half>(x, std::make_integer_sequence<int, kLanes<A>>{});
    return max_lanes<A, Half / 2>(larger(x, y));
  }
}

// One step of a butterfly transpose: lanes with bit `Half` clear come from a, the others from b,
// `high` of each pair.
template <typename A, int Half, bool High, int... I>
inline typename Vector<A>::type interleave(typename Vector<A>::type a, typename Vector<A>::type b,
                                           std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b, ((I & Half) ? kLanes<A> + (High ? I : I - Half) : (High ? I + Half : I))...);
#else
  using Mask = typename Vector<A>::mask;
  return __builtin_shuffle(
      a, b, Mask{((I & Half) ? kLanes<A> + (High ? I : I - Half) : (High ? I + Half : I))...});
#endif
}

template <typename A, int Half>
__attribute__((always_inline)) inline void transpose_step(typename Vector<A>::type* x) {
  using Lanes = std::make_integer_sequence<int, kLanes<A>>;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<A>; ++i) {
    if (i & Half) continue;
    const auto low = interleave<A, Half, false>(x[i], x[i + Half], Lanes{});
    const auto high = interleave<A, Half, true>(x[i], x[i + Half], Lanes{});
    x[i] = low;
    x[i + Half] = high;
  }
}

// From step `Half` on.
template <typename A, int Half = kLanes<A> / 2>
__attribute__((always_inline)) inline void transpose(typename Vector<A>::type* x) {
  transpose_step<A, Half>(x);
  if constexpr (Half > 1) transpose<A, Half / 2>(x);
}

// Four by four words transposed inside each sixteen bytes.
#if EAGLE2_VECTOR_BYTES == 64
inline void transpose_quarters(const __m512* x, F32* to) {
  const __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]);
  const __m512d b = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
  const __m512d c = (__m512d)_mm512_unpacklo_ps(x[2], x[3]);
  const __m512d d = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
  to[0] = (F32)_mm512_unpacklo_pd(a, c);
  to[1] = (F32)_mm512_unpackhi_pd(a, c);
  to[2] = (F32)_mm512_unpacklo_pd(b, d);
  to[3] = (F32)_mm512_unpackhi_pd(b, d);
}
#elif EAGLE2_VECTOR_BYTES == 32
inline void transpose_quarters(const __m256* x, F32* to) {
  const __m256d a = (__m256d)_mm256_unpacklo_ps(x[0], x[1]);
  const __m256d b = (__m256d)_mm256_unpackhi_ps(x[0], x[1]);
  const __m256d c = (__m256d)_mm256_unpacklo_ps(x[2], x[3]);
  const __m256d d = (__m256d)_mm256_unpackhi_ps(x[2], x[3]);
  to[0] = (F32)_mm256_unpacklo_pd(a, c);
  to[1] = (F32)_mm256_unpackhi_pd(a, c);
  to[2] = (F32)_mm256_unpacklo_pd(b, d);
  to[3] = (F32)_mm256_unpackhi_pd(b, d);
}
#endif
