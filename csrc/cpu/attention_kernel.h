// The attention kernel, compiled once per level of isa.h: a source of each includes this file
// inside a namespace of its own with the level's instructions switched on and EAGLE2_VECTOR_BYTES
// set. No include guard, no includes.
//
// One task is (request, KV head, range of nodes, range of chunks). Its rows are node-major, then
// the query heads of the group. C is the type of the caches (that of q and out, or float8), A that
// of the arithmetic. Keys are taken in position order; chunk c holds positions c * chunk and
// following:
//
//     prefix                                   | own path
//     [ chunk 0 ][ chunk 1 ] ... [ chunk c ....|.........][ chunk c + 1 ]
//
// Every row sees the prefix at the same positions, so a prefix chunk is loaded once (K transposed,
// both converted to the accumulation type) and used by all rows. A row's path (the ancestors of its
// node in order of depth, itself last) follows at positions prefix_len, prefix_len + 1, ...: it
// completes the prefix's last chunk and may go on behind it. A causal chain has one path for all
// rows and is treated as more prefix with an end per row.
//
// Why a row gets the same bits whatever stands beside it: a score is one chain of multiply-adds
// over the head dim, an output element one chain over the chunk's keys in position order, and
// vector lanes hold different keys or different elements, so that blocking, batching and order of
// storage cannot touch a chain. The only sum across lanes (the softmax denominator of a chunk)
// assigns lanes by position. Chunks merge in ascending order, one by one, in the task that made
// them or, where several tasks share the keys, in merge_parts.

namespace {

using torch::headeronly::ScalarType;

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

// Registers hold kRows x kColumns accumulators, kColumns operands and one broadcast.
constexpr int kRows = 6;
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
    return max_lanes<A, Half / 2>(x > y ? x : y);
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

// How elements of a cache enter the arithmetic: a float8 value times the scale of its tensor (one
// float32 product), any other value as it is.
template <typename C, typename A>
struct Reader {
  A scale;
  typename Vector<A>::type vector(const C* p) const {
    if constexpr (kFloat8<C>) return load(p) * scale;
    return load(p);
  }
  A scalar(C x) const {
    if constexpr (kFloat8<C>) return static_cast<A>(x) * scale;
    return static_cast<A>(x);
  }
};

// A step of a chain: the words of two operands multiplied, added to a sum. A word of the plain form
// is an element; pairs travel as the bits of a float.
template <typename A, int Pack>
struct Product {
  static typename Vector<A>::type spread(const A* word) { return broadcast<A>(*word); }
  static typename Vector<A>::type add(typename Vector<A>::type sum, typename Vector<A>::type a,
                                      typename Vector<A>::type b) {
    return sum + a * b;
  }
};

#ifdef EAGLE2_BF16_PAIRS
template <>
struct Product<float, 2> {
  static F32 spread(const float* word) {
    int32_t bits;
    __builtin_memcpy(&bits, word, sizeof bits);
    return (F32)_mm512_set1_epi32(bits);
  }
  static F32 add(F32 sum, F32 a, F32 b) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};

// Up to 32 elements of a row as words, zeros behind `count`.
inline __m512i load_pairs(const c10::BFloat16* p, int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, p);
}

// The words (a[d], b[d]) for d in [0, 16) and [16, 32).
struct Zipped {
  F32 low, high;
};
inline Zipped zip(__m512i a, __m512i b) {
  alignas(64) static constexpr uint16_t kOrder[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  return {(F32)_mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder), b),
          (F32)_mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder + 32), b)};
}
#endif

// Operands lie in panels of kColumns vectors, one step of a chain after the other, so that a block
// of accumulators reads them as one stream. Offset of vector v at step i of `steps`.
template <typename A>
inline int64_t panel_offset(int64_t v, int64_t i, int64_t steps) {
  return ((v / kColumns * steps + i) * kColumns + v % kColumns) * kLanes<A>;
}

template <typename C>
inline void prefetch_rows(const C* const* rows, int64_t count, int64_t dim) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t d = 0; d < dim; d += 64 / sizeof(C)) __builtin_prefetch(rows[j] + d, 0, 2);
  }
}

// Words [d, d + lanes) of as many rows, converted; zeros behind the end of a row. Transposed: word
// i of all rows in block[i].
template <typename C, typename A>
__attribute__((always_inline)) inline void load_transposed_block(Reader<C, A> reader,
                                                                 const C* const* rows, int64_t d,
                                                                 int64_t dim,
                                                                 typename Vector<A>::type* block) {
  constexpr int L = kLanes<A>;
#if EAGLE2_VECTOR_BYTES == 64
  // Halves of two rows are put together as they are loaded: the first step of the transpose.
  if constexpr (L == 16 && (std::is_same_v<C, float> || kPack<C> == 2)) {
    if (kPack<C> * (d + L) <= dim) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const auto half = [&](int row, int at) {
          return _mm256_loadu_si256(
              reinterpret_cast<const __m256i*>(rows[row] + kPack<C> * (d + at)));
        };
        const auto both = [&](int at) {
          return (F32)_mm512_inserti64x4(_mm512_castsi256_si512(half(i, at)), half(i + 8, at), 1);
        };
        block[i] = both(0);
        block[i + 8] = both(8);
      }
      return transpose<A, 4>(block);
    }
  }
#endif
#ifdef EAGLE2_BF16_PAIRS
  if constexpr (kPack<C> == 2) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) block[i] = (F32)load_pairs(rows[i] + 2 * d, dim - 2 * d);
    return transpose<A>(block);
  }
#endif
  if (d + L <= dim) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) block[i] = reader.vector(rows[i] + d);
    return transpose<A>(block);
  }
  for (int i = 0; i < L; ++i) {
    A row[L] = {};
    for (int64_t j = 0; d + j < dim; ++j) row[j] = reader.scalar(rows[i][d + j]);
    block[i] = load(row);
  }
  transpose<A>(block);
}

// Rows as columns of words in panels, converted: lane j of vector v at step d is word d of row
// v * lanes + j. Reads `count` rows rounded up to a multiple of the lane count; `first` is the
// vector of the first.
template <typename C, typename A>
void load_transposed(Reader<C, A> reader, const C* const* rows, int64_t count, int64_t dim,
                     int64_t first, A* columns) {
  constexpr int L = kLanes<A>;
  const int64_t words = (dim + kPack<C> - 1) / kPack<C>;
  for (int64_t j = 0; j < count; j += L) {
    A* to = columns + panel_offset<A>(first + j / L, 0, words);
    for (int64_t d = 0; d < words; d += L) {
      typename Vector<A>::type block[L];
      load_transposed_block<C, A>(reader, rows + j, d, dim, block);
      if (d + L <= words) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store(to + (d + i) * kColumns * L, block[i]);
      } else {
        for (int i = 0; d + i < words; ++i) store(to + (d + i) * kColumns * L, block[i]);
      }
    }
  }
}

// Step i of `steps` of the values, in panels: a converted row, or the words of two rows. Up to the
// next multiple of the lane count the row goes on with zeros.
template <typename C, typename A>
inline void load_value(Reader<C, A> reader, const C* const* rows, int64_t dim, int64_t i,
                       int64_t steps, A* values) {
  constexpr int L = kLanes<A>;
#ifdef EAGLE2_BF16_PAIRS
  if constexpr (kPack<C> == 2) {
    for (int64_t d = 0; d < dim; d += 32) {
      const Zipped words = zip(load_pairs(rows[0] + d, dim - d), load_pairs(rows[1] + d, dim - d));
      store(values + panel_offset<A>(d / L, i, steps), words.low);
      if (d + L < dim) store(values + panel_offset<A>(d / L + 1, i, steps), words.high);
    }
    return;
  }
#endif
  const C* row = rows[0];
  int64_t d = 0;
  for (; d + L <= dim; d += L) {
    store(values + panel_offset<A>(d / L, i, steps), reader.vector(row + d));
  }
  if (d == dim) return;
  A* to = values + panel_offset<A>(d / L, i, steps);
  for (int j = 0; j < L; ++j) to[j] = d + j < dim ? reader.scalar(row[d + j]) : A(0);
}

// Where values come from, V vectors from vector v on: rows in place, converted as they are read, or
// a scratch block of words in panels. `ahead` (if any) are rows to fetch into the cache meanwhile.
template <typename C, typename A>
struct RowsInPlace {
  const C* const* rows;
  Reader<C, A> reader;
  const C* const* ahead;
  template <int V>
  __attribute__((always_inline)) void read(int64_t i, int64_t v,
                                           typename Vector<A>::type* value) const {
    constexpr int L = kLanes<A>;
    if (ahead != nullptr) {
#pragma GCC unroll 2
      for (int k = 0; k < kPack<C>; ++k) {
#pragma GCC unroll 8
        for (int d = 0; d < V * L; d += 64 / sizeof(C)) {
          __builtin_prefetch(ahead[kPack<C> * i + k] + v * L + d, 0, 2);
          __builtin_prefetch(rows[kPack<C> * i + k + L] + v * L + d, 0, 3);
        }
      }
    }
#ifdef EAGLE2_BF16_PAIRS
    if constexpr (kPack<C> == 2) {
      const C *a = rows[2 * i] + v * L, *b = rows[2 * i + 1] + v * L;
#pragma GCC unroll 8
      for (int k = 0; k < V; k += 2) {
        const int64_t count = V == 1 ? 16 : 32;
        const Zipped words = zip(load_pairs(a + k * L, count), load_pairs(b + k * L, count));
        value[k] = words.low;
        if constexpr (V > 1) value[k + 1] = words.high;
      }
      return;
    }
#endif
#pragma GCC unroll 8
    for (int k = 0; k < V; ++k) value[k] = reader.vector(rows[i] + (v + k) * L);
  }
};
template <typename A>
struct Panels {
  const A* base;
  int64_t steps;
  template <int V>
  __attribute__((always_inline)) void read(int64_t i, int64_t v,
                                           typename Vector<A>::type* value) const {
    const A* from = base + panel_offset<A>(v, i, steps);
#pragma GCC unroll 8
    for (int k = 0; k < V; ++k) value[k] = load(from + k * kLanes<A>);
  }
};

// scores[r][j] = sum over d of q[r][d] * columns[d][j], each score one chain over ascending words.
template <typename A, int Pack, int R, int V>
inline void score_block(const A* q, int64_t words, const A* columns, A* scores,
                        int64_t scores_pitch) {
  constexpr int L = kLanes<A>;
  typename Vector<A>::type sum[R][V] = {};
  for (int64_t d = 0; d < words; ++d) {
    typename Vector<A>::type key[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) key[v] = load(columns + (d * kColumns + v) * L);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto query = Product<A, Pack>::spread(q + r * words + d);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = Product<A, Pack>::add(sum[r][v], query, key[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * scores_pitch + v * L, sum[r][v]);
  }
}

template <typename A, int Pack, int R>
void score_rows(const A* q, int64_t words, const A* columns, int64_t begin, int64_t end, A* scores,
                int64_t scores_pitch) {
  for (int64_t v = begin; v < end;) {
    const A* at = columns + panel_offset<A>(v, 0, words);
    A* to = scores + v * kLanes<A>;
    if (v % kColumns == 0 && v + kColumns <= end) {
      score_block<A, Pack, R, kColumns>(q, words, at, to, scores_pitch);
      v += kColumns;
    } else {
      score_block<A, Pack, R, 1>(q, words, at, to, scores_pitch);
      ++v;
    }
  }
}

// The scores of the keys of vectors [begin, end).
template <typename A, int Pack, int R = kRows>
void score(int rows, const A* q, int64_t words, const A* columns, int64_t begin, int64_t end,
           A* scores, int64_t scores_pitch) {
  if constexpr (R > 1) {
    if (rows < R) {
      return score<A, Pack, R - 1>(rows, q, words, columns, begin, end, scores, scores_pitch);
    }
  }
  score_rows<A, Pack, R>(q, words, columns, begin, end, scores, scores_pitch);
}

// The same chains for rows of keys that are read once: transposed in registers, never stored.
// Scores of `count` keys, rounded up to a multiple of the lane count.
template <typename C, typename A, int R>
void score_in_place(Reader<C, A> reader, const A* q, int64_t dim, const C* const* rows,
                    int64_t count, A* scores, int64_t scores_pitch, const C* const* ahead) {
  constexpr int L = kLanes<A>, Pack = kPack<C>;
  const int64_t words = (dim + Pack - 1) / Pack;
  for (int64_t j = 0; j < count; j += L) {
    typename Vector<A>::type sum[R] = {};
    int64_t d = 0;
    for (; d + L <= words; d += L) {
      typename Vector<A>::type block[L];
      load_transposed_block<C, A>(reader, rows + j, d, dim, block);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (ahead != nullptr) {
          __builtin_prefetch(ahead[j + i] + Pack * d, 0, 2);
          __builtin_prefetch(rows[j + L + i] + Pack * d, 0, 3);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          sum[r] = Product<A, Pack>::add(sum[r], Product<A, Pack>::spread(q + r * words + d + i),
                                         block[i]);
        }
      }
    }
    if (d < words) {
      typename Vector<A>::type block[L];
      load_transposed_block<C, A>(reader, rows + j, d, dim, block);
      for (int i = 0; d + i < words; ++i) {
        for (int r = 0; r < R; ++r) {
          sum[r] = Product<A, Pack>::add(sum[r], Product<A, Pack>::spread(q + r * words + d + i),
                                         block[i]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(scores + r * scores_pitch + j, sum[r]);
  }
}

template <typename C, typename A, int R = kRows>
void score_in_place(int few, Reader<C, A> reader, const A* q, int64_t dim, const C* const* rows,
                    int64_t count, A* scores, int64_t scores_pitch, const C* const* ahead) {
  if constexpr (R > 1) {
    if (few < R) {
      return score_in_place<C, A, R - 1>(few, reader, q, dim, rows, count, scores, scores_pitch,
                                         ahead);
    }
  }
  score_in_place<C, A, R>(reader, q, dim, rows, count, scores, scores_pitch, ahead);
}

// sum[r][d] += weights[r][i] * values[i][d] for the words i in [begin, end), each element one chain
// over ascending i.
template <typename A, int Pack, int R, int V, typename Values>
inline void accumulate_block(const A* weights, int64_t weights_pitch, Values values, int64_t begin,
                             int64_t end, int64_t v0, A* sum, int64_t sum_pitch) {
  constexpr int L = kLanes<A>;
  sum += v0 * L;
  typename Vector<A>::type part[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) part[r][v] = load(sum + r * sum_pitch + v * L);
  }
  for (int64_t i = begin; i < end; ++i) {
    typename Vector<A>::type value[V];
    values.template read<V>(i, v0, value);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto weight = Product<A, Pack>::spread(weights + r * weights_pitch + i);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) part[r][v] = Product<A, Pack>::add(part[r][v], weight, value[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sum + r * sum_pitch + v * L, part[r][v]);
  }
}

template <typename A, int Pack, int R = kRows, typename Values>
void accumulate(int rows, const A* weights, int64_t weights_pitch, Values values, int64_t begin,
                int64_t end, int64_t vectors, A* sum, int64_t sum_pitch) {
  if constexpr (R > 1) {
    if (rows < R) {
      return accumulate<A, Pack, R - 1>(rows, weights, weights_pitch, values, begin, end, vectors,
                                        sum, sum_pitch);
    }
  }
  if (begin >= end) return;
  int64_t v = 0;
  for (; v + kColumns <= vectors; v += kColumns) {
    accumulate_block<A, Pack, R, kColumns>(weights, weights_pitch, values, begin, end, v, sum,
                                           sum_pitch);
  }
  for (; v < vectors; ++v) {
    accumulate_block<A, Pack, R, 1>(weights, weights_pitch, values, begin, end, v, sum, sum_pitch);
  }
}

// The shared words: those all rows see at once, the ragged ends row by row, so that no row meets a
// value it may not see.
template <typename A, int Pack, typename Values>
void accumulate_shared(int rows, const A* weights, int64_t weights_pitch, Values values,
                       const int64_t* begin, const int64_t* end, int64_t vectors, A* sum,
                       int64_t sum_pitch) {
  const int64_t low = *std::max_element(begin, begin + rows);
  const int64_t high = std::max(low, *std::min_element(end, end + rows));
  for (int r = 0; r < rows; ++r) {
    accumulate<A, Pack>(1, weights + r * weights_pitch, weights_pitch, values, begin[r],
                        low < high ? low : end[r], vectors, sum + r * sum_pitch, sum_pitch);
  }
  if (low == high) return;
  accumulate<A, Pack>(rows, weights, weights_pitch, values, low, high, vectors, sum, sum_pitch);
  for (int r = 0; r < rows; ++r) {
    accumulate<A, Pack>(1, weights + r * weights_pitch, weights_pitch, values, high, end[r],
                        vectors, sum + r * sum_pitch, sum_pitch);
  }
}

// In place on whole vectors: scores of pairs are scaled (queries of other forms came scaled); with
// a cap they are then divided by it and leave as cap * tanh(score), in units of log2. An infinite
// score becomes NaN: a row that sees a non-finite key must show it, and -inf would drop the key in
// silence. Returns the largest.
template <typename A, int Pack>
A cap_scores(A* scores, int64_t begin, int64_t end, A scale, A cap) {
  constexpr int L = kLanes<A>;
  auto most = broadcast<A>(-std::numeric_limits<A>::infinity());
  for (int64_t j = begin; j < end; j += L) {
    auto x = load(scores + j);
    if constexpr (Pack == 2) x = x * scale;
    x = x + (x - x);
    if (cap > 0) x = hyperbolic_tangent(x) * cap;
    store(scores + j, x);
    most = x > most ? x : most;  // NaN never becomes the largest
  }
  return max_lanes<A>(most);
}

template <typename A>
A largest(const A* scores, int64_t begin, int64_t end) {
  auto most = broadcast<A>(-std::numeric_limits<A>::infinity());
  for (int64_t j = begin; j < end; j += kLanes<A>) {
    const auto x = load(scores + j);
    most = x > most ? x : most;
  }
  return max_lanes<A>(most);
}

// Scores to weights 2^(score - peak) on whole vectors, a word of them for a word of keys; the
// caller has set what the row does not see to -inf. `weights` may be `scores`. Returns the weights'
// sum.
template <typename A, int Pack>
A exponentiate(const A* scores, int64_t begin, int64_t end, A* weights, A peak) {
  constexpr int L = kLanes<A>;
  const auto shift = broadcast<A>(peak);
  typename Vector<A>::type sum = {};
  for (int64_t j = begin; j < end; j += L) {
    const auto weight = exp2_nonpositive(load(scores + j) - shift);
    sum = sum + weight;
#ifdef EAGLE2_BF16_PAIRS
    if constexpr (Pack == 2) {
      const __m256bh words = _mm512_cvtneps_pbh((__m512)weight);
      __builtin_memcpy(weights + j / 2, &words, sizeof words);
      continue;
    }
#endif
    store(weights + j, weight);
  }
  return sum_lanes<A>(sum);
}

// The running softmax of a row takes in one part. The larger of the two peaks keeps its weight of
// exactly 1, so each update is a single multiply-add. A softmax of nothing has a total of 0.
template <typename A>
void merge_part(A peak, A total, const A* sum, int64_t dim, A* row_peak, A* row_total, A* row_sum) {
  if (*row_total == 0) {
    std::copy(sum, sum + dim, row_sum);
    *row_peak = peak;
    *row_total = total;
  } else if (peak > *row_peak) {
    const A decay = exp2_nonpositive_scalar<A>(*row_peak - peak);
    for (int64_t d = 0; d < dim; d += kLanes<A>) {
      store(row_sum + d, load(sum + d) + load(row_sum + d) * decay);
    }
    *row_total = total + *row_total * decay;
    *row_peak = peak;
  } else {
    const A decay = exp2_nonpositive_scalar<A>(peak - *row_peak);
    for (int64_t d = 0; d < dim; d += kLanes<A>) {
      store(row_sum + d, load(row_sum + d) + load(sum + d) * decay);
    }
    *row_total = *row_total + total * decay;
  }
}

// What the rows of one node see: the shared keys at positions [begin, end), then the path's slots.
// A slot outside the window stays in the path, so that the others keep their positions; it is
// stored as ~slot.
struct NodeView {
  int64_t begin, end;
  int64_t path, path_count;  // range in the task's list of slots
};

// The request of a task, its lengths cut to what has a place in the cache.
inline Request request_of(const AttentionParams& p, int64_t index) {
  Request request = {index, 0, p.nodes, 0, p.tree_len, nullptr};
  if (p.qo_indptr != nullptr) {
    request.first_row = p.qo_indptr[index * p.indptr_stride];
    if (index == p.batch) {
      request.rows = p.padding_rows;
      request.tree_len = 0;
      return request;
    }
    request.rows = p.qo_indptr[(index + 1) * p.indptr_stride] - request.first_row;
  }
  request.prefix = std::clamp<int64_t>(p.prefix_lens[index * p.prefix_stride], 0, p.capacity);
  if (p.depths != nullptr) {
    request.depths = p.depths + index * p.depths_stride[0];
    if (p.tree_len < 0) request.depths += request.first_row * p.depths_stride[1];
  }
  if (p.tree_len < 0) request.tree_len = request.rows;
  return request;
}

// Word `word` of a mask row without the bits from `slots` on; false behind the last word.
inline bool mask_word(const AttentionParams& p, const Request& request, int64_t node, int64_t word,
                      int64_t slots, uint64_t* bits) {
  const int64_t first = word * 64;
  if (first >= slots) return false;
  *bits = static_cast<uint64_t>(
      p.mask[request.index * p.mask_stride[0] + (request.first_row + node) * p.mask_stride[1] +
             word * p.mask_stride[2]]);
  if (slots - first < 64) *bits &= (uint64_t{1} << (slots - first)) - 1;
  return true;
}

// Depth of every tree slot as far as it is known, else -1: given, or the number of ancestors in the
// slot's own mask row. Slots of an earlier call (before the queries') have no row here.
inline void slot_depths(const AttentionParams& p, const Request& request, int64_t slots,
                        std::vector<int32_t>& depths) {
  depths.assign(slots, -1);
  if (request.depths != nullptr) {
    for (int64_t j = 0; j < slots; ++j) depths[j] = request.depths[j * p.depths_stride[1]];
    return;
  }
  const int64_t first = request.tree_len - request.rows;
  for (int64_t j = std::max<int64_t>(first, 0); j < slots; ++j) {
    int32_t count = 0;
    uint64_t bits;
    for (int64_t w = 0; mask_word(p, request, j - first, w, request.tree_len, &bits); ++w) {
      count += __builtin_popcountll(bits);
    }
    depths[j] = count - 1;
  }
}

// Appends the slots node `node` sees to `list`, in path order. In a tree they have the depths 0, 1,
// ..., so a slot of known depth has its place; the rest (earlier slots without depths, or a mask
// that is no tree) fill the free places in ascending order. Parents may have larger slots than
// their children.
inline void append_path(const AttentionParams& p, const Request& request, int64_t node,
                        int64_t slots, const std::vector<int32_t>& depths,
                        std::vector<int32_t>& list, std::vector<int32_t>& rest) {
  const size_t start = list.size();
  rest.clear();
  uint64_t bits;
  for (int64_t w = 0; mask_word(p, request, node, w, slots, &bits); ++w) {
    for (; bits != 0; bits &= bits - 1) {
      rest.push_back(static_cast<int32_t>(w * 64 + __builtin_ctzll(bits)));
    }
  }
  const int64_t count = static_cast<int64_t>(rest.size());
  list.resize(start + count, -1);
  size_t left = 0;
  for (const int32_t slot : rest) {
    const int32_t depth = depths[slot];
    if (depth >= 0 && depth < count && list[start + depth] < 0) {
      list[start + depth] = slot;
    } else {
      rest[left++] = slot;
    }
  }
  size_t next = 0;
  for (int64_t i = 0; next < left; ++i) {
    if (list[start + i] < 0) list[start + i] = rest[next++];
  }
}

// What node `node` sees, its path appended to `list`. `slots` of the tree have a place in the
// cache.
inline NodeView view_node(const AttentionParams& p, const Request& request, int64_t node,
                          int64_t slots, bool chain, const std::vector<int32_t>& depths,
                          std::vector<int32_t>& list, std::vector<int32_t>& rest) {
  const int64_t prefix = request.prefix, slot = request.tree_len - request.rows + node;
  NodeView see = {0, prefix, static_cast<int64_t>(list.size()), 0};
  if (request.tree_len > 0 && chain) {
    see.end = prefix + std::min(slot + 1, slots);
    if (p.window > 0) see.begin = std::max<int64_t>(0, prefix + slot - p.window + 1);
  } else if (request.tree_len > 0) {
    if (p.mask != nullptr) {
      append_path(p, request, node, slots, depths, list, rest);
    } else {
      for (int64_t j = 0; j <= slot && j < slots; ++j) list.push_back(static_cast<int32_t>(j));
    }
    see.path_count = static_cast<int64_t>(list.size()) - see.path;
    if (p.window > 0) {
      const int64_t own = request.depths[slot * p.depths_stride[1]];
      see.begin = std::clamp<int64_t>(prefix + own - p.window + 1, 0, prefix);
      for (int64_t i = see.path; i < see.path + see.path_count; ++i) {
        if (own - request.depths[list[i] * p.depths_stride[1]] >= p.window) list[i] = ~list[i];
      }
    }
    if (see.path_count == 0) see.end = 0;  // a padding row does not see the prefix either
  }
  if (see.begin >= see.end) see.begin = see.end = 0;
  return see;
}

// The rows of cache positions [first, first + count) of one KV head. Positions without a place in
// the cache point to `zero`, a row of zeros: a wrong length or page id gives a wrong result, never
// a wild read.
template <typename C>
void cache_rows(const AttentionParams& p, const void* cache, const int64_t* stride, int64_t request,
                int64_t head, int64_t first, int64_t count, const C* zero, const C** rows) {
  if (count <= 0) return;
  const C* base = static_cast<const C*>(cache);
  const int32_t* table =
      p.page_table == nullptr ? nullptr : p.page_table + request * p.table_stride[0];
  for (int64_t done = 0; done < count;) {
    const CacheSlot at = cache_slot(first + done, request, table, p.table_stride[1],
                                    p.table_entries, p.page_size, p.num_blocks);
    const int64_t offset = (first + done) % p.page_size;
    const int64_t run = std::min(count - done, p.page_size - offset);
    for (int64_t i = 0; i < run; ++i) {
      rows[done + i] = at.block < 0 ? zero
                                    : base + cache_offset(at.block, stride[0], at.slot + i,
                                                          stride[1], head, stride[2]);
    }
    done += run;
  }
}

// Rows whose running softmax is kept while the keys go by once.
constexpr int64_t kTileRows = 256;

// Logits are kept in units of log2, which saves the exponential a multiplication.
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// Query rows lie at `offset` in q, output rows at `offset` in out.
template <typename T, typename A>
void load_query_as(const AttentionParams& p, int64_t offset, A scale, A* to) {
  const T* from = static_cast<const T*>(p.q) + offset;
  for (int64_t d = 0; d < p.k_dim; ++d) to[d] = static_cast<A>(from[d]) * scale;
}

template <typename T, typename A>
void store_output_as(const AttentionParams& p, int64_t offset, const A* sum, A share) {
  T* to = static_cast<T*>(p.out) + offset;
  for (int64_t d = 0; d < p.v_dim; ++d) to[d] = static_cast<T>(sum[d] * share);
}

// The type of q and out is the caches', but beside a float8 cache. Pairs stay as they are: their
// scores are scaled.
template <typename C, typename A>
void load_query(const AttentionParams& p, int64_t offset, A scale, A* to) {
  if constexpr (kPack<C> == 2) {
    to[(p.k_dim - 1) / 2] = 0;  // both halves of the last word
    __builtin_memcpy(to, static_cast<const C*>(p.q) + offset, p.k_dim * sizeof(C));
  } else if constexpr (!kFloat8<C>) {
    load_query_as<C>(p, offset, scale, to);
  } else if (p.q_type == ScalarType::Float) {
    load_query_as<float>(p, offset, scale, to);
  } else if (p.q_type == ScalarType::Half) {
    load_query_as<c10::Half>(p, offset, scale, to);
  } else {
    load_query_as<c10::BFloat16>(p, offset, scale, to);
  }
}

template <typename C, typename A>
void store_output(const AttentionParams& p, int64_t offset, const A* sum, A share) {
  if constexpr (!kFloat8<C>) {
    store_output_as<C>(p, offset, sum, share);
  } else if (p.q_type == ScalarType::Float) {
    store_output_as<float>(p, offset, sum, share);
  } else if (p.q_type == ScalarType::Half) {
    store_output_as<c10::Half>(p, offset, sum, share);
  } else {
    store_output_as<c10::BFloat16>(p, offset, sum, share);
  }
}

// The sink joins the softmax, then the row is normalised and stored. A row that saw nothing has a
// `sum` of zeros.
template <typename C, typename A>
void store_row(const AttentionParams& p, const Request& request, int64_t node, int64_t head, A peak,
               A total, const A* sum) {
  const bool empty = total == 0;
  A weight = 1;
  if (p.sinks != nullptr) {
    const A sink = static_cast<A>(p.sinks[head] * kLog2E);
    if (empty) {
      peak = sink;
      total = 1;
    } else if (sink > peak) {
      weight = exp2_nonpositive_scalar<A>(peak - sink);
      total = 1 + total * weight;
      peak = sink;
    } else {
      total = total + exp2_nonpositive_scalar<A>(sink - peak);
    }
  }
  const int64_t row = request.first_row + node;
  store_output<C>(p,
                  request.index * p.out_stride[0] + row * p.out_stride[1] + head * p.out_stride[2],
                  sum, empty ? A(0) : weight / total);
  if (p.lse == nullptr) return;
  const bool nothing = empty && p.sinks == nullptr;
  p.lse[request.index * p.lse_stride[0] + row * p.lse_stride[1] + head * p.lse_stride[2]] =
      nothing ? -std::numeric_limits<float>::infinity()
              : static_cast<float>((peak + std::log2(total)) * static_cast<A>(kLn2));
}

// The softmax of a row over one chunk, where several tasks share the keys: peak, total, sum.
template <typename A>
inline A* part_of(const AttentionParams& p, int64_t request, int64_t kv_head, int64_t row,
                  int64_t chunk) {
  const int64_t size = part_size(p.v_dim, kLanes<A>);
  const int64_t rows = std::max(p.nodes, p.padding_rows) * p.group;
  const int64_t at = ((request * p.kv_heads + kv_head) * rows + row) * p.chunks + chunk;
  return static_cast<A*>(p.partial) + at * size;
}

template <typename C, typename A>
void attend(const AttentionParams& p, int64_t task) {
  constexpr int L = kLanes<A>, Pack = kPack<C>;
  constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();
  // KV heads of the same keys follow each other: their rows share pages and often lines.
  const int64_t kv_head = task % p.kv_heads;
  const int64_t part = task / p.kv_heads % p.parts;
  const int64_t split = task / p.kv_heads / p.parts % p.splits;
  const Request request = request_of(p, task / p.kv_heads / p.parts / p.splits);
  const int64_t part_begin = p.chunks * part / p.parts;
  const int64_t part_end = p.chunks * (part + 1) / p.parts;
  const int64_t node_begin = request.rows * split / p.splits;
  const int64_t node_end = request.rows * (split + 1) / p.splits;
  if (node_begin == node_end) return;

  const int64_t k_dim = p.k_dim, v_dim = p.v_dim, group = p.group, chunk = p.chunk;
  const int64_t words = (k_dim + Pack - 1) / Pack;  // of a query
  const int64_t vectors = (v_dim + L - 1) / L, row_pitch = vectors * L;
  const int64_t key_vectors = (chunk + L - 1) / L, pitch = key_vectors * L;
  const int64_t scores_pitch = pitch + L;           // a path's scores begin anywhere
  const int64_t steps = (chunk + Pack - 1) / Pack;  // words of values
  const int64_t tile_nodes = std::max<int64_t>(1, kTileRows / group);
  const int64_t tile_rows = tile_nodes * group;
  const auto panels = [](int64_t count) {
    return (count + kColumns - 1) / kColumns * kColumns * L;
  };

  const int64_t prefix = request.prefix;
  const int64_t slots = std::min(request.tree_len, p.capacity - prefix);
  // A chain whose positions are its slots needs no path: it is more prefix, with an end per row.
  const bool chain = p.mask == nullptr && (p.window == 0 || request.depths == nullptr);
  const Reader<C, A> read_k = {p.k_scale}, read_v = {p.v_scale};

  Arena arena;
  A* q = arena.take<A>(tile_rows * words);
  A* row_peak = arena.take<A>(tile_rows);
  A* row_total = arena.take<A>(tile_rows);
  A* row_sum = arena.take<A>(tile_rows * row_pitch);
  A* columns = arena.take<A>(words * panels(key_vectors));
  A* path_columns = arena.take<A>(words * panels(key_vectors));
  A* values = arena.take<A>(steps * panels(vectors));
  A* path_values = arena.take<A>((steps + 1) * panels(vectors));
  A* scores = arena.take<A>(kRows * scores_pitch);
  A* weights = Pack == 1 ? scores : arena.take<A>(kRows * scores_pitch);
  A* sum = arena.take<A>(kRows * row_pitch);
  C* zero = arena.take<C>(std::max(k_dim, v_dim));
  // Of this chunk and of the next, which is fetched into the cache meanwhile. Behind the last lie
  // other rows of the cache: whole vectors of keys are scored, and rows ahead fetched, from them.
  const int64_t row_slots = pitch + L;
  const C** k_rows = arena.take<const C*>(4 * row_slots);
  const C **v_rows = k_rows + row_slots, **next_k = v_rows + row_slots;
  const C** next_v = next_k + row_slots;
  const C** path_k = arena.take<const C*>(pitch);
  bool* valued = arena.take<bool>(steps + 1);
  NodeView* view = arena.take<NodeView>(tile_nodes);
  int32_t* node_of = arena.take<int32_t>(tile_rows);
  std::fill(zero, zero + std::max(k_dim, v_dim), static_cast<C>(0.0f));
  std::fill(k_rows, k_rows + 4 * row_slots, zero);

  const C **k_slots = nullptr, **v_slots = nullptr;
  if (!chain) {
    k_slots = arena.take<const C*>(slots);
    v_slots = arena.take<const C*>(slots);
    cache_rows<C>(p, p.k, p.k_stride, request.index, kv_head, prefix, slots, zero, k_slots);
    cache_rows<C>(p, p.v, p.v_stride, request.index, kv_head, prefix, slots, zero, v_slots);
  }

  // Divided by the cap where there is one, see cap_scores.
  const A scale = static_cast<A>(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E);
  const A cap = static_cast<A>(p.softcap * kLog2E);

  static thread_local std::vector<int32_t> depths, paths, rest;
  if (!chain && p.mask != nullptr) slot_depths(p, request, slots, depths);

  for (int64_t tile = node_begin; tile < node_end; tile += tile_nodes) {
    const int64_t nodes = std::min(tile_nodes, node_end - tile);
    const int64_t rows = nodes * group;

    paths.clear();
    int64_t first_key = INT64_MAX, shared_end = 0, last_key = 0;
    for (int64_t n = 0; n < nodes; ++n) {
      view[n] = view_node(p, request, tile + n, slots, chain, depths, paths, rest);
      const NodeView& see = view[n];
      if (see.end > 0) first_key = std::min(first_key, see.begin);
      if (see.path_count > 0) first_key = std::min(first_key, prefix);
      shared_end = std::max(shared_end, see.end);
      last_key = std::max({last_key, see.end, see.path_count > 0 ? prefix + see.path_count : 0});
    }

    // Queries, scaled; empty running softmax.
    for (int64_t r = 0; r < rows; ++r) {
      node_of[r] = static_cast<int32_t>(r / group);
      load_query<C>(p,
                    request.index * p.q_stride[0] +
                        (request.first_row + tile + node_of[r]) * p.q_stride[1] +
                        (kv_head * group + r % group) * p.q_stride[2],
                    scale, q + r * words);
      row_peak[r] = kMinusInfinity;
      row_total[r] = 0;
      if (p.parts == 1) {
        std::fill(row_sum + r * row_pitch, row_sum + (r + 1) * row_pitch, A(0));
        continue;
      }
      for (int64_t c = part_begin; c < part_end; ++c) {
        part_of<A>(p, request.index, kv_head, tile * group + r, c)[1] = 0;
      }
    }

    const bool in_place =
        v_dim % (Pack * L) == 0 && ((std::is_same_v<C, A> && rows <= 64) || rows <= kRows);
    const int64_t first_chunk = first_key == INT64_MAX ? 0 : first_key / chunk;
    const int64_t last_chunk = (last_key + chunk - 1) / chunk;
    const auto shared_of = [&](int64_t c) {
      return std::clamp<int64_t>(shared_end - c * chunk, 0, chunk);
    };
    const auto find_rows = [&](int64_t c, int64_t head, const C** to_k, const C** to_v) {
      const int64_t shared = shared_of(c);
      const int64_t skip = std::clamp<int64_t>(first_key - c * chunk, 0, shared) / L * L;
      cache_rows<C>(p, p.k, p.k_stride, request.index, head, c * chunk + skip, shared - skip, zero,
                    to_k + skip);
      cache_rows<C>(p, p.v, p.v_stride, request.index, head, c * chunk + skip, shared - skip, zero,
                    to_v + skip);
    };
    int64_t found = -1;  // the chunk whose rows next_k and next_v name
    const int64_t chunk_begin = std::max(first_chunk, part_begin);
    const int64_t chunk_end = std::min(last_chunk, part_end);

    for (int64_t c = chunk_begin; c < chunk_end; ++c) {
      const int64_t start = c * chunk;
      const int64_t shared = shared_of(c);
      const int64_t skip = std::clamp<int64_t>(first_key - start, 0, shared) / L * L;
      if (found != c) find_rows(c, kv_head, next_k, next_v);
      std::swap(k_rows, next_k);
      std::swap(v_rows, next_v);
      // The last chunk of a task fetches the first of the next task: of the next head or, behind
      // the last head, of the next part.
      const bool one_block = rows <= kRows;
      const bool last = c + 1 == chunk_end;
      const bool other = last && p.parts > 1;
      const bool next_head = other && kv_head + 1 < p.kv_heads;
      found = next_head ? chunk_begin : c + 1;
      const int64_t ahead = last && !other ? 0 : shared_of(found);
      if (ahead > 0) {
        find_rows(found, next_head ? kv_head + 1 : other ? 0 : kv_head, next_k, next_v);
      }
      if (other) found = -1;
      if (shared > skip) {
        const int64_t count = shared - skip;
        if (!one_block) {
          load_transposed<C, A>(read_k, k_rows + skip, count, k_dim, skip / L, columns);
        }
        if (!in_place) {
          for (int64_t i = skip / Pack; i < shared / Pack; ++i) {
            load_value<C, A>(read_v, v_rows + i * Pack, v_dim, i, steps, values);
          }
        }
      }

      int64_t loaded_node = -1, valued_node = -1;  // whose path's keys and values are at hand
      for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
        const int count = static_cast<int>(std::min<int64_t>(kRows, rows - r0));
        if (!one_block) {
          const int64_t from = ahead * r0 / rows;
          const int64_t fetched = ahead * std::min(r0 + kRows, rows) / rows - from;
          prefetch_rows(next_k + from, fetched, k_dim);
          prefetch_rows(next_v + from, fetched, v_dim);
        }
        int64_t begin[kRows], end[kRows];  // shared keys of this chunk each row sees
        int64_t low = chunk, high = 0;
        for (int r = 0; r < count; ++r) {
          const NodeView& see = view[node_of[r0 + r]];
          begin[r] = std::clamp<int64_t>(see.begin - start, 0, chunk);
          end[r] = std::clamp<int64_t>(see.end - start, 0, chunk);
          if (begin[r] >= end[r]) begin[r] = end[r] = 0;
          if (end[r] > 0) low = std::min(low, begin[r]);
          high = std::max(high, end[r]);
        }
        if (low < high && one_block) {
          const int64_t from = low / L * L;
          score_in_place<C, A>(count, read_k, q, k_dim, k_rows + from, high - from, scores + from,
                               scores_pitch, v_dim >= k_dim ? v_rows + from : nullptr);
        } else if (low < high) {
          score<A, Pack>(count, q + r0 * words, words, columns, low / L, (high + L - 1) / L, scores,
                         scores_pitch);
        }

        // Positions of the path inside this chunk: [path_begin, path_end), per row.
        int64_t path_begin[kRows], path_end[kRows];
        for (int r = 0; r < count; ++r) {
          const int64_t n = node_of[r0 + r];
          const NodeView& see = view[n];
          path_begin[r] = std::clamp<int64_t>(prefix - start, 0, chunk);
          path_end[r] = see.path_count == 0
                            ? path_begin[r]
                            : std::clamp<int64_t>(prefix + see.path_count - start, 0, chunk);
          const int64_t length = path_end[r] - path_begin[r];
          if (length <= 0) continue;
          if (n != loaded_node) {
            const int32_t* path = paths.data() + see.path + (start + path_begin[r] - prefix);
            for (int64_t j = 0; j < length; ++j) {
              path_k[j] = k_slots[path[j] < 0 ? ~path[j] : path[j]];
            }
            for (int64_t j = length; j % L != 0; ++j) path_k[j] = zero;
            load_transposed<C, A>(read_k, path_k, length, k_dim, 0, path_columns);
            loaded_node = n;
          }
          // The rows of one node follow each other and are scored together.
          const int same = static_cast<int>(std::min<int64_t>(count - r, (n + 1) * group - r0 - r));
          score<A, Pack>(same, q + (r0 + r) * words, words, path_columns, 0, (length + L - 1) / L,
                         scores + r * scores_pitch + path_begin[r], scores_pitch);
          for (int i = 1; i < same; ++i) {
            path_begin[r + i] = path_begin[r];
            path_end[r + i] = path_end[r];
          }
          r += same - 1;
        }

        A peak[kRows], total[kRows];
        bool sees[kRows];
        for (int r = 0; r < count; ++r) {
          const bool path = path_end[r] > path_begin[r];
          sees[r] = path || begin[r] < end[r];
          if (!sees[r]) continue;
          const int64_t from = begin[r] < end[r] ? begin[r] : path_begin[r];
          const int64_t to = path ? path_end[r] : end[r];
          const int64_t whole_from = from / L * L, whole_to = (to + L - 1) / L * L;
          A* row = scores + r * scores_pitch;
          peak[r] = cap_scores<A, Pack>(row, whole_from, whole_to, scale, cap);
          const bool masked = path || from > whole_from || to < whole_to;
          std::fill(row + whole_from, row + from, kMinusInfinity);
          std::fill(row + to, row + whole_to, kMinusInfinity);
          if (path) {
            const NodeView& see = view[node_of[r0 + r]];
            bool any = begin[r] < end[r];
            for (int64_t j = path_begin[r]; j < path_end[r]; ++j) {
              if (paths[see.path + start + j - prefix] < 0) {
                row[j] = kMinusInfinity;
              } else {
                any = true;
              }
            }
            sees[r] = any;
            if (!any) continue;
          }
          if (masked) peak[r] = largest<A>(row, whole_from, whole_to);
          total[r] =
              exponentiate<A, Pack>(row, whole_from, whole_to, weights + r * scores_pitch, peak[r]);
        }

        // Words of shared keys that a row sees whole; a pair it sees half of is completed by a
        // row of zeros, or by the first key of its path.
        std::fill(sum, sum + count * row_pitch, A(0));
        int64_t word_begin[kRows], word_end[kRows];
        const auto add_half = [&](int r, const C* a, const C* b, int64_t word) {
          const C* pair[2] = {a, b};
          load_value<C, A>(read_v, pair, v_dim, steps, steps + 1, path_values);
          accumulate<A, Pack>(1, weights + r * scores_pitch + word - steps, scores_pitch,
                              Panels<A>{path_values, steps + 1}, steps, steps + 1, vectors,
                              sum + r * row_pitch, row_pitch);
        };
        for (int r = 0; r < count; ++r) {
          word_begin[r] = (begin[r] + Pack - 1) / Pack;
          word_end[r] = std::max(word_begin[r], end[r] / Pack);
          if (begin[r] % Pack != 0) add_half(r, zero, v_rows[begin[r]], begin[r] / Pack);
        }
        if (in_place) {
          accumulate_shared<A, Pack>(
              count, weights, scores_pitch,
              RowsInPlace<C, A>{v_rows, read_v,
                                one_block && ahead > 0 && k_dim >= v_dim ? next_k : nullptr},
              word_begin, word_end, vectors, sum, row_pitch);
        } else {
          accumulate_shared<A, Pack>(count, weights, scores_pitch, Panels<A>{values, steps},
                                     word_begin, word_end, vectors, sum, row_pitch);
        }
        for (int r = 0; r < count;) {
          const int64_t n = node_of[r0 + r];
          const int same = static_cast<int>(std::min<int64_t>(count - r, (n + 1) * group - r0 - r));
          if (path_end[r] <= path_begin[r]) {
            for (; r < count && node_of[r0 + r] == n; ++r) {
              if (end[r] % Pack != 0) add_half(r, v_rows[end[r] - 1], zero, end[r] / Pack);
            }
            continue;
          }
          const int32_t* path = paths.data() + view[n].path + (start - prefix);
          const int64_t first = path_begin[r] / Pack, last = (path_end[r] + Pack - 1) / Pack;
          if (n != valued_node) {
            // The value at a position, null where the node does not see it.
            const auto seen = [&](int64_t j) -> const C* {
              if (j >= path_end[r]) return nullptr;
              if (j >= path_begin[r]) return path[j] < 0 ? nullptr : v_slots[path[j]];
              return begin[r] <= j && j < end[r] ? v_rows[j] : nullptr;
            };
            for (int64_t i = first; i < last; ++i) {
              const C* word[Pack];
              valued[i - first] = false;
              for (int j = 0; j < Pack; ++j) {
                const C* row = seen(i * Pack + j);
                valued[i - first] |= row != nullptr;
                word[j] = row == nullptr ? zero : row;
              }
              if (valued[i - first]) {
                load_value<C, A>(read_v, word, v_dim, i - first, steps + 1, path_values);
              }
            }
            valued_node = n;
          }
          for (int64_t i = 0, stop; i < last - first; i = stop + 1) {
            for (stop = i; stop < last - first && valued[stop];) ++stop;
            accumulate<A, Pack>(same, weights + r * scores_pitch + first, scores_pitch,
                                Panels<A>{path_values, steps + 1}, i, stop, vectors,
                                sum + r * row_pitch, row_pitch);
          }
          r += same;
        }

        for (int r = 0; r < count; ++r) {
          if (!sees[r]) continue;
          if (p.parts == 1) {
            merge_part<A>(peak[r], total[r], sum + r * row_pitch, row_pitch, &row_peak[r0 + r],
                          &row_total[r0 + r], row_sum + (r0 + r) * row_pitch);
            continue;
          }
          A* to = part_of<A>(p, request.index, kv_head, tile * group + r0 + r, c);
          to[0] = peak[r];
          to[1] = total[r];
          std::copy(sum + r * row_pitch, sum + (r + 1) * row_pitch, to + L);
        }
      }
    }

    if (p.parts > 1) continue;
    for (int64_t r = 0; r < rows; ++r) {
      store_row<C>(p, request, tile + node_of[r], kv_head * group + r % group, row_peak[r],
                   row_total[r], row_sum + r * row_pitch);
    }
  }
}

// Merges and stores the rows of one (request, KV head, node) whose keys several tasks shared.
template <typename C, typename A>
void merge_parts(const AttentionParams& p, int64_t task) {
  constexpr int L = kLanes<A>;
  const int64_t nodes = std::max(p.nodes, p.padding_rows);
  const int64_t node = task % nodes, kv_head = task / nodes % p.kv_heads;
  const Request request = request_of(p, task / nodes / p.kv_heads);
  if (node >= request.rows) return;
  const int64_t row_pitch = (p.v_dim + L - 1) / L * L;
  Arena arena;
  A* sum = arena.take<A>(row_pitch);
  for (int64_t g = 0; g < p.group; ++g) {
    A peak = -std::numeric_limits<A>::infinity(), total = 0;
    std::fill(sum, sum + row_pitch, A(0));
    for (int64_t c = 0; c < p.chunks; ++c) {
      const A* part = part_of<A>(p, request.index, kv_head, node * p.group + g, c);
      if (part[1] != 0) merge_part<A>(part[0], part[1], part + L, row_pitch, &peak, &total, sum);
    }
    store_row<C>(p, request, node, kv_head * p.group + g, peak, total, sum);
  }
}

template <typename C, typename A>
constexpr AttentionKernel kKernel = {attend<C, A>, merge_parts<C, A>, sizeof(A), kLanes<A>};

}  // namespace

#ifdef EAGLE2_BF16_PAIRS
extern const AttentionKernel kBFloat16 = kKernel<c10::BFloat16, float>;
#else
extern const AttentionKernels kAttention = {
    kKernel<double, double>,
    kKernel<float, float>,
    kKernel<c10::Half, float>,
    kKernel<c10::BFloat16, float>,
    kKernel<c10::Float8_e4m3fn, float>,
};
#endif
