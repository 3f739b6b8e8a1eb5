// The software model of the matrix unit against results that the manual's order of sums, roundings
// and flushed subnormals give. Exit status 0: all as expected. With an argument: a misuse, which
// must end the process.
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "cpu/tiles.h"

namespace {

using Tiles = eagle2::TileModel;

int failures = 0;

void expect(const char* what, float got, float want) {
  if (got == want && std::signbit(got) == std::signbit(want)) return;
  std::printf("%s: expected %a, got %a\n", what, static_cast<double>(want),
              static_cast<double>(got));
  ++failures;
}

uint16_t bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

eagle2::TileConfig config(int rows, int words) {
  eagle2::TileConfig c{};
  c.palette = 1;
  const int count[3] = {rows, rows, words}, bytes[3] = {64, 4 * words, 64};
  for (int i = 0; i < 3; ++i) {
    c.rows[i] = static_cast<uint8_t>(count[i]);
    c.row_bytes[i] = static_cast<uint16_t>(bytes[i]);
  }
  return c;
}

// Element [0, 0] of C + A B for one row of A and one column of B, `words` pairs.
float product(float c, int words, const float (*a)[2], const float (*b)[2]) {
  uint16_t a_tile[16][32] = {}, b_tile[16][32] = {};
  float c_tile[16][16] = {};
  c_tile[0][0] = c;
  for (int k = 0; k < words; ++k) {
    for (int i = 0; i < 2; ++i) {
      a_tile[0][2 * k + i] = bfloat16(a[k][i]);
      b_tile[k][i] = bfloat16(b[k][i]);
    }
  }
  Tiles::configure(config(16, 16));
  Tiles::load<0>(c_tile, 64);
  Tiles::load<1>(a_tile, 64);
  Tiles::load<2>(b_tile, 64);
  Tiles::add_product<0, 1, 2>();
  Tiles::store<0>(c_tile, 64);
  Tiles::release();
  return c_tile[0][0];
}

float product(float c, float a, float b) {
  const float as[1][2] = {{a, 0}}, bs[1][2] = {{b, 0}};
  return product(c, 1, as, bs);
}

// Every element of a product of 5 rows and 7 words, with strides, and the memory around it.
void check_shape() {
  uint16_t a[5][20] = {}, b[7][40] = {};
  float c[6][20], want[6][20];
  for (int r = 0; r < 5; ++r) {
    for (int k = 0; k < 14; ++k) a[r][k] = bfloat16(static_cast<float>(r - k));
  }
  for (int k = 0; k < 7; ++k) {
    for (int n = 0; n < 32; ++n) b[k][n] = bfloat16(static_cast<float>(2 * k + n % 2 - n / 2));
  }
  for (int r = 0; r < 6; ++r) {
    for (int n = 0; n < 20; ++n) {
      c[r][n] = want[r][n] = static_cast<float>(100 * r + n);
      if (r >= 5 || n >= 16) continue;
      for (int k = 0; k < 14; ++k) want[r][n] += static_cast<float>((r - k) * (k - n));
    }
  }
  Tiles::configure(config(5, 7));
  Tiles::load<0>(c, sizeof c[0]);
  Tiles::load<1>(a, sizeof a[0]);
  Tiles::load<2>(b, sizeof b[0]);
  Tiles::add_product<0, 1, 2>();
  Tiles::store<0>(c, sizeof c[0]);
  for (int r = 0; r < 6; ++r) {
    for (int n = 0; n < 20; ++n) expect("shape", c[r][n], want[r][n]);
  }
  Tiles::zero<0>();
  Tiles::store<0>(c, sizeof c[0]);
  expect("zeroed", c[4][15], 0);
  eagle2::TileConfig found;
  Tiles::save(&found);
  expect("configured", found.rows[0], 5);
  Tiles::release();
  Tiles::save(&found);
  expect("released", found.palette, 0);
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {
    Tiles::configure(config(16, 16));
    Tiles::zero<3>();
    return 0;
  }
  check_shape();
  const float big[2][2] = {{0x1p24f, 1}, {-0x1p24f, 0}}, ones[2][2] = {{1, 1}, {1, 1}};
  expect("even and odd elements apart", product(0, 2, big, ones), 1);
  const float one[1][2] = {{1, 1}};
  expect("the sum of a step, then C", product(0x1p24f, 1, one, ones), 0x1p24f + 2);
  const float fused[2][2] = {{-1, 0}, {1 + 0x1p-7f, 0}};
  const float by[2][2] = {{1, 0}, {1 - 0x1p-8f, 0}};
  expect("one rounding", product(0, 2, fused, by), 0x1p-8f - 0x1p-15f);
  expect("subnormal of A", product(0, 0x1p-127f, 0x1p100f), 0);
  expect("subnormal of B", product(0, 0x1p100f, -0x1p-127f), 0);
  expect("subnormal of C", product(-0x1p-130f, 1, 0), 0);
  expect("subnormal product", product(0, 0x1p-100f, 0x1p-30f), 0);
  expect("subnormal sum", product(-FLT_MIN, FLT_MIN, 1.5f), 0);
  expect("smallest normal", product(0, FLT_MIN, 1), FLT_MIN);
  expect("overflow", product(0, 0x1p127f, 4), INFINITY);
  if (!std::isnan(product(0, INFINITY, 0))) expect("infinity times zero", 0, NAN);
  return failures == 0 ? 0 : 1;
}
