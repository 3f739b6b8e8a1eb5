// pack_linear_weight and packed_linear: linear layers from a weight laid out in the order in which
// a few rows read it.
#include "linear.h"

#include <algorithm>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "args.h"
#include "linear_call.h"

namespace eagle2 {
namespace {

constexpr int64_t kStaged = 512 << 10;   // bytes of x that stay in the second-level cache
constexpr int64_t kLeastTask = 1 << 17;  // bytes of weights, or as long a time, worth a thread

struct Shape {
  int64_t size[LinearRows::kDims];
  int64_t rank;
};

int32_t bfloat16_dtype() {
  static const int32_t dtype = aoti_torch_dtype_bfloat16();
  return dtype;
}

void check_bfloat16(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor");
  if (tensor.scalar_type() != ScalarType::BFloat16) {
    fail(name, ": expected dtype BFloat16, got ",
         torch::headeronly::toString(tensor.scalar_type()));
  }
}

const uint16_t* words_of(const Tensor& tensor) {
  return static_cast<const uint16_t*>(tensor.const_data_ptr());
}

// What is written: contiguous, of this shape.
uint16_t* output(const Tensor& tensor, const char* name, const Shape& shape) {
  check_bfloat16(tensor, name);
  if (tensor.dim() != shape.rank) {
    fail(name, ": expected ", shape.rank, " dimensions, got ", tensor.dim());
  }
  for (int64_t i = 0; i < shape.rank; ++i) {
    if (tensor.size(i) != shape.size[i]) {
      fail(name, ": expected size ", shape.size[i], " in dimension ", i, ", got ", tensor.size(i));
    }
  }
  if (!tensor.is_contiguous()) fail(name, ": expected a contiguous tensor");
  return static_cast<uint16_t*>(tensor.mutable_data_ptr());
}

Shape packed_shape(const Tensor& weight) {
  check_bfloat16(weight, "weight");
  if (weight.dim() != 2) fail("weight: expected 2 dimensions, got ", weight.dim());
  return {{(weight.size(0) + kPanel - 1) / kPanel, (weight.size(1) + 1) / 2, kPanel, 2}, 4};
}

// Weights are read once a step, all of them: every page costs a walk through the page tables, and
// a huge page one for 512. So the storage of the packed weight, which may be that of many, is asked
// for in huge pages, before it is first written.
void advise_huge_pages(const Tensor& tensor) {
#ifdef __linux__
  constexpr uintptr_t kHuge = 2 << 20;
  int64_t bytes = 0;
  if (aoti_torch_get_storage_size(tensor.get(), &bytes) != AOTI_TORCH_SUCCESS) return;
  const uintptr_t data = reinterpret_cast<uintptr_t>(words_of(tensor)) -
                         static_cast<uintptr_t>(tensor.storage_offset()) * sizeof(uint16_t);
  const uintptr_t begin = (data + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (data + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  // Only a hint: where it is refused, pages are small.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

void pack_linear_weight_out(const Tensor& weight, const Tensor& packed) {
  const Shape shape = packed_shape(weight);
  uint16_t* to = output(packed, "packed", shape);
  advise_huge_pages(packed);
  const int64_t out_features = weight.size(0), in_features = weight.size(1);
  const int64_t pairs = shape.size[1];
  const int64_t row = weight.stride(0), step = weight.stride(1);
  const uint16_t* from = words_of(weight);
  const int64_t grain = std::max<int64_t>(1, kLeastTask / std::max<int64_t>(1, pairs * kPanel * 4));
  parallel_for(shape.size[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t columns = std::min(kPanel, out_features - panel * kPanel);
      uint16_t* at = to + panel * pairs * kPanel * 2;
      for (int64_t k = 0; k < 2 * pairs; k += 2, at += kPanel * 2) {
        for (int64_t c = 0; c < kPanel; ++c) {
          const uint16_t* w = from + (panel * kPanel + c) * row + k * step;
          at[2 * c] = c < columns ? w[0] : 0;
          at[2 * c + 1] = c < columns && k + 1 < in_features ? w[step] : 0;
        }
      }
    }
  });
}

Tensor pack_linear_weight(const Tensor& weight) {
  const Shape shape = packed_shape(weight);
  Tensor packed = allocate(shape.size, shape.rank, bfloat16_dtype());
  pack_linear_weight_out(weight, packed);
  return packed;
}

}  // namespace

LinearRows linear_rows(const Tensor& x, const char* name) {
  check_bfloat16(x, name);
  const int64_t last = x.dim() - 1;
  if (x.size(last) > 1 && x.stride(last) != 1) {
    fail(name, ": expected a contiguous last dimension, got stride ", x.stride(last));
  }
  LinearRows rows;
  rows.data = words_of(x);
  for (int64_t i = 0; i < last; ++i) {
    const int64_t size = x.size(i), stride = x.stride(i);
    if (size == 1) continue;
    if (rows.dims > 0 && rows.stride[rows.dims - 1] == size * stride) {
      rows.size[rows.dims - 1] *= size;
      rows.stride[rows.dims - 1] = stride;
    } else {
      rows.size[rows.dims] = size;
      rows.stride[rows.dims++] = stride;
    }
  }
  return rows;
}

PackedLinear packed_layer(const Tensor& packed, const char* name, const std::optional<Tensor>& bias,
                          const char* bias_name, int64_t in_features, int64_t out_features) {
  check_bfloat16(packed, name);
  if (packed.dim() != 4) fail(name, ": expected 4 dimensions, got ", packed.dim());
  const int64_t want[4] = {(out_features + kPanel - 1) / kPanel, (in_features + 1) / 2, kPanel, 2};
  for (int64_t i = 0; i < 4; ++i) {
    if (packed.size(i) != want[i]) {
      fail(name, ": expected size ", want[i], " in dimension ", i, " for ", in_features,
           " inputs and ", out_features, " outputs, got ", packed.size(i));
    }
  }
  if (!packed.is_contiguous()) fail(name, ": expected a contiguous tensor");
  if (bias.has_value()) {
    check_bfloat16(*bias, bias_name);
    if (bias->dim() != 1 || bias->size(0) != out_features) {
      fail(bias_name, ": expected ", out_features, " elements in one dimension");
    }
    if (!bias->is_contiguous()) fail(bias_name, ": expected a contiguous tensor");
  }
  return {words_of(packed), bias.has_value() ? words_of(*bias) : nullptr, in_features,
          out_features};
}

void run_linear(const LinearRows& x, int64_t rows, const PackedLinear& layer, uint16_t* out) {
  if (rows == 0 || layer.out_features == 0) return;
  Linear linear;
  linear.x = x;
  linear.packed = layer.packed;
  linear.bias = layer.bias;
  linear.out = out;
  linear.rows = rows;
  linear.in_features = layer.in_features;
  linear.out_features = layer.out_features;
  const LinearKernel& kernel = linear_kernel();
  const int64_t threads = torch::stable::get_num_threads();
  // Where panels are few for so many threads, each takes halves of them, and groups of rows.
  const int64_t panels = (layer.out_features + kPanel - 1) / kPanel, pairs = linear.pairs();
  linear.unit = threads > 1 && panels < 4 * threads ? kPanel / 2 : kPanel;
  const int64_t most = (linear.rows + kernel.block - 1) / kernel.block;
  const int64_t staged = linear.rows * pairs * kernel.row_bytes;
  const int64_t wanted = threads > 1 ? 4 * threads / linear.units() : 1;
  linear.groups =
      std::max<int64_t>(1, std::min(most, std::max((staged + kStaged - 1) / kStaged, wanted)));
  const int64_t task = pairs * linear.unit * 4 * (1 + linear.rows / linear.groups / 8);
  const int64_t grain = std::max<int64_t>(1, kLeastTask / std::max<int64_t>(1, task));
  parallel_for(linear.units() * linear.groups, grain,
               [&](int64_t begin, int64_t end) { kernel.run(linear, begin, end); });
}

namespace {

// All checks of x but its rows; the shape of the output.
Shape output_shape(const Tensor& x, int64_t out_features) {
  check_bfloat16(x, "x");
  if (x.dim() < 1 || x.dim() > LinearRows::kDims) {
    fail("x: expected 1 to ", LinearRows::kDims, " dimensions, got ", x.dim());
  }
  if (out_features < 0) fail("out_features: expected at least 0, got ", out_features);
  Shape shape;
  shape.rank = x.dim();
  for (int64_t i = 0; i + 1 < shape.rank; ++i) shape.size[i] = x.size(i);
  shape.size[shape.rank - 1] = out_features;
  return shape;
}

int64_t rows_in(const Shape& shape) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < shape.rank; ++i) rows *= shape.size[i];
  return rows;
}

void packed_linear_out(const Tensor& x, const Tensor& packed, int64_t out_features,
                       const std::optional<Tensor>& bias, const Tensor& out) {
  const Shape shape = output_shape(x, out_features);
  const LinearRows rows = linear_rows(x, "x");
  const PackedLinear layer =
      packed_layer(packed, "packed", bias, "bias", x.size(x.dim() - 1), out_features);
  run_linear(rows, rows_in(shape), layer, output(out, "out", shape));
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t out_features,
                     const std::optional<Tensor>& bias) {
  const Shape shape = output_shape(x, out_features);
  const LinearRows rows = linear_rows(x, "x");
  const PackedLinear layer =
      packed_layer(packed, "packed", bias, "bias", x.size(x.dim() - 1), out_features);
  Tensor out = allocate(shape.size, shape.rank, bfloat16_dtype());
  run_linear(rows, rows_in(shape), layer, static_cast<uint16_t*>(out.mutable_data_ptr()));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("pack_linear_weight", TORCH_BOX(&pack_linear_weight));
  m.impl("pack_linear_weight_out", TORCH_BOX(&pack_linear_weight_out));
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_linear_out", TORCH_BOX(&packed_linear_out));
}

}  // namespace
}  // namespace eagle2
