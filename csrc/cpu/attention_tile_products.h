// Scores and weighted sums of values on the matrix unit, behind the names that
// attention_products.h gives them without it.
// A part of attention_kernel.h, which says how it is compiled.

#include "tile_scope.h"

// c[r][j] (+)= sum over the words i in [begin, end) of a[r][i] * b[i][j] for the rows of RA tiles
// and the V vectors j from v on, each element one chain over ascending i, 16 words a step.
template <int RA, int V>
void multiply_tiles(const float* a, int64_t a_pitch, Panels<float> b, int64_t begin, int64_t end,
                    int64_t v, float* c, int64_t c_pitch, bool fresh) {
  static_assert(RA * V <= 4);
  const int64_t stride = c_pitch * 4;
  const auto for_sums = [&](auto&& body) {
    body(std::integral_constant<int, 0>{});
    if constexpr (RA * V > 1) body(std::integral_constant<int, 1>{});
    if constexpr (RA * V > 2) body(std::integral_constant<int, 2>{});
    if constexpr (RA * V > 3) body(std::integral_constant<int, 3>{});
  };
  const auto place = [&](int sum) { return c + sum / V * 16 * c_pitch + (v + sum % V) * 16; };
  // With one tile of rows the sums are 0, 1, 2, 3, with two 0, 1 of the first and 2, 3 of the
  // second.
  const auto tile_of = [](auto sum) {
    return std::integral_constant<int, RA == 1 ? sum : sum / V * 2 + sum % V>{};
  };
  for_sums([&](auto sum) {
    constexpr int kTile = tile_of(sum);
    if (fresh) {
      Tiles::zero<kTile>();
    } else {
      Tiles::load<kTile>(place(sum), stride);
    }
  });
  for (int64_t i = begin; i < end; i += kDepth) {
    Tiles::load<4>(a + i, a_pitch * 4);
    if constexpr (RA == 2) Tiles::load<5>(a + 16 * a_pitch + i, a_pitch * 4);
    const auto column = [&](auto k) {
      if constexpr (k < V) {
        Tiles::load<6 + k % 2>(b.base + panel_offset<float>(v + k, i, b.steps), kColumns * 64);
        Tiles::add_product<tile_of(k), 4, 6 + k % 2>();
        if constexpr (RA == 2) {
          Tiles::add_product<tile_of(std::integral_constant<int, V + k>{}), 5, 6 + k % 2>();
        }
      }
    };
    column(std::integral_constant<int, 0>{});
    column(std::integral_constant<int, 1>{});
    column(std::integral_constant<int, 2>{});
    column(std::integral_constant<int, 3>{});
  }
  for_sums([&](auto sum) { Tiles::store<tile_of(sum)>(place(sum), stride); });
}

inline void multiply_tiles(int rows, const float* a, int64_t a_pitch, Panels<float> b,
                           int64_t begin, int64_t end, int64_t v, int64_t v_end, float* c,
                           int64_t c_pitch, bool fresh) {
  configure_tiles(rows);
  const auto run = [&](auto multiply) {
    multiply(a, a_pitch, b, begin, end, v, c, c_pitch, fresh);
  };
  if (rows > 16) {
    for (; v + 2 <= v_end; v += 2) run(multiply_tiles<2, 2>);
    if (v < v_end) run(multiply_tiles<2, 1>);
    return;
  }
  for (; v + 4 <= v_end; v += 4) run(multiply_tiles<1, 4>);
  for (; v < v_end; ++v) run(multiply_tiles<1, 1>);
}

template <typename A, int Pack, typename Fetch>
void score(int rows, const A* q, int64_t words, const A* columns, int64_t begin, int64_t end,
           A* scores, int64_t scores_pitch, Fetch&) {
  multiply_tiles(rows, q, words, Panels<A>{columns, words}, 0, words, begin, end, scores,
                 scores_pitch, true);
}

template <typename A, int Pack>
void accumulate(int rows, const A* weights, int64_t weights_pitch, Panels<A> values, int64_t begin,
                int64_t end, int64_t vectors, A* sum, int64_t sum_pitch) {
  if (begin >= end) return;
  multiply_tiles(rows, weights, weights_pitch, values, begin, end, 0, vectors, sum, sum_pitch,
                 false);
}
