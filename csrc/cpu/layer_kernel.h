// The rows of layer.h, included once per instruction set: inside a namespace of its own, with the
// target's options switched on and EAGLE2_VECTOR_BYTES set. No include guard, no includes.
//
// Arithmetic is float32. A level with fused multiply-adds must not fuse a rotation's product into
// its sum, for torch rounds both: see `apart`.

namespace {

#include "attention_vectors.h"

constexpr int kWidth = kLanes<float>;

// The same value, which the compiler cannot see through: what was rounded stays rounded.
inline F32 apart(F32 x) {
#if defined(__x86_64__) && EAGLE2_VECTOR_BYTES == 64
  __asm__("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}

// The bits of x rounded to bfloat16 (nearest even), whose lower half is to be dropped. A NaN that
// arithmetic has made of bfloat16 values stays one: its lower half is zero.
inline U32 nearest_bits(F32 x) {
  const U32 bits = (U32)x;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

inline void store_words(void* p, U32 words) {
#if EAGLE2_VECTOR_BYTES == 64
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)words));
#elif EAGLE2_VECTOR_BYTES == 32
  const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  const U16 half = __builtin_convertvector(words, U16);
  __builtin_memcpy(p, &half, sizeof half);
#endif
}

inline void put(float* p, F32 x) { __builtin_memcpy(p, &x, sizeof x); }

inline void put(c10::BFloat16* p, F32 x) {
  const U32 nan = (U32)(x != x);
  store_words(p, ((nearest_bits(x) >> 16) & ~nan) | (0x7fc0u & nan));
}

inline void put(c10::Half* p, F32 x) {
#if EAGLE2_VECTOR_BYTES == 64
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif EAGLE2_VECTOR_BYTES == 32
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kWidth; ++i) p[i] = c10::Half(x[i]);
#endif
}

// x as a T holds it.
template <typename T>
inline F32 as(F32 x) {
  if constexpr (std::is_same_v<T, float>) {
    return apart(x);
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return (F32)(nearest_bits(x) & 0xffff0000u);
  } else {
    c10::Half words[kWidth];
    put(words, x);
    return load(words);
  }
}

// Of what `as` gave: nothing is rounded again.
inline void put_exact(float* p, F32 x) { put(p, x); }
inline void put_exact(c10::Half* p, F32 x) { put(p, x); }
inline void put_exact(c10::BFloat16* p, F32 x) { store_words(p, (U32)x >> 16); }

// A whole vector of a row, and what is left at its end; the rest of that vector is zeros.
struct Whole {};
struct Part {
  size_t count;
};

template <typename T>
inline F32 load(const T* p, Whole) {
  return load(p);
}

template <typename T>
inline F32 load(const T* p, Part part) {
  T words[kWidth] = {};
  std::memcpy(static_cast<void*>(words), p, part.count * sizeof(T));
  return load(words);
}

template <typename T>
inline void put(T* p, F32 x, Whole) {
  put(p, x);
}

template <typename T>
inline void put(T* p, F32 x, Part part) {
  T words[kWidth];
  put(words, x);
  std::memcpy(static_cast<void*>(p), words, part.count * sizeof(T));
}

template <typename T>
inline void put_exact(T* p, F32 x, Whole) {
  put_exact(p, x);
}

template <typename T>
inline void put_exact(T* p, F32 x, Part part) {
  put(p, x, part);
}

// step(i, Whole or Part) for the vectors of a row.
template <typename Step>
inline void for_vectors(int64_t width, const Step& step) {
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) step(i, Whole{});
  if (i < width) step(i, Part{static_cast<size_t>(width - i)});
}

// Two chains of squares, vectors in turn: the order of the sum is the row's own.
struct Squares {
  F32 chain = {}, other = {};

  void add(F32 x) {
    const F32 sum = chain + x * x;
    chain = other;
    other = sum;
  }
  float mean(int64_t width) const {
    return sum_lanes<float>(chain + other) / static_cast<float>(width);
  }
};

template <typename T>
inline void scale_row(const T* x, const T* weight, int64_t width, float mean, float eps, T* out) {
  const F32 scale = broadcast<float>(1.0f / std::sqrt(mean + eps));
  for_vectors(width, [=](int64_t i, auto part) {
    put(out + i, as<T>(load(x + i, part) * scale) * load(weight + i, part), part);
  });
}

template <typename T>
void rms_norm(const void* x, const void* weight, int64_t width, float eps, void* out) {
  const T* row = static_cast<const T*>(x);
  Squares squares;
  for_vectors(width, [&](int64_t i, auto part) { squares.add(load(row + i, part)); });
  scale_row(row, static_cast<const T*>(weight), width, squares.mean(width), eps,
            static_cast<T*>(out));
}

// sum[i..] += x[i..], rounded; that sum.
template <typename T, typename Size>
inline F32 add_part(const T* x, T* sum, int64_t i, Size part) {
  const F32 value = as<T>(load(sum + i, part) + load(x + i, part));
  put_exact(sum + i, value, part);
  return value;
}

template <typename T>
void add_rms_norm(void* x, void* residual, const void* weight, int64_t width, float eps) {
  T* row = static_cast<T*>(x);
  T* sum = static_cast<T*>(residual);
  Squares squares;
  for_vectors(width, [&](int64_t i, auto part) { squares.add(add_part(row, sum, i, part)); });
  scale_row(sum, static_cast<const T*>(weight), width, squares.mean(width), eps, row);
}

template <typename T>
void add(const void* x, void* residual, int64_t width) {
  const T* row = static_cast<const T*>(x);
  T* sum = static_cast<T*>(residual);
  for_vectors(width, [=](int64_t i, auto part) { add_part(row, sum, i, part); });
}

// e^x: 0 far below, infinity above, NaN for NaN; within 1.5 of the last place.
inline F32 exponential(F32 x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // Either bound is past what a float32 holds. NaN passes both.
#if EAGLE2_VECTOR_BYTES == 64
  x = (F32)_mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x);
  x = (F32)_mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);
#elif EAGLE2_VECTOR_BYTES == 32
  x = (F32)_mm256_min_ps(_mm256_set1_ps(89.0f), (__m256)x);
  x = (F32)_mm256_max_ps(_mm256_set1_ps(-104.0f), (__m256)x);
#else
  x = x > 89.0f ? broadcast<float>(89.0f) : x;
  x = x < -104.0f ? broadcast<float>(-104.0f) : x;
#endif
  const F32 shifted = x * 1.44269504f + kMagic;
  const F32 n = shifted - kMagic;
  // ln 2 in two parts: n times the first is exact.
  const F32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F32 y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
#if EAGLE2_VECTOR_BYTES == 64
  return (F32)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  // 2^n in two factors: one alone does not reach the ends of the range.
  const U32 whole = (U32)shifted - 0x4b400000u;
  const U32 half = (U32)((I32)whole >> 1);
  return y * (F32)((half + 127u) << 23) * (F32)((whole - half + 127u) << 23);
#endif
}

template <typename T>
void silu_and_mul(const void* gate, const void* up, int64_t width, void* out) {
  const T* g = static_cast<const T*>(gate);
  const T* u = static_cast<const T*>(up);
  T* target = static_cast<T*>(out);
  for_vectors(width, [=](int64_t i, auto part) {
    const F32 x = load(g + i, part);
    put(target + i, as<T>(x / (exponential(-x) + 1.0f)) * load(u + i, part), part);
  });
}

// R is what both products are rounded to.
template <typename T, typename C, typename R>
void rotate_row(const T* x, const C* cos, const C* sin, int64_t width, T* out) {
  const int64_t half = width / 2;
  for_vectors(half, [=](int64_t i, auto part) {
    const int64_t j = half + i;
    const F32 first = load(x + i, part), second = load(x + j, part);
    const F32 low = as<R>(first * load(cos + i, part)) - as<R>(second * load(sin + i, part));
    const F32 high = as<R>(second * load(cos + j, part)) + as<R>(first * load(sin + j, part));
    put(out + i, low, part);
    put(out + j, high, part);
  });
}

template <typename T>
void rotate(const void* x, const void* cos, const void* sin, int64_t width, void* out) {
  rotate_row<T, T, T>(static_cast<const T*>(x), static_cast<const T*>(cos),
                      static_cast<const T*>(sin), width, static_cast<T*>(out));
}

template <typename T>
void rotate_wide(const void* x, const float* cos, const float* sin, int64_t width, void* out) {
  rotate_row<T, float, float>(static_cast<const T*>(x), cos, sin, width, static_cast<T*>(out));
}

template <typename T>
constexpr LayerKernel kKernelOf = {&rms_norm<T>,     &add_rms_norm<T>, &add<T>,
                                   &silu_and_mul<T>, &rotate<T>,       &rotate_wide<T>};

}  // namespace

LayerKernels kLayerKernels = {kKernelOf<float>, kKernelOf<c10::Half>, kKernelOf<c10::BFloat16>};
