// write_kv and compact_kv on the CPU: rows of a dense or paged cache are moved as bytes, whatever
// their dtype; only what goes into a float8 cache from a wider dtype is converted. And
// rope_and_write_kv, which rotates rows on their way there.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../address.h"
#include "../tree.h"
#include "args.h"
#include "layer.h"

namespace eagle2 {
namespace {

// A [., ., heads, dim] tensor as bytes: strides in bytes, `row` bytes per (slot, head).
struct Rows {
  char* data;
  int64_t size[3], stride[3];
  int64_t row, dim;
};

Rows rows_of(const Tensor& tensor, const char* name) {
  if (tensor.dim() != 4) fail(name, ": expected 4 dimensions, got ", tensor.dim());
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (sizes[3] > 1 && strides[3] != 1) {
    fail(name, ": expected a contiguous last dimension, got stride ", strides[3]);
  }
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  Rows rows;
  rows.data = static_cast<char*>(tensor.data_ptr());
  for (int i = 0; i < 3; ++i) {
    rows.size[i] = sizes[i];
    rows.stride[i] = strides[i] * bytes;
  }
  rows.row = sizes[3] * bytes;
  rows.dim = sizes[3];
  return rows;
}

// Where a request's cache positions lie.
class Places {
 public:
  Places(const Rows& cache, const char* name, int64_t batch, const View<const int32_t, 2>& table,
         bool paged)
      : cache_(cache), table_(table), paged_(paged) {
    if (!paged && cache.size[0] != batch) {
      fail(name, ": expected one row per request (", batch, "), got ", cache.size[0]);
    }
    if (paged && cache.size[1] < 1) {
      fail(name, ": expected a page size of at least 1, got ", cache.size[1]);
    }
  }

  // The bytes of head 0 at a position, or null when it has no place in the cache.
  char* at(int64_t request, int64_t position) const {
    CacheSlot place{-1, 0};
    if (!paged_) {
      place = cache_slot(position, request, nullptr, 0, 0, cache_.size[1], cache_.size[0]);
    } else if (table_.size[1] > 0) {
      place = cache_slot(position, request, &table_(request), table_.stride[1], table_.size[1],
                         cache_.size[1], cache_.size[0]);
    }
    if (place.block < 0) return nullptr;
    return cache_.data +
           cache_offset(place.block, cache_.stride[0], place.slot, cache_.stride[1], 0, 0);
  }

 private:
  const Rows& cache_;
  const View<const int32_t, 2>& table_;
  const bool paged_;
};

View<const int32_t, 2> view_table(const std::optional<Tensor>& page_table, int64_t batch) {
  const auto table = view<int32_t, 2>(page_table, "page_table");
  if (page_table.has_value()) check_shape(table, "page_table", {batch, -1});
  return table;
}

constexpr int64_t kBytesPerThread = 1 << 16;

int64_t grain_of(int64_t bytes) { return std::max<int64_t>(1, kBytesPerThread / (bytes + 1)); }

// Stores one row of a head.
using Store = void (*)(const char* from, char* to, int64_t dim, float scale);

// from / scale rounded to float8. What lies past its largest number becomes that number, since a
// NaN in the cache would spoil every later row.
template <typename T>
void store_float8(const char* from, char* to, int64_t dim, float scale) {
  constexpr float kMost = 448.0f;
  const T* source = reinterpret_cast<const T*>(from);
  c10::Float8_e4m3fn* target = reinterpret_cast<c10::Float8_e4m3fn*>(to);
  for (int64_t d = 0; d < dim; ++d) {
    float x = static_cast<float>(source[d]) / scale;
    if (x > kMost) x = kMost;
    if (x < -kMost) x = -kMost;
    target[d] = c10::Float8_e4m3fn(x);
  }
}

// How rows of `from` go into the cache `to`: null where they are copied.
Store choose_store(const Tensor& from, const Tensor& to, const char* name, const char* cache_name) {
  if (from.scalar_type() == to.scalar_type()) return nullptr;
  if (to.scalar_type() == ScalarType::Float8_e4m3fn) {
    switch (from.scalar_type()) {
      case ScalarType::Float:
        return &store_float8<float>;
      case ScalarType::Half:
        return &store_float8<c10::Half>;
      case ScalarType::BFloat16:
        return &store_float8<c10::BFloat16>;
      default:
        break;
    }
  }
  fail(name, ": expected the dtype of ", cache_name, ", ",
       torch::headeronly::toString(to.scalar_type()), ", got ",
       torch::headeronly::toString(from.scalar_type()));
}

float scale_of(const std::optional<Tensor>& scale, const char* name, bool converted) {
  if (!scale.has_value()) return 1.0f;
  if (!converted) fail(name, ": expected none, the rows are copied as they are");
  if (scale->scalar_type() != ScalarType::Float || scale->numel() != 1) {
    fail(name, ": expected one float32 element");
  }
  return *static_cast<const float*>(scale->const_data_ptr());
}

void write_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
              const Tensor& prefix_lens, const std::optional<Tensor>& lengths,
              const std::optional<Tensor>& page_table, const std::optional<Tensor>& k_scale,
              const std::optional<Tensor>& v_scale) {
  const Rows from[2] = {rows_of(k, "k"), rows_of(v, "v")};
  const Rows to[2] = {rows_of(k_cache, "k_cache"), rows_of(v_cache, "v_cache")};
  const int64_t batch = from[0].size[0], nodes = from[0].size[1], heads = from[0].size[2];
  check_written(k_cache, "k_cache");
  check_written(v_cache, "v_cache");
  const char* names[2][2] = {{"k", "k_cache"}, {"v", "v_cache"}};
  const Store store[2] = {choose_store(k, k_cache, "k", "k_cache"),
                          choose_store(v, v_cache, "v", "v_cache")};
  const float scale[2] = {scale_of(k_scale, "k_scale", store[0] != nullptr),
                          scale_of(v_scale, "v_scale", store[1] != nullptr)};
  for (int i = 0; i < 2; ++i) {
    if (from[i].size[0] != batch || from[i].size[1] != nodes || from[i].size[2] != heads) {
      fail(names[i][0], ": expected [", batch, ", ", nodes, ", ", heads, ", D] like k");
    }
    if (to[i].size[2] != heads || to[i].dim != from[i].dim) {
      fail(names[i][1], ": expected the heads and head dim of ", names[i][0]);
    }
  }
  const auto lens = view<int32_t, 1>(prefix_lens, "prefix_lens");
  check_shape(lens, "prefix_lens", {batch});
  const auto counts = view<int32_t, 1>(lengths, "lengths");
  if (lengths.has_value()) check_shape(counts, "lengths", {batch});
  const auto table = view_table(page_table, batch);
  const Places places[2] = {{to[0], "k_cache", batch, table, page_table.has_value()},
                            {to[1], "v_cache", batch, table, page_table.has_value()}};

  parallel_for(batch * nodes, grain_of(heads * (from[0].row + from[1].row)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t task = begin; task < end; ++task) {
                   const int64_t b = task / nodes, j = task % nodes;
                   if (counts.data != nullptr && j >= counts(b)) continue;
                   for (int i = 0; i < 2; ++i) {
                     char* place = places[i].at(b, static_cast<int64_t>(lens(b)) + j);
                     if (place == nullptr) continue;
                     const char* source =
                         from[i].data + b * from[i].stride[0] + j * from[i].stride[1];
                     for (int64_t h = 0; h < heads; ++h) {
                       char* target = place + h * to[i].stride[2];
                       const char* row = source + h * from[i].stride[2];
                       if (store[i] == nullptr) {
                         std::memcpy(target, row, from[i].row);
                       } else {
                         store[i](row, target, from[i].dim, scale[i]);
                       }
                     }
                   }
                 }
               });
}

// Rotation of a head: the first elements by rows of cos and sin, the others stay.
class Rotation {
 public:
  Rotation(const LayerKernel& kernel, const Tensor& qkv, const Tensor& cos, const Tensor& sin,
           int64_t dim)
      : kernel_(kernel) {
    const Tensor* tables[2] = {&cos, &sin};
    const char* names[2] = {"cos", "sin"};
    const ScalarType type = cos.scalar_type();
    wide_ = type == ScalarType::Float && qkv.scalar_type() != ScalarType::Float;
    if (!wide_ && type != qkv.scalar_type()) {
      fail("cos: expected the dtype of qkv or float32, got ", torch::headeronly::toString(type));
    }
    for (int i = 0; i < 2; ++i) {
      const Tensor& table = *tables[i];
      if (!table.is_cpu()) fail(names[i], ": expected a CPU tensor");
      if (table.scalar_type() != type) fail("sin: expected the dtype of cos");
      if (table.dim() != 3 || table.size(0) != qkv.size(0) || table.size(1) != qkv.size(1)) {
        fail(names[i], ": expected [", qkv.size(0), ", ", qkv.size(1), ", D] for the rows of qkv");
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
    item_ = static_cast<int64_t>(qkv.element_size());
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

const void* head_weight(const std::optional<Tensor>& weight, const char* name, const Tensor& qkv,
                        int64_t dim) {
  if (!weight.has_value()) return nullptr;
  if (!weight->is_cpu()) fail(name, ": expected a CPU tensor");
  if (weight->scalar_type() != qkv.scalar_type()) fail(name, ": expected the dtype of qkv");
  if (weight->dim() != 1 || weight->size(0) != dim || !weight->is_contiguous()) {
    fail(name, ": expected ", dim, " contiguous elements in one dimension");
  }
  return weight->const_data_ptr();
}

// [query heads, key heads, value heads] of a row.
struct Heads {
  int64_t q, kv, dim;
};

Heads heads_of(const Tensor& qkv, const Tensor& k_cache) {
  if (qkv.dim() != 3) fail("qkv: expected 3 dimensions, got ", qkv.dim());
  if (k_cache.dim() != 4) fail("k_cache: expected 4 dimensions, got ", k_cache.dim());
  const int64_t kv = k_cache.size(2), dim = k_cache.size(3), width = qkv.size(2);
  if (kv < 1 || dim < 1) fail("k_cache: expected at least one head of one element");
  const int64_t q = width / dim - 2 * kv;
  if (width % dim != 0 || q < 1) {
    fail("qkv: expected (Hq + 2 * ", kv, ") * ", dim, " columns, got ", width);
  }
  return {q, kv, dim};
}

void rope_and_write_kv_out(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                           const Tensor& k_cache, const Tensor& v_cache, const Tensor& prefix_lens,
                           const std::optional<Tensor>& lengths,
                           const std::optional<Tensor>& page_table,
                           const std::optional<Tensor>& q_weight,
                           const std::optional<Tensor>& k_weight, double eps, const Tensor& q) {
  const LayerKernel& kernel = layer_kernel(qkv.scalar_type(), "qkv");
  if (!qkv.is_cpu()) fail("qkv: expected a CPU tensor");
  const Heads heads = heads_of(qkv, k_cache);
  const int64_t batch = qkv.size(0), nodes = qkv.size(1), dim = heads.dim;
  const auto strides = qkv.strides();
  if (strides[2] != 1) fail("qkv: expected a contiguous last dimension, got ", strides[2]);
  const Rotation rotation(kernel, qkv, cos, sin, dim);
  const void* weights[2] = {head_weight(q_weight, "q_weight", qkv, dim),
                            head_weight(k_weight, "k_weight", qkv, dim)};
  const Rows to[2] = {rows_of(k_cache, "k_cache"), rows_of(v_cache, "v_cache")};
  const Tensor* written[3] = {&k_cache, &v_cache, &q};
  const char* names[3] = {"k_cache", "v_cache", "q"};
  for (int i = 0; i < 3; ++i) {
    if (!written[i]->is_cpu()) fail(names[i], ": expected a CPU tensor");
    if (written[i]->scalar_type() != qkv.scalar_type()) {
      fail(names[i], ": expected the dtype of qkv, ",
           torch::headeronly::toString(qkv.scalar_type()), ", got ",
           torch::headeronly::toString(written[i]->scalar_type()));
    }
    check_written(*written[i], names[i]);
  }
  if (to[1].size[2] != heads.kv || to[1].dim != dim) {
    fail("v_cache: expected the heads and head dim of k_cache");
  }
  const Rows out = rows_of(q, "q");
  if (out.size[0] != batch || out.size[1] != nodes || out.size[2] != heads.q || out.dim != dim) {
    fail("q: expected [", batch, ", ", nodes, ", ", heads.q, ", ", dim, "]");
  }
  const auto lens = view<int32_t, 1>(prefix_lens, "prefix_lens");
  check_shape(lens, "prefix_lens", {batch});
  const auto counts = view<int32_t, 1>(lengths, "lengths");
  if (lengths.has_value()) check_shape(counts, "lengths", {batch});
  const auto table = view_table(page_table, batch);
  const Places keys(to[0], "k_cache", batch, table, page_table.has_value());
  const Places values(to[1], "v_cache", batch, table, page_table.has_value());

  const char* data = static_cast<const char*>(qkv.const_data_ptr());
  const int64_t item = static_cast<int64_t>(qkv.element_size()), row = dim * item;
  parallel_for(batch * nodes, grain_of(2 * qkv.size(2)), [&](int64_t begin, int64_t end) {
    thread_local std::vector<char> normed;
    normed.resize(static_cast<size_t>(row));
    const auto store = [&](const char* head, const void* weight, int64_t b, int64_t j, char* out) {
      if (weight != nullptr) {
        kernel.rms_norm(head, weight, dim, static_cast<float>(eps), normed.data());
        head = normed.data();
      }
      rotation.apply(head, b, j, out);
    };
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / nodes, j = task % nodes;
      const char* head = data + (b * strides[0] + j * strides[1]) * item;
      for (int64_t h = 0; h < heads.q; ++h, head += row) {
        char* target = out.data + b * out.stride[0] + j * out.stride[1] + h * out.stride[2];
        store(head, weights[0], b, j, target);
      }
      const bool stored = counts.data == nullptr || j < counts(b);
      if (!stored) continue;
      const int64_t position = static_cast<int64_t>(lens(b)) + j;
      char* const key = keys.at(b, position);
      char* const value = values.at(b, position);
      for (int64_t h = 0; h < heads.kv; ++h, head += row) {
        if (key != nullptr) store(head, weights[1], b, j, key + h * to[0].stride[2]);
      }
      for (int64_t h = 0; h < heads.kv; ++h, head += row) {
        if (value != nullptr) std::memcpy(value + h * to[1].stride[2], head, row);
      }
    }
  });
}

Tensor rope_and_write_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                         const Tensor& k_cache, const Tensor& v_cache, const Tensor& prefix_lens,
                         const std::optional<Tensor>& lengths,
                         const std::optional<Tensor>& page_table,
                         const std::optional<Tensor>& q_weight,
                         const std::optional<Tensor>& k_weight, double eps) {
  const Heads heads = heads_of(qkv, k_cache);
  const int64_t shape[4] = {qkv.size(0), qkv.size(1), heads.q, heads.dim};
  int32_t dtype = 0;
  aoti_torch_get_dtype(qkv.get(), &dtype);
  Tensor q = allocate(shape, 4, dtype);
  rope_and_write_kv_out(qkv, cos, sin, k_cache, v_cache, prefix_lens, lengths, page_table, q_weight,
                        k_weight, eps, q);
  return q;
}

void compact_kv(const std::vector<Tensor>& kv_caches, const Tensor& accept_index,
                const Tensor& accept_length, const Tensor& prefix_lens,
                const std::optional<Tensor>& page_table) {
  const auto index = view<int32_t, 2>(accept_index, "accept_index");
  const int64_t batch = index.size[0];
  const auto accepted = view<int32_t, 1>(accept_length, "accept_length");
  check_shape(accepted, "accept_length", {batch});
  const auto lens = view<int32_t, 1>(prefix_lens, "prefix_lens");
  check_shape(lens, "prefix_lens", {batch});
  const auto table = view_table(page_table, batch);
  // The calling thread's; the others see it through the reference.
  thread_local std::vector<Rows> rows_of_caches;
  std::vector<Rows>& caches = rows_of_caches;
  caches.clear();
  int64_t bytes = 1;
  for (const Tensor& cache : kv_caches) {
    caches.push_back(rows_of(cache, "kv_caches"));
    check_written(cache, "kv_caches");
    bytes = std::max(bytes, index.size[1] * caches.back().size[2] * caches.back().row);
    Places(caches.back(), "kv_caches", batch, table, page_table.has_value());
  }

  parallel_for(
      static_cast<int64_t>(caches.size()) * batch, grain_of(bytes),
      [&](int64_t begin, int64_t end) {
        thread_local std::vector<char> staged;
        thread_local std::vector<char*> rows;
        staged.resize(static_cast<size_t>(bytes));
        rows.resize(2 * static_cast<size_t>(index.size[1]));
        int32_t shared = 0;
        const MoveScratch scratch{rows.data(), rows.data() + index.size[1], &shared, staged.data()};
        for (int64_t task = begin; task < end; ++task) {
          const Rows& cache = caches[task / batch];
          const int64_t b = task % batch;
          const int64_t row = cache.size[2] * cache.row;
          if (row == 0) continue;
          // Heads that lie one behind the other move as one.
          const bool whole = cache.stride[2] == cache.row && row <= INT32_MAX;
          const RowUnits units{0, whole ? 1 : static_cast<int32_t>(cache.size[2]), 1,
                               static_cast<int32_t>(whole ? row : cache.row), cache.stride[2]};
          const Places places(cache, "kv_caches", batch, table, page_table.has_value());
          const AcceptedPath path{index.data + index.offset(b), index.stride[1],
                                  std::min<int64_t>(int64_t{accepted(b)} + 1, index.size[1]),
                                  lens(b)};
          const auto copy = [&units](const char* from, char* to) {
            std::memcpy(to, from, units.unit_bytes);
          };
          move_path(
              SoloTeam{}, path, units, [&](int64_t position) { return places.at(b, position); },
              copy, scratch);
        }
      });
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("compact_kv", TORCH_BOX(&compact_kv));
  m.impl("rope_and_write_kv", TORCH_BOX(&rope_and_write_kv));
  m.impl("rope_and_write_kv_out", TORCH_BOX(&rope_and_write_kv_out));
}

}  // namespace
}  // namespace eagle2
