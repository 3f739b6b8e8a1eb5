// Rows of logits on the CPU: reading any float dtype, exponentials, and the k best of a row. Shared
// by expand.cpp and verify.cpp. Loops that run over the vocabulary are compiled once per
// instruction set (rows.cpp) and give the same bits on each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common.h"

namespace eagle2 {

// Logits [B, N, V] of any float dtype and any strides.
struct Logits {
  const char* data = nullptr;
  ScalarType type = ScalarType::Float;
  int64_t size[3] = {};
  int64_t stride[3] = {};
  int64_t item = 0;  // bytes per element

  const void* at(int64_t b, int64_t n, int64_t v) const {
    return data + (b * stride[0] + n * stride[1] + v * stride[2]) * item;
  }
};

Logits logits_view(const Tensor& tensor, const char* name);

constexpr int64_t kChunk = 1024;  // logits handled at a time: they stay in the first-level cache

// Elements [first, first + count) of row (b, n), with NaN as -inf and +inf as the largest finite
// value. A float row is never asked of float64 logits.
void read_logits(const Logits& logits, int64_t b, int64_t n, int64_t first, int64_t count,
                 float* out);
void read_logits(const Logits& logits, int64_t b, int64_t n, int64_t first, int64_t count,
                 double* out);

float largest(const float* x, int64_t count);
double largest(const double* x, int64_t count);

// The sum of e^(x - peak), peak being at least every x; -inf adds nothing.
double sum_exp(const float* x, int64_t count, float peak);
double sum_exp(const double* x, int64_t count, double peak);

// out = (x - peak) / temperature; -inf stays -inf.
void scale_logits(const float* x, int64_t count, float peak, float temperature, float* out);
void scale_logits(const double* x, int64_t count, double peak, double temperature, double* out);

// out = e^x for x <= 0.
void exp_logits(const float* x, int64_t count, float* out);
void exp_logits(const double* x, int64_t count, double* out);

// e^x for x <= 0, rounded to a multiple of 2^-33: the sum of up to 2^20 of them is exact in
// float64, so a cut by mass does not depend on the order in which they are added.
void exp_masses(const float* x, int64_t count, float* out);
void exp_masses(const double* x, int64_t count, double* out);

// The sum of non-negative terms, in float64.
double sum_of(const float* x, int64_t count);
double sum_of(const double* x, int64_t count);

// Clears (to -inf) the elements whose bit in `mask` is not set. `first` is a multiple of 32.
void clear_banned(const int32_t* mask, int64_t first, int64_t count, float* x);
void clear_banned(const int32_t* mask, int64_t first, int64_t count, double* x);

// Gumbel noise of tokens [first, first + count) at one position. `first` is a multiple of 4.
void noise_of(uint64_t seed, uint64_t position, int64_t first, int64_t count, float* out);

// Index of the first element above `floor`, or count.
int64_t find_above(const float* x, int64_t count, float floor);
int64_t find_above(const double* x, int64_t count, double floor);

template <typename T>
struct Ranked {
  T value;
  int64_t id;
};

// (value descending, id ascending)
template <typename T>
bool better(const Ranked<T>& a, const Ranked<T>& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The k best of the elements fed, which come in ascending id; -inf is never kept. Elements that
// cannot be among them are passed over by a threshold that rises as better ones are seen.
template <typename T>
class TopK {
 public:
  // Forgets what was fed. Memory is kept, so a thread's own allocates once.
  void start(int64_t k) {
    k_ = k;
    floor_ = -INFINITY;
    kept_.clear();
    kept_.reserve(static_cast<size_t>(capacity()));
  }

  int64_t k() const { return k_; }

  // The largest element so far, where there is one.
  T best() const {
    T best = -INFINITY;
    for (const Ranked<T>& one : kept_) best = std::max(best, one.value);
    return best;
  }

  // One element; NaN counts as -inf, +inf as the largest finite value.
  void offer(T x, int64_t id) {
    if (!(x > floor_)) return;
    kept_.push_back({std::min(x, std::numeric_limits<T>::max()), id});
    if (static_cast<int64_t>(kept_.size()) == capacity()) shrink();
  }

  void feed(const T* x, int64_t count, int64_t first_id) {
    for (int64_t i = 0; i < count; ++i) {
      i += find_above(x + i, count - i, floor_);
      if (i < count) offer(x[i], first_id + i);
    }
  }

  // Best first; until the next start.
  std::vector<Ranked<T>>& finish() {
    if (static_cast<int64_t>(kept_.size()) > k_) shrink();
    std::sort(kept_.begin(), kept_.end(), better<T>);
    return kept_;
  }

 private:
  void shrink() {
    std::nth_element(kept_.begin(), kept_.begin() + (k_ - 1), kept_.end(), better<T>);
    kept_.resize(k_);
    floor_ = kept_[k_ - 1].value;
  }

  int64_t capacity() const { return 2 * k_ + 32; }

  int64_t k_ = 0;
  T floor_ = -INFINITY;  // once k are kept, an equal value with a later id loses
  std::vector<Ranked<T>> kept_;
};

}  // namespace eagle2
