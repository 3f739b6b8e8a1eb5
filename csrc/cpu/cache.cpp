// write_kv and compact_kv on the CPU: rows of a dense or paged cache are moved as bytes, whatever
// their dtype; only what goes into a float8 cache from a wider dtype is converted. And
// rope_and_write_kv, which rotates rows on their way there.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../tree.h"
#include "args.h"
#include "cache_rows.h"
#include "rope.h"

namespace eagle2 {
namespace {

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
  const CacheRows from[2] = {rows_of(k, "k"), rows_of(v, "v")};
  const CacheRows to[2] = {rows_of(k_cache, "k_cache"), rows_of(v_cache, "v_cache")};
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

  parallel_for(batch * nodes, grain_of_bytes(heads * (from[0].row + from[1].row)),
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
  const Heads heads = heads_of(qkv, k_cache);
  if (!qkv.is_cpu()) fail("qkv: expected a CPU tensor");
  const auto strides = qkv.strides();
  if (strides[2] != 1) fail("qkv: expected a contiguous last dimension, got ", strides[2]);
  const auto item = static_cast<int64_t>(qkv.element_size());
  const QkvRows rows = {static_cast<const char*>(qkv.const_data_ptr()),
                        qkv.scalar_type(),
                        item,
                        qkv.size(0),
                        qkv.size(1),
                        qkv.size(2),
                        {strides[0] * item, strides[1] * item}};
  if (!q.is_cpu()) fail("q: expected a CPU tensor");
  if (q.scalar_type() != rows.type) {
    fail("q: expected the dtype of qkv, ", torch::headeronly::toString(rows.type), ", got ",
         torch::headeronly::toString(q.scalar_type()));
  }
  check_written(q, "q");
  const CacheRows out = rows_of(q, "q");
  if (out.size[0] != rows.batch || out.size[1] != rows.nodes || out.size[2] != heads.q ||
      out.dim != heads.dim) {
    fail("q: expected [", rows.batch, ", ", rows.nodes, ", ", heads.q, ", ", heads.dim, "]");
  }
  RopeAndWrite(rows, heads, cos, sin, k_cache, v_cache, prefix_lens, 0, lengths, page_table,
               q_weight, k_weight, eps, out)
      .run();
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
  thread_local std::vector<CacheRows> rows_of_caches;
  std::vector<CacheRows>& caches = rows_of_caches;
  caches.clear();
  int64_t bytes = 1;
  for (const Tensor& cache : kv_caches) {
    caches.push_back(rows_of(cache, "kv_caches"));
    check_written(cache, "kv_caches");
    bytes = std::max(bytes, index.size[1] * caches.back().size[2] * caches.back().row);
    Places(caches.back(), "kv_caches", batch, table, page_table.has_value());
  }

  parallel_for(
      static_cast<int64_t>(caches.size()) * batch, grain_of_bytes(bytes),
      [&](int64_t begin, int64_t end) {
        thread_local std::vector<char> staged;
        thread_local std::vector<char*> rows;
        staged.resize(static_cast<size_t>(bytes));
        rows.resize(2 * static_cast<size_t>(index.size[1]));
        int32_t shared = 0;
        const MoveScratch scratch{rows.data(), rows.data() + index.size[1], &shared, staged.data()};
        for (int64_t task = begin; task < end; ++task) {
          const CacheRows& cache = caches[task / batch];
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
