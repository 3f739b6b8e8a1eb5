// The products of linear_kernel.h on the matrix unit: 16 pairs of k a step, for up to 32 rows and
// 32 columns. A row of the unit is a row of x, so that a row's bits are its own here too. A part of
// linear_kernel.h, which says how it is compiled.

#include "tile_scope.h"

// Columns [0, V vectors) of rows that fill RA tiles.
template <int RA, int V>
void tile(int64_t rows, const Linear& linear, const Word* x, const uint16_t* weights, Ahead ahead,
          int64_t row, int64_t column) {
  const int64_t pairs = linear.pairs();
  Tiles::zero<0>();
  if constexpr (V == 2) Tiles::zero<1>();
  if constexpr (RA == 2) Tiles::zero<2>();
  if constexpr (RA == 2 && V == 2) Tiles::zero<3>();
  for (int64_t first = 0; first < pairs; first += kChunk, x += rows * kPitch) {
    const int64_t count = std::min(kChunk, pairs - first);
    for (int64_t i = 0; i < count; i += kDepth, weights += 2 * kPanel * kDepth) {
      for (int64_t k = 0; k < kDepth; ++k, ahead.at += ahead.step) {
        __builtin_prefetch(ahead.at, 0, 2);
        __builtin_prefetch(ahead.at + 64, 0, 2);
      }
      // Past the last pair lies another panel, or nothing.
      alignas(64) uint16_t last[2 * kPanel * kDepth];
      const uint16_t* words = weights;
      if (count - i < kDepth) {
        __builtin_memset(last, 0, sizeof last);
        for (int64_t k = 0; k < count - i; ++k) {
          __builtin_memcpy(last + 2 * kPanel * k, weights + 2 * kPanel * k, 4 * V * kLanes);
        }
        words = last;
      }
      Tiles::load<4>(x + i, kPitch * 4);
      if constexpr (RA == 2) Tiles::load<5>(x + 16 * kPitch + i, kPitch * 4);
      Tiles::load<6>(words, 4 * kPanel);
      Tiles::add_product<0, 4, 6>();
      if constexpr (RA == 2) Tiles::add_product<2, 5, 6>();
      if constexpr (V == 2) {
        Tiles::load<7>(words + 2 * kLanes, 4 * kPanel);
        Tiles::add_product<1, 4, 7>();
        if constexpr (RA == 2) Tiles::add_product<3, 5, 7>();
      }
    }
  }
  alignas(64) F32 sums[kRows][V];
  constexpr int64_t kStride = sizeof sums[0];
  Tiles::store<0>(sums, kStride);
  if constexpr (V == 2) Tiles::store<1>(&sums[0][1], kStride);
  if constexpr (RA == 2) Tiles::store<2>(sums[16], kStride);
  if constexpr (RA == 2 && V == 2) Tiles::store<3>(&sums[16][1], kStride);
  const Columns<V> columns(linear, column);
  for (int64_t r = 0; r < rows; ++r) columns.put(sums[r], row + r);
}

// `unit` columns of `rows` rows.
inline void tiles(int64_t rows, const Linear& linear, const Word* x, const uint16_t* weights,
                  Ahead ahead, int64_t row, int64_t column) {
  configure_tiles(static_cast<int>(rows));
  if (linear.unit == kPanel) {
    return (rows > 16 ? tile<2, 2> : tile<1, 2>)(rows, linear, x, weights, ahead, row, column);
  }
  (rows > 16 ? tile<2, 1> : tile<1, 1>)(rows, linear, x, weights, ahead, row, column);
}
