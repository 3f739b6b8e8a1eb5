// The matrix unit (AMX) as the kernels see it: eight tiles of 16 rows of 64 bytes. A product takes
// A [rows, 16 words] and B [16 words, 16] and adds to C [rows, 16] of float32, a word being a pair
// of bfloat16.
//
// TileUnit is the hardware. TileModel does the same in plain code, for machines without it: the
// order of the sums, the roundings and the flushed subnormals are those of TDPBF16PS in Intel's
// manual, and a use that the hardware answers with a fault ends the process.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace eagle2 {

// The operand of LDTILECFG. All zeros: no tiles.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// Instructions by hand: GCC's intrinsics take the number of a tile as a literal only, and its load
// does not tell the compiler that it reads memory.
struct TileUnit {
  static void save(TileConfig* config) { __asm__ volatile("sttilecfg %0" : "=m"(*config)); }
  static void configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void release() { __asm__ volatile("tilerelease"); }
  template <int Tile>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  template <int Tile>
  static void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile)
                     : "memory");
  }
  template <int Tile>
  static void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  template <int C, int A, int B>
  static void add_product() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

class TileModel {
 public:
  static void save(TileConfig* config) { *config = state().config; }
  static void configure(const TileConfig& config) {
    require(config.palette <= 1 && config.start_row == 0);
    if (config.palette == 0) return release();
    for (int i = 0; i < 16; ++i) {
      require(i < 8 ? config.rows[i] <= 16 && config.row_bytes[i] <= 64
                    : config.rows[i] == 0 && config.row_bytes[i] == 0);
      require((config.rows[i] == 0) == (config.row_bytes[i] == 0));
    }
    state() = State{config, {}};
  }
  static void release() { state() = State{}; }
  template <int Tile>
  static void zero() {
    at<Tile>() = Data{};
  }
  template <int Tile>
  static void load(const void* from, int64_t stride) {
    Data& tile = at<Tile>();
    tile = Data{};
    for (int r = 0; r < state().config.rows[Tile]; ++r) {
      std::memcpy(tile.word[r], static_cast<const char*>(from) + r * stride,
                  state().config.row_bytes[Tile]);
    }
  }
  template <int Tile>
  static void store(void* to, int64_t stride) {
    const Data& tile = at<Tile>();
    for (int r = 0; r < state().config.rows[Tile]; ++r) {
      std::memcpy(static_cast<char*>(to) + r * stride, tile.word[r],
                  state().config.row_bytes[Tile]);
    }
  }
  // Even and odd elements of the words are summed apart, then together, then added to C.
  template <int C, int A, int B>
  static void add_product() {
    Data& c = at<C>();
    const Data &a = at<A>(), &b = at<B>();
    const TileConfig& config = state().config;
    require(C != A && C != B && A != B && config.rows[C] == config.rows[A] &&
            config.row_bytes[C] == config.row_bytes[B] &&
            config.row_bytes[A] / 4 == config.rows[B]);
    for (int r = 0; r < config.rows[C]; ++r) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < config.rows[B]; ++k) {
        const float low = flushed(number(a.word[r][k] << 16));
        const float high = flushed(number(a.word[r][k] & 0xffff0000u));
        for (int n = 0; n < 16; ++n) {
          const float b_low = flushed(number(b.word[k][n] << 16));
          const float b_high = flushed(number(b.word[k][n] & 0xffff0000u));
          even[n] = flushed(std::fma(low, b_low, even[n]));
          odd[n] = flushed(std::fma(high, b_high, odd[n]));
        }
      }
      for (int n = 0; n < config.row_bytes[C] / 4; ++n) {
        const float sum = flushed(flushed(number(c.word[r][n])) + flushed(even[n] + odd[n]));
        std::memcpy(&c.word[r][n], &sum, sizeof sum);
      }
    }
  }

 private:
  struct Data {
    uint32_t word[16][16];
  };
  struct State {
    TileConfig config;
    Data tile[8];
  };
  static State& state() {
    static thread_local State state{};
    return state;
  }
  static void require(bool right) {
    if (!right) std::abort();
  }
  template <int Tile>
  static Data& at() {
    require(state().config.palette == 1 && state().config.rows[Tile] > 0);
    return state().tile[Tile];
  }
  static float number(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  // Subnormals become zeros of their sign.
  static float flushed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return number((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
  }
};

}  // namespace eagle2
