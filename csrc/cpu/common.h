// What every CPU op needs around its kernel: strided views of stable-ABI tensors, errors that name
// the argument, and threads. Nothing here calls an ATen compute op.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace eagle2 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error with the parts written one after another; PyTorch turns it into a
// RuntimeError.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// A tensor as a raw pointer with sizes and strides (in elements). All index arithmetic is 64 bit.
template <typename T, int Rank>
struct View {
  T* data = nullptr;
  int64_t size[Rank] = {};
  int64_t stride[Rank] = {};

  template <typename... Index>
  int64_t offset(Index... index) const {
    static_assert(sizeof...(Index) <= Rank, "more indices than dimensions");
    int64_t sum = 0;
    int dim = 0;
    ((sum += static_cast<int64_t>(index) * stride[dim++]), ...);
    return sum;
  }
  // The element at a full index, or the first element of the slice at a partial one.
  template <typename... Index>
  T& operator()(Index... index) const {
    return data[offset(index...)];
  }
};

namespace detail {

template <typename T, int Rank>
View<T, Rank> make_view(const Tensor& tensor, T* data) {
  View<T, Rank> view;
  view.data = data;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int i = 0; i < Rank; ++i) {
    view.size[i] = sizes[i];
    view.stride[i] = strides[i];
  }
  return view;
}

template <typename T, int Rank>
void check_type(const Tensor& tensor, const char* name) {
  if (tensor.dim() != Rank) {
    fail(name, ": expected ", Rank, " dimensions, got ", tensor.dim());
  }
  const ScalarType want = torch::headeronly::CppTypeToScalarType<T>::value;
  if (tensor.scalar_type() != want) {
    fail(name, ": expected dtype ", torch::headeronly::toString(want), ", got ",
         torch::headeronly::toString(tensor.scalar_type()));
  }
}

}  // namespace detail

// A tensor that is written must not show one element at several places, as an expanded one does.
inline void check_written(const Tensor& tensor, const char* name) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (sizes[i] > 1 && strides[i] == 0) {
      fail(name, ": expected a tensor to write to, got one expanded in dimension ", i);
    }
  }
}

// View of the argument `name`, after checking its dtype and number of dimensions.
template <typename T, int Rank>
View<const T, Rank> view(const Tensor& tensor, const char* name) {
  detail::check_type<T, Rank>(tensor, name);
  return detail::make_view<const T, Rank>(tensor, static_cast<const T*>(tensor.const_data_ptr()));
}

template <typename T, int Rank>
View<T, Rank> mutable_view(const Tensor& tensor, const char* name) {
  detail::check_type<T, Rank>(tensor, name);
  check_written(tensor, name);
  return detail::make_view<T, Rank>(tensor, static_cast<T*>(tensor.mutable_data_ptr()));
}

// View of an optional argument; without one, `data` is null.
template <typename T, int Rank>
View<const T, Rank> view(const std::optional<Tensor>& tensor, const char* name) {
  return tensor.has_value() ? view<T, Rank>(*tensor, name) : View<const T, Rank>{};
}

// The sizes of a view must be `want`; -1 accepts any size.
template <typename T, int Rank>
void check_shape(const View<T, Rank>& view, const char* name, std::initializer_list<int64_t> want) {
  int dim = 0;
  for (const int64_t size : want) {
    if (size >= 0 && view.size[dim] != size) {
      fail(name, ": expected size ", size, " in dimension ", dim, ", got ", view.size[dim]);
    }
    ++dim;
  }
}

// Runs `body(begin, end)` over [0, count) on PyTorch's own threads. The body must not throw: check
// arguments first.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= grain) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace eagle2
