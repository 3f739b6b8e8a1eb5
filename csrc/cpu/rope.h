// rope_and_write_kv behind its arguments: checks, then rows in threads, for operators that hold it
// among other things.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "cache_rows.h"
#include "common.h"
#include "layer.h"

namespace eagle2 {

// Rows of a merged q/k/v product [batch, nodes, width].
struct QkvRows {
  const char* data;
  ScalarType type;
  int64_t item;  // bytes of an element
  int64_t batch, nodes, width;
  int64_t stride[2];  // of requests and rows, in bytes
};

// Heads of a row, which follow one another: of q, of k and of v each.
struct Heads {
  int64_t q, kv, dim;
};

// Rotation of a head: the first elements by rows of cos and sin, the others stay.
class Rotation {
 public:
  Rotation(const LayerKernel& kernel, const QkvRows& qkv, const Tensor& cos, const Tensor& sin,
           int64_t dim)
      : kernel_(kernel) {
    const Tensor* tables[2] = {&cos, &sin};
    const char* names[2] = {"cos", "sin"};
    const ScalarType type = cos.scalar_type();
    wide_ = type == ScalarType::Float && qkv.type != ScalarType::Float;
    if (!wide_ && type != qkv.type) {
      fail("cos: expected the dtype of qkv or float32, got ", torch::headeronly::toString(type));
    }
    for (int i = 0; i < 2; ++i) {
      const Tensor& table = *tables[i];
      if (!table.is_cpu()) fail(names[i], ": expected a CPU tensor");
      if (table.scalar_type() != type) fail("sin: expected the dtype of cos");
      if (table.dim() != 3 || table.size(0) != qkv.batch || table.size(1) != qkv.nodes) {
        fail(names[i], ": expected [", qkv.batch, ", ", qkv.nodes, ", D] for the rows of qkv");
      }
      const auto strides = table.strides();
      width_ = table.size(2);
      if (width_ != cos.size(2)) fail("sin: expected the size of cos");
      if (width_ > 1 && strides[2] != 1) {
        fail(names[i], ": expected a contiguous last dimension, got stride ", strides[2]);
      }
      data_[i] = static_cast<const char*>(table.const_data_ptr());
      for (int d = 0; d < 2; ++d) {
        stride_[i][d] = strides[d] * static_cast<int64_t>(table.element_size());
      }
    }
    if (width_ % 2 != 0 || width_ > dim) {
      fail("cos: expected an even last dimension up to the head dim, ", dim, ", got ", width_);
    }
    item_ = qkv.item;
    rest_ = (dim - width_) * item_;
  }

  void apply(const char* head, int64_t b, int64_t j, char* out) const {
    const char* cos = data_[0] + b * stride_[0][0] + j * stride_[0][1];
    const char* sin = data_[1] + b * stride_[1][0] + j * stride_[1][1];
    if (wide_) {
      kernel_.rotate_wide(head, reinterpret_cast<const float*>(cos),
                          reinterpret_cast<const float*>(sin), width_, out);
    } else {
      kernel_.rotate(head, cos, sin, width_, out);
    }
    if (rest_ > 0) std::memcpy(out + width_ * item_, head + width_ * item_, rest_);
  }

 private:
  const LayerKernel& kernel_;
  const char* data_[2];
  int64_t stride_[2][2], width_ = 0, item_ = 0, rest_ = 0;
  bool wide_;
};

inline const void* head_weight(const std::optional<Tensor>& weight, const char* name,
                               const QkvRows& qkv, int64_t dim) {
  if (!weight.has_value()) return nullptr;
  if (!weight->is_cpu()) fail(name, ": expected a CPU tensor");
  if (weight->scalar_type() != qkv.type) fail(name, ": expected the dtype of qkv");
  if (weight->dim() != 1 || weight->size(0) != dim || !weight->is_contiguous()) {
    fail(name, ": expected ", dim, " contiguous elements in one dimension");
  }
  return weight->const_data_ptr();
}

// q[b, j] = rope(q[b, j]), and rows of k and v to the cache. Row j of request b has its place at
// position prefix_lens[b] + first + j.
class RopeAndWrite {
 public:
  // `q` is what is written; all tensors outlive this.
  RopeAndWrite(const QkvRows& qkv, const Heads& heads, const Tensor& cos, const Tensor& sin,
               const Tensor& k_cache, const Tensor& v_cache, const Tensor& prefix_lens,
               int64_t first, const std::optional<Tensor>& lengths,
               const std::optional<Tensor>& page_table, const std::optional<Tensor>& q_weight,
               const std::optional<Tensor>& k_weight, double eps, const CacheRows& q)
      : kernel_(layer_kernel(qkv.type, "qkv")),
        qkv_(qkv),
        heads_(heads),
        rotation_(kernel_, qkv, cos, sin, heads.dim),
        weights_{head_weight(q_weight, "q_weight", qkv, heads.dim),
                 head_weight(k_weight, "k_weight", qkv, heads.dim)},
        eps_(static_cast<float>(eps)),
        q_(q),
        to_{rows_of(k_cache, "k_cache"), rows_of(v_cache, "v_cache")},
        first_(first),
        lens_(view<int32_t, 1>(prefix_lens, "prefix_lens")),
        counts_(view<int32_t, 1>(lengths, "lengths")),
        table_(view_table(page_table, qkv.batch)),
        keys_(to_[0], "k_cache", qkv.batch, table_, page_table.has_value()),
        values_(to_[1], "v_cache", qkv.batch, table_, page_table.has_value()) {
    const Tensor* written[2] = {&k_cache, &v_cache};
    const char* names[2] = {"k_cache", "v_cache"};
    for (int i = 0; i < 2; ++i) {
      if (!written[i]->is_cpu()) fail(names[i], ": expected a CPU tensor");
      if (written[i]->scalar_type() != qkv.type) {
        fail(names[i], ": expected the dtype of qkv, ", torch::headeronly::toString(qkv.type),
             ", got ", torch::headeronly::toString(written[i]->scalar_type()));
      }
      check_written(*written[i], names[i]);
    }
    if (to_[1].size[2] != heads.kv || to_[1].dim != heads.dim) {
      fail("v_cache: expected the heads and head dim of k_cache");
    }
    check_shape(lens_, "prefix_lens", {qkv.batch});
    if (lengths.has_value()) check_shape(counts_, "lengths", {qkv.batch});
  }
  RopeAndWrite(const RopeAndWrite&) = delete;
  RopeAndWrite& operator=(const RopeAndWrite&) = delete;

  void run() const {
    const int64_t grain = grain_of_bytes(2 * qkv_.width);
    parallel_for(qkv_.batch * qkv_.nodes, grain, [this](int64_t begin, int64_t end) {
      thread_local std::vector<char> normed;
      normed.resize(static_cast<size_t>(heads_.dim * qkv_.item));
      for (int64_t task = begin; task < end; ++task) row(task, normed.data());
    });
  }

 private:
  void row(int64_t task, char* normed) const {
    const int64_t b = task / qkv_.nodes, j = task % qkv_.nodes, bytes = heads_.dim * qkv_.item;
    const auto store = [&](const char* head, const void* weight, char* out) {
      if (weight != nullptr) {
        kernel_.rms_norm(head, weight, heads_.dim, eps_, normed);
        head = normed;
      }
      rotation_.apply(head, b, j, out);
    };
    const char* head = qkv_.data + b * qkv_.stride[0] + j * qkv_.stride[1];
    for (int64_t h = 0; h < heads_.q; ++h, head += bytes) {
      store(head, weights_[0], q_.data + b * q_.stride[0] + j * q_.stride[1] + h * q_.stride[2]);
    }
    if (counts_.data != nullptr && j >= counts_(b)) return;
    const int64_t position = static_cast<int64_t>(lens_(b)) + first_ + j;
    char* const key = keys_.at(b, position);
    char* const value = values_.at(b, position);
    for (int64_t h = 0; h < heads_.kv; ++h, head += bytes) {
      if (key != nullptr) store(head, weights_[1], key + h * to_[0].stride[2]);
    }
    for (int64_t h = 0; h < heads_.kv; ++h, head += bytes) {
      if (value != nullptr) std::memcpy(value + h * to_[1].stride[2], head, bytes);
    }
  }

  const LayerKernel& kernel_;
  const QkvRows qkv_;
  const Heads heads_;
  const Rotation rotation_;
  const void* const weights_[2];
  const float eps_;
  const CacheRows q_, to_[2];
  const int64_t first_;
  const View<const int32_t, 1> lens_, counts_;
  const View<const int32_t, 2> table_;
  const Places keys_, values_;
};

}  // namespace eagle2
