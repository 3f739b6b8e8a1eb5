// Arguments of the tree ops: small integer and float tensors as packed rows, outputs as plain
// pointers, allocation.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <vector>

#include "common.h"

namespace eagle2 {

// An argument of `Rank` dimensions with its last dimension contiguous. Where it is not (or where
// rows of a higher rank do not follow each other), the elements are copied once.
template <typename T, int Rank>
class Packed {
 public:
  Packed(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape)
      : owner_(tensor) {
    if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor, like the other arguments");
    view_ = view<T, Rank>(tensor, name);
    check_shape(view_, name, shape);
    row_ = 1;
    for (int i = 1; i < Rank; ++i) row_ *= view_.size[i];
    data_ = view_.data;
    if (!tensor.is_contiguous()) pack();
  }

  int64_t size(int dim) const { return view_.size[dim]; }
  const T* row(int64_t b) const { return data_ + b * row_; }
  const T& operator[](int64_t b) const { return data_[b * row_]; }

 private:
  void pack() {
    int64_t count = row_ * view_.size[0];
    copy_.reserve(static_cast<size_t>(count));
    std::array<int64_t, Rank> at{};
    for (; count > 0; --count) {
      int64_t offset = 0;
      for (int i = 0; i < Rank; ++i) offset += at[i] * view_.stride[i];
      copy_.push_back(view_.data[offset]);
      for (int i = Rank - 1; i >= 0 && ++at[i] == view_.size[i]; --i) at[i] = 0;
    }
    data_ = copy_.data();
  }

  Tensor owner_;
  View<const T, Rank> view_;
  std::vector<T> copy_;
  const T* data_ = nullptr;
  int64_t row_ = 1;
};

template <typename T, int Rank>
std::optional<Packed<T, Rank>> packed(const std::optional<Tensor>& tensor, const char* name,
                                      std::initializer_list<int64_t> shape) {
  if (!tensor.has_value()) return std::nullopt;
  return std::optional<Packed<T, Rank>>(std::in_place, *tensor, name, shape);
}

// Memory of a tensor that is written: it must be contiguous and of exactly this shape.
template <typename T, int Rank>
T* output(const Tensor& tensor, const char* name, const std::array<int64_t, Rank>& shape) {
  if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor, like the other arguments");
  const View<T, Rank> written = mutable_view<T, Rank>(tensor, name);
  for (int i = 0; i < Rank; ++i) {
    if (written.size[i] != shape[i]) {
      fail(name, ": expected size ", shape[i], " in dimension ", i, ", got ", written.size[i]);
    }
  }
  if (!tensor.is_contiguous()) fail(name, ": expected a contiguous tensor");
  return written.data;
}

// A contiguous CPU tensor with undefined elements.
inline Tensor allocate(const int64_t* shape, int64_t rank, int32_t dtype) {
  int64_t strides[16];
  if (rank > 16) fail("expected at most 16 dimensions, got ", rank);
  int64_t step = 1;
  for (int64_t i = rank; i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, shape, strides, dtype, aoti_torch_device_type_cpu(), 0,
                               &handle) != AOTI_TORCH_SUCCESS) {
    std::ostringstream sizes;
    for (int64_t i = 0; i < rank; ++i) sizes << (i > 0 ? ", " : "") << shape[i];
    fail("expected memory for an output of shape [", sizes.str(), "], got none");
  }
  return Tensor(handle);
}

inline Tensor allocate(const std::vector<int64_t>& shape, int32_t dtype) {
  return allocate(shape.data(), static_cast<int64_t>(shape.size()), dtype);
}

template <typename T>
Tensor allocate(std::initializer_list<int64_t> shape) {
  static const int32_t dtype = [] {
    if constexpr (std::is_same_v<T, int64_t>) return aoti_torch_dtype_int64();
    if constexpr (std::is_same_v<T, int32_t>) return aoti_torch_dtype_int32();
    if constexpr (std::is_same_v<T, float>) return aoti_torch_dtype_float32();
  }();
  return allocate(shape.begin(), static_cast<int64_t>(shape.size()), dtype);
}

}  // namespace eagle2
