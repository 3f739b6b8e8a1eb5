// What every CUDA op needs around its kernel: a thread block as a team of tree.h, checked
// arguments, outputs and scratch from torch's caching allocator (safe across streams and in a
// graph's capture), the current stream. Nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <vector>

#include "../cpu/common.h"
#include "../tree.h"

namespace eagle2 {

struct BlockTeam {
  EAGLE2_HD int rank() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x);
#else
    return 0;
#endif
  }
  EAGLE2_HD int size() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockDim.x);
#else
    return 1;
#endif
  }
  EAGLE2_HD void sync() const {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
  EAGLE2_HD bool any(bool flag) const {
#if defined(__CUDA_ARCH__)
    return __syncthreads_or(flag) != 0;
#else
    return flag;
#endif
  }
  EAGLE2_HD int32_t add(int32_t* counter, int32_t value) const {
#if defined(__CUDA_ARCH__)
    return atomicAdd(counter, value);
#else
    return *counter + value;
#endif
  }
};

// The block's dynamic shared memory.
__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(16) char bytes[];
  return bytes;
}

// Static shared memory has room beside it below the 48 KiB that every launch may use.
constexpr int64_t kSharedBytes = 40 << 10;

inline unsigned threads_for(int64_t work, int64_t most = 256) {
  return static_cast<unsigned>(std::min(most, (std::max<int64_t>(work, 1) + 31) / 32 * 32));
}

// Tensors of one call: all on one device, of the shape and dtype named.
class CudaArgs {
 public:
  explicit CudaArgs(const Tensor& first) : device_(first.get_device_index()) {}

  template <typename T, int Rank>
  const T* input(const Tensor& tensor, const char* name,
                 const std::array<int64_t, Rank>& shape) const {
    check(tensor, name);
    const auto v = view<T, Rank>(tensor, name);
    check_sizes(v.size, name, shape);
    return v.data;
  }

  template <typename T, int Rank>
  T* output(const Tensor& tensor, const char* name, const std::array<int64_t, Rank>& shape) const {
    check(tensor, name);
    const auto v = mutable_view<T, Rank>(tensor, name);
    check_sizes(v.size, name, shape);
    return v.data;
  }

  // An argument of any strides.
  template <typename T, int Rank>
  View<const T, Rank> strided(const Tensor& tensor, const char* name,
                              std::initializer_list<int64_t> shape) const {
    check_device(tensor, name);
    const auto v = view<T, Rank>(tensor, name);
    check_shape(v, name, shape);
    return v;
  }

  template <typename T>
  Tensor allocate(std::initializer_list<int64_t> shape) const {
    return torch::stable::empty(
        shape, torch::headeronly::CppTypeToScalarType<T>::value, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, device_));
  }

  Tensor allocate(const std::vector<int64_t>& shape, ScalarType dtype) const {
    return torch::stable::empty(
        shape, dtype, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, device_));
  }

  cudaStream_t stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

  int32_t device() const { return device_; }

  void check_device(const Tensor& tensor, const char* name) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != device_) {
      fail(name, ": expected a tensor on cuda:", device_, ", like the first argument");
    }
  }

 private:
  void check(const Tensor& tensor, const char* name) const {
    check_device(tensor, name);
    if (!tensor.is_contiguous()) fail(name, ": expected a contiguous tensor");
  }

  template <size_t Rank>
  static void check_sizes(const int64_t* got, const char* name,
                          const std::array<int64_t, Rank>& want) {
    for (size_t i = 0; i < Rank; ++i) {
      if (got[i] != want[i]) {
        fail(name, ": expected size ", want[i], " in dimension ", i, ", got ", got[i]);
      }
    }
  }

  int32_t device_;
};

inline void check_rank(const Tensor& tensor, const char* name, int64_t rank) {
  if (tensor.dim() != rank) fail(name, ": expected ", rank, " dimensions, got ", tensor.dim());
}

// Scratch of a block: dynamic shared memory where it fits, else its part of a tensor.
struct BlockScratch {
  char* data;  // null: shared
  int64_t bytes;

  __device__ char* of_block() const {
    return data == nullptr ? dynamic_shared() : data + blockIdx.x * bytes;
  }
};

// Owns what a BlockScratch points to until the launch is queued.
class ScratchOwner {
 public:
  ScratchOwner(const CudaArgs& cuda, int64_t blocks, int64_t bytes, bool shared = true)
      : bytes_((bytes + 15) / 16 * 16), shared_(shared && bytes_ <= kSharedBytes) {
    if (!shared_) tensor_ = cuda.allocate<uint8_t>({blocks, bytes_});
  }

  BlockScratch scratch() const {
    return {shared_ ? nullptr : static_cast<char*>(tensor_->mutable_data_ptr()), bytes_};
  }
  size_t shared_bytes() const { return shared_ ? static_cast<size_t>(bytes_) : 0; }

 private:
  int64_t bytes_;
  bool shared_;
  std::optional<Tensor> tensor_;
};

}  // namespace eagle2
