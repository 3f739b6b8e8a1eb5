// rms_norm, fused_add_rms_norm and silu_and_mul on the CPU: rows of layer.h, shared out to threads.
#include "layer.h"

#include <algorithm>
#include <vector>

#include "args.h"

namespace eagle2 {
namespace {

// The last dimension of a tensor as rows: any strides before it, none in it.
class TensorRows {
 public:
  TensorRows(const Tensor& tensor, const char* name)
      : data_(static_cast<char*>(tensor.data_ptr())) {
    if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor");
    rank_ = tensor.dim() - 1;
    if (rank_ < 0 || rank_ > kMostDims) {
      fail(name, ": expected 1 to ", kMostDims + 1, " dimensions, got ", rank_ + 1);
    }
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    if (sizes[rank_] > 1 && strides[rank_] != 1) {
      fail(name, ": expected a contiguous last dimension, got stride ", strides[rank_]);
    }
    width = sizes[rank_];
    item = static_cast<int64_t>(tensor.element_size());
    for (int64_t i = 0; i < rank_; ++i) {
      size_[i] = sizes[i];
      stride_[i] = strides[i] * item;
      count *= sizes[i];
    }
    // Dimensions that follow each other are one.
    step_ = rank_ > 0 ? stride_[rank_ - 1] : 0;
    int64_t span = step_;
    for (int64_t i = rank_; i-- > 0; span *= size_[i]) even_ = even_ && stride_[i] == span;
  }

  char* row(int64_t i) const {
    if (even_) return data_ + i * step_;
    int64_t offset = 0;
    for (int64_t d = rank_; d-- > 0; i /= size_[d]) offset += i % size_[d] * stride_[d];
    return data_ + offset;
  }

  int64_t width = 0, count = 1, item = 0;

 private:
  static constexpr int64_t kMostDims = 7;
  char* data_;
  int64_t rank_ = 0, step_ = 0, size_[kMostDims] = {}, stride_[kMostDims] = {};
  bool even_ = true;
};

void check_like(const Tensor& tensor, const char* name, const Tensor& like, const char* other) {
  if (tensor.scalar_type() != like.scalar_type()) {
    fail(name, ": expected the dtype of ", other, ", ",
         torch::headeronly::toString(like.scalar_type()), ", got ",
         torch::headeronly::toString(tensor.scalar_type()));
  }
}

// The first dimensions of `tensor` are those of `like`, the last is `width`.
void check_sizes(const Tensor& tensor, const char* name, const Tensor& like, int64_t width) {
  const auto sizes = tensor.sizes();
  const auto wanted = like.sizes();
  bool same = tensor.dim() == like.dim();
  for (int64_t i = 0; same && i < like.dim(); ++i) {
    same = sizes[i] == (i + 1 < like.dim() ? wanted[i] : width);
  }
  if (!same) fail(name, ": expected the sizes of the rows, ", width, " the last");
}

const void* weight_of(const Tensor& weight, int64_t width, const Tensor& like) {
  check_like(weight, "weight", like, "x");
  if (!weight.is_cpu()) fail("weight: expected a CPU tensor");
  if (weight.dim() != 1 || weight.size(0) != width || !weight.is_contiguous()) {
    fail("weight: expected ", width, " contiguous elements in one dimension");
  }
  return weight.const_data_ptr();
}

Tensor allocate_rows(const Tensor& like, int64_t width) {
  const auto sizes = like.sizes();
  if (like.dim() < 1) fail("x: expected at least 1 dimension, got 0");
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = width;
  int32_t dtype = 0;
  aoti_torch_get_dtype(like.get(), &dtype);
  return allocate(shape, dtype);
}

constexpr int64_t kNormsPerThread = 1 << 15, kSilusPerThread = 1 << 13;

int64_t grain_of(int64_t elements, int64_t width) {
  return std::max<int64_t>(1, elements / std::max<int64_t>(width, 1));
}

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, const Tensor& out) {
  const LayerKernel& kernel = layer_kernel(x.scalar_type(), "x");
  const TensorRows from(x, "x"), to(out, "out");
  check_like(out, "out", x, "x");
  check_sizes(out, "out", x, from.width);
  check_written(out, "out");
  const void* scale = weight_of(weight, from.width, x);
  parallel_for(from.count, grain_of(kNormsPerThread, from.width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernel.rms_norm(from.row(i), scale, from.width, static_cast<float>(eps), to.row(i));
    }
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  if (x.dim() < 1) fail("x: expected at least 1 dimension, got 0");
  Tensor out = allocate_rows(x, x.size(x.dim() - 1));
  rms_norm_out(x, weight, eps, out);
  return out;
}

void fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  const LayerKernel& kernel = layer_kernel(x.scalar_type(), "x");
  const TensorRows rows(x, "x"), sums(residual, "residual");
  check_like(residual, "residual", x, "x");
  check_sizes(residual, "residual", x, rows.width);
  check_written(x, "x");
  check_written(residual, "residual");
  const void* scale = weight_of(weight, rows.width, x);
  parallel_for(rows.count, grain_of(kNormsPerThread, rows.width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernel.add_rms_norm(rows.row(i), sums.row(i), scale, rows.width, static_cast<float>(eps));
    }
  });
}

int64_t half_width(const Tensor& x) {
  if (x.dim() < 1) fail("x: expected at least 1 dimension, got 0");
  const int64_t width = x.size(x.dim() - 1);
  if (width % 2 != 0) fail("x: expected an even last dimension, got ", width);
  return width / 2;
}

void silu_and_mul_out(const Tensor& x, const Tensor& out) {
  const LayerKernel& kernel = layer_kernel(x.scalar_type(), "x");
  const int64_t width = half_width(x);
  const TensorRows from(x, "x"), to(out, "out");
  check_like(out, "out", x, "x");
  check_sizes(out, "out", x, width);
  check_written(out, "out");
  parallel_for(from.count, grain_of(kSilusPerThread, width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* gate = from.row(i);
      kernel.silu_and_mul(gate, gate + width * from.item, width, to.row(i));
    }
  });
}

Tensor silu_and_mul(const Tensor& x) {
  Tensor out = allocate_rows(x, half_width(x));
  silu_and_mul_out(x, out);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_out", TORCH_BOX(&rms_norm_out));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("silu_and_mul_out", TORCH_BOX(&silu_and_mul_out));
}

}  // namespace
}  // namespace eagle2
