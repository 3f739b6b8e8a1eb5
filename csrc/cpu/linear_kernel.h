// The kernel of linear.h, included once per instruction set: inside a namespace of its own, with
// the target's options switched on, EAGLE2_VECTOR_BYTES set, EAGLE2_BF16_PAIRS where a lane
// multiplies pairs of bfloat16, and EAGLE2_TILES, a matrix unit of tiles.h, where that is to do it.
// No include guard, no includes but of parts.
//
// A block of rows and a panel's columns are a tile of accumulators in registers: the panel is read
// as one stream, in order, once for each block, and each sum is one chain over ascending k whatever
// the tile. So a row's bits depend on nothing but the row. Few rows are bound by the stream from
// memory, which is fetched ahead, across panels; with many, a panel stays in the cache between
// blocks. x comes from a copy in which the rows of a block are a fixed distance apart.
//
// Bytes read per output element: 2 in_features / rows of the weight from memory.

namespace {

typedef float F32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(EAGLE2_VECTOR_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(EAGLE2_VECTOR_BYTES / 2)));

constexpr int kLanes = EAGLE2_VECTOR_BYTES / 4;
// Vectors of a tile. Registers hold kRows x kVectors accumulators and a step's weights.
constexpr int kVectors = 2;
#ifdef EAGLE2_TILES
constexpr int kRows = 32;
#elif EAGLE2_VECTOR_BYTES < 64
constexpr int kRows = 4;
#elif defined(EAGLE2_BF16_PAIRS)
constexpr int kRows = 14;
#else
constexpr int kRows = 12;
#endif

// A row of x is staged in chunks of so many pairs of k. Rows of a block lie kPitch words apart: no
// power of two, or they would share a few sets of the first-level cache.
constexpr int64_t kChunk = 512;
#ifdef EAGLE2_BF16_PAIRS
using Word = uint32_t;  // a pair
constexpr int kWords = 1;
#else
using Word = float;
constexpr int kWords = 2;
#endif
constexpr int64_t kPitch = kChunk * kWords + 16;

#ifdef EAGLE2_TILES
constexpr int64_t kDepth = 16;  // pairs of k that a product of tiles takes
static_assert(kChunk % kDepth == 0);
#endif

// What is fetched into the second-level cache: the stream, so many bytes ahead of where it is read;
// where several passes go over a panel of at most kKept bytes, the next panel in their course.
constexpr int64_t kAhead = 6144;
constexpr int64_t kKept = 256 << 10;

inline int64_t chunks_of(int64_t pairs) { return (pairs + kChunk - 1) / kChunk; }

// a * b + c, rounded once where the level can: everywhere alike.
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

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widen(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// The columns' weights of one pair of k, and a row's pair: products added to a sum.
struct Weights {
#ifdef EAGLE2_BF16_PAIRS
  __m512bh pairs;
#else
  F32 even, odd;
#endif
};

inline Weights load_weights(const uint16_t* p) {
#ifdef EAGLE2_BF16_PAIRS
  return {(__m512bh)_mm512_loadu_si512(p)};
#else
  U32 words;
  __builtin_memcpy(&words, p, sizeof words);
  const F32 low = (F32)(words << 16), high = (F32)(words & 0xffff0000u);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return {low, high};
#else
  return {high, low};
#endif
#endif
}

struct Pair {
#ifdef EAGLE2_BF16_PAIRS
  __m512bh both;
#else
  F32 even, odd;
#endif
};

inline Pair load_pair(const Word* x) {
#ifdef EAGLE2_BF16_PAIRS
  return {(__m512bh)_mm512_set1_epi32(static_cast<int32_t>(*x))};
#else
  return {x[0] - F32{}, x[1] - F32{}};  // x - 0 keeps the sign of a zero
#endif
}

inline F32 add_product(F32 sum, const Pair& x, const Weights& w) {
#ifdef EAGLE2_BF16_PAIRS
  return (F32)_mm512_dpbf16_ps((__m512)sum, x.both, w.pairs);
#else
  return fused(x.odd, w.odd, fused(x.even, w.even, sum));
#endif
}

// Rounded to bfloat16, ties to even; NaN stays NaN, subnormals stay what they are.
inline U32 round_words(F32 x) {
  const U32 bits = (U32)x;
  const U32 rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
  const U32 nan = (U32)((bits & 0x7fffffffu) > 0x7f800000u);
  return ((rounded & ~nan) | ((bits | 0x00400000u) & nan)) >> 16;
}

// Pairs [first, first + count) of k of a row of x. Behind the last k are zeros.
inline void stage_row(const uint16_t* x, int64_t in_features, int64_t first, int64_t count,
                      Word* to) {
  const int64_t whole = std::min(in_features / 2 - first, count);
#ifdef EAGLE2_BF16_PAIRS
  __builtin_memcpy(to, x + 2 * first, static_cast<size_t>(whole) * sizeof(Word));
  if (whole < count) {
    uint16_t last[2] = {x[in_features - 1], 0};
    __builtin_memcpy(to + whole, last, sizeof last);
  }
#ifdef EAGLE2_TILES
  for (int64_t i = count; i % kDepth != 0; ++i) to[i] = 0;
#endif
#else
  for (int64_t i = 0; i < 2 * whole; ++i) to[i] = widen(x[2 * first + i]);
  if (whole < count) {
    to[2 * whole] = widen(x[in_features - 1]);
    to[2 * whole + 1] = 0;
  }
#endif
}

// Where a pass over a panel fetches from, and how far it goes on with each pair of k.
struct Ahead {
  const char* at;
  int64_t step;
};

// V vectors of columns of the result.
template <int V>
class Columns {
 public:
  Columns(const Linear& linear, int64_t column)
      : linear_(linear),
        column_(column),
        count_(std::min<int64_t>(V * kLanes, linear.out_features - column)) {
    if (linear.bias == nullptr) return;
    for (int64_t c = 0; c < count_; ++c) bias_[c] = widen(linear.bias[column + c]);
  }

  __attribute__((always_inline)) void put(const F32* sum, int64_t row) const {
    uint16_t rounded[V * kLanes];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      F32 y = sum[v];
      if (linear_.bias != nullptr) {
        F32 bias;
        __builtin_memcpy(&bias, bias_ + v * kLanes, sizeof bias);
        y += bias;
      }
      const U16 words = __builtin_convertvector(round_words(y), U16);
      __builtin_memcpy(rounded + v * kLanes, &words, sizeof words);
    }
    uint16_t* out = linear_.out + row * linear_.out_features + column_;
    if (count_ == V * kLanes) {
      __builtin_memcpy(out, rounded, sizeof rounded);
    } else {
      __builtin_memcpy(out, rounded, static_cast<size_t>(count_) * sizeof(uint16_t));
    }
  }

 private:
  const Linear& linear_;
  int64_t column_, count_;
  float bias_[V * kLanes] = {};
};

#ifdef EAGLE2_TILES
#include "linear_tiles.h"
#else
class TileScope {};

// Columns [0, V vectors) of R rows. `weights` is at the first of the columns.
template <int R, int V>
void tile(const Linear& linear, const Word* x, const uint16_t* weights, Ahead ahead, int64_t row,
          int64_t column) {
  F32 sum[R][V] = {};
  const int64_t pairs = linear.pairs();
  for (int64_t first = 0; first < pairs; first += kChunk, x += R * kPitch) {
    const int64_t count = std::min(kChunk, pairs - first);
    for (int64_t i = 0; i < count; ++i, weights += 2 * kPanel) {
      __builtin_prefetch(ahead.at, 0, 2);
      __builtin_prefetch(ahead.at + 64, 0, 2);
      ahead.at += ahead.step;
      Weights w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) w[v] = load_weights(weights + 2 * v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Pair pair = load_pair(x + r * kPitch + i * kWords);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = add_product(sum[r][v], pair, w[v]);
      }
    }
  }
  const Columns<V> columns(linear, column);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) columns.put(sum[r], row + r);
}

// `unit` columns of `rows` rows.
template <int R = kRows>
void tiles(int64_t rows, const Linear& linear, const Word* x, const uint16_t* weights, Ahead ahead,
           int64_t row, int64_t column) {
  if constexpr (R > 1) {
    if (rows < R) return tiles<R - 1>(rows, linear, x, weights, ahead, row, column);
  }
  const int64_t end = std::min(column + linear.unit, linear.out_features);
  if constexpr (kVectors * kLanes == kPanel) {
    if (linear.unit == kPanel / 2) return tile<R, 1>(linear, x, weights, ahead, row, column);
  }
  for (; column < end; column += kVectors * kLanes, weights += 2 * kVectors * kLanes) {
    tile<R, kVectors>(linear, x, weights, ahead, row, column);
  }
}

#endif  // EAGLE2_TILES

void run(const Linear& linear, int64_t begin, int64_t end) {
  const int64_t units = linear.units(), pairs = linear.pairs(), chunks = chunks_of(pairs);
  const int64_t panel_bytes = pairs * 4 * kPanel;
  const int64_t group_rows = (linear.rows + linear.groups - 1) / linear.groups;
  Arena arena;
  [[maybe_unused]] const TileScope scope;
  Word* staged = arena.take<Word>(group_rows * chunks * kPitch);
  for (int64_t task = begin; task < end;) {
    const int64_t group = task / units, last = std::min(end, (group + 1) * units);
    const int64_t row0 = group * linear.rows / linear.groups;
    const int64_t rows = (group + 1) * linear.rows / linear.groups - row0;
    const int64_t blocks = (rows + kRows - 1) / kRows;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * rows / blocks, count = (b + 1) * rows / blocks - first;
      Word* to = staged + first * chunks * kPitch;
      for (int64_t r = 0; r < count; ++r) {
        const uint16_t* x = linear.x.at(row0 + first + r);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          stage_row(x, linear.in_features, chunk * kChunk, std::min(kChunk, pairs - chunk * kChunk),
                    to + (chunk * count + r) * kPitch);
        }
      }
    }
    for (; task < last; ++task) {
      const int64_t column = (task - group * units) * linear.unit;
      const uint16_t* weights =
          linear.packed + column / kPanel * pairs * 2 * kPanel + column % kPanel * 2;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = b * rows / blocks, count = (b + 1) * rows / blocks - first;
        const char* from = reinterpret_cast<const char*>(weights);
        Ahead ahead{from + kAhead, 4 * kPanel};
        if (blocks > 1 && panel_bytes <= kKept) {
          ahead = {from + panel_bytes + b * panel_bytes / blocks,
                   (4 * kPanel + blocks - 1) / blocks};
        }
        tiles(count, linear, staged + first * chunks * kPitch, weights, ahead, row0 + first,
              column);
      }
    }
  }
}

}  // namespace

extern const LinearKernel kLinearKernel = {kRows, kWords * static_cast<int64_t>(sizeof(Word)), run};
