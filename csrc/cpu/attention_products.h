// Products of the attention kernel: rows of K and V as operands, scores, weighted sums of values.
// A part of attention_kernel.h, which says how it is compiled.

#include "attention_vectors.h"

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

// Rows [next, end) of K and V, to be fetched into the cache in steps of a line of each while
// something else is computed: many at once would be waited for.
template <typename C>
struct RowsAhead {
  const C *const *k, *const *v;
  int64_t dim;  // the larger of K's and V's
  int64_t next, end;
  int64_t done = 0;  // elements of row `next`

  __attribute__((always_inline)) void step() {
    if (next >= end) return;
    __builtin_prefetch(k[next] + done, 0, 2);
    __builtin_prefetch(v[next] + done, 0, 2);
    done += 64 / sizeof(C);
    if (done >= dim) {
      done = 0;
      ++next;
    }
  }
  void finish() {
    while (next < end) step();
  }
};
struct NothingAhead {
  void step() {}
};

// Words of a row of K or of a query, zeros behind the last element.
template <typename C>
inline int64_t words_of(int64_t dim) {
  return round_up((dim + kPack<C> - 1) / kPack<C>, kDepth);
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
  // Halves of two rows are put together as they are loaded, quarters of four by one shuffle; then
  // four by four words are transposed inside each quarter.
  if constexpr (L == 16 && (std::is_same_v<C, float> || kPack<C> == 2)) {
    if (kPack<C> * (d + L) <= dim) {
      const auto halves = [&](int row, int at) {
        const auto half = [&](int r) {
          return _mm256_loadu_ps(reinterpret_cast<const float*>(rows[r] + kPack<C> * (d + at)));
        };
        return _mm512_insertf32x8(_mm512_castps256_ps512(half(row)), half(row + 4), 1);
      };
#pragma GCC unroll 2
      for (int at = 0; at < L; at += 8) {
        __m512 first[4], second[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m512 low = halves(i, at), high = halves(i + 8, at);
          first[i] = _mm512_shuffle_f32x4(low, high, 0x88);
          second[i] = _mm512_shuffle_f32x4(low, high, 0xdd);
        }
        transpose_quarters(first, block + at);
        transpose_quarters(second, block + at + 4);
      }
      return;
    }
  }
#elif EAGLE2_VECTOR_BYTES == 32
  if constexpr (std::is_same_v<C, float>) {
    if (d + L <= dim) {
#pragma GCC unroll 2
      for (int at = 0; at < L; at += 4) {
        __m256 halves[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          halves[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + d + at)),
                                           _mm_loadu_ps(rows[i + 4] + d + at), 1);
        }
        transpose_quarters(halves, block + at);
      }
      return;
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
// vector of the first. Rows that `ahead` (if any) names are fetched into the cache meanwhile.
template <typename C, typename A>
void load_transposed(Reader<C, A> reader, const C* const* rows, int64_t count, int64_t dim,
                     int64_t first, A* columns, const C* const* ahead = nullptr,
                     int64_t ahead_dim = 0) {
  constexpr int L = kLanes<A>;
  const int64_t words = words_of<C>(dim);
  for (int64_t j = 0; j < count; j += L) {
    if (ahead != nullptr) prefetch_rows(ahead + j, L, ahead_dim);
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
// a scratch block of words in panels. With Fetch the rows of `ahead` are fetched into the cache
// meanwhile, and these rows' next into the first level.
template <typename C, typename A, bool Fetch>
struct RowsInPlace {
  const C* const* rows;
  Reader<C, A> reader;
  const C* const* ahead;
  template <int V>
  __attribute__((always_inline)) void read(int64_t i, int64_t v,
                                           typename Vector<A>::type* value) const {
    constexpr int L = kLanes<A>;
    if constexpr (Fetch) {
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

// c[r][j] (+)= sum over the words i in [begin, end) of a[r][i] * b[i][j] for R rows and the V
// vectors j from v0 on, each element one chain over ascending i. Rows that `ahead` names are
// fetched meanwhile.
template <typename A, int Pack, int R, int V, bool Fresh, typename Values, typename Fetch>
inline void multiply_block(const A* a, int64_t a_pitch, Values b, int64_t begin, int64_t end,
                           int64_t v0, A* c, int64_t c_pitch, Fetch& ahead) {
  constexpr int L = kLanes<A>;
  c += v0 * L;
  typename Vector<A>::type sum[R][V] = {};
  if constexpr (!Fresh) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = load(c + r * c_pitch + v * L);
    }
  }
  Fetch fetch = ahead;  // in registers
  for (int64_t i = begin; i < end; ++i) {
    fetch.step();
    typename Vector<A>::type value[V];
    b.template read<V>(i, v0, value);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto word = Product<A, Pack>::spread(a + r * a_pitch + i);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = Product<A, Pack>::add(sum[r][v], word, value[v]);
    }
  }
  ahead = fetch;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_pitch + v * L, sum[r][v]);
  }
}

template <typename A, int Pack, int R, typename Fetch>
void score_rows(const A* q, int64_t words, const A* columns, int64_t begin, int64_t end, A* scores,
                int64_t scores_pitch, Fetch& ahead) {
  const Panels<A> keys{columns, words};
  for (int64_t v = begin; v < end;) {
    if (v % kColumns == 0 && v + kColumns <= end) {
      multiply_block<A, Pack, R, kColumns, true>(q, words, keys, 0, words, v, scores, scores_pitch,
                                                 ahead);
      v += kColumns;
    } else {
      multiply_block<A, Pack, R, 1, true>(q, words, keys, 0, words, v, scores, scores_pitch, ahead);
      ++v;
    }
  }
}

// The same chains for rows that are read once: transposed in registers, never stored.
// Scores of `count` keys, rounded up to a multiple of the lane count. Rows that `ahead` (if
// any) names are fetched into the cache meanwhile, and these rows' next into the first level.
template <typename C, typename A, int R>
void score_in_place(Reader<C, A> reader, const A* q, int64_t dim, const C* const* rows,
                    int64_t count, A* scores, int64_t scores_pitch, const C* const* ahead) {
  constexpr int L = kLanes<A>, Pack = kPack<C>;
  const int64_t words = words_of<C>(dim);
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

#ifdef EAGLE2_TILES
#include "attention_tile_products.h"
#else
class TileScope {};

// The scores of the keys of vectors [begin, end).
template <typename A, int Pack, int R = kRows, typename Fetch>
void score(int rows, const A* q, int64_t words, const A* columns, int64_t begin, int64_t end,
           A* scores, int64_t scores_pitch, Fetch& ahead) {
  if constexpr (R > 1) {
    if (rows < R) {
      return score<A, Pack, R - 1>(rows, q, words, columns, begin, end, scores, scores_pitch,
                                   ahead);
    }
  }
  score_rows<A, Pack, R>(q, words, columns, begin, end, scores, scores_pitch, ahead);
}

// sum[r][d] += weights[r][i] * values[i][d] for the words i in [begin, end).
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
  NothingAhead nothing;
  int64_t v = 0;
  for (; v + kColumns <= vectors; v += kColumns) {
    multiply_block<A, Pack, R, kColumns, false>(weights, weights_pitch, values, begin, end, v, sum,
                                                sum_pitch, nothing);
  }
  for (; v < vectors; ++v) {
    multiply_block<A, Pack, R, 1, false>(weights, weights_pitch, values, begin, end, v, sum,
                                         sum_pitch, nothing);
  }
}

#endif  // EAGLE2_TILES

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
