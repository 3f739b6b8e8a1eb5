// Where the operators of cache.cpp, and those that hold one, find rows of a dense or paged cache.
#pragma once

#include <algorithm>
#include <optional>

#include "../address.h"
#include "common.h"

namespace eagle2 {

// A [., ., heads, dim] tensor as bytes: strides in bytes, `row` bytes per (slot, head).
struct CacheRows {
  char* data;
  int64_t size[3], stride[3];
  int64_t row, dim;
};

inline CacheRows rows_of(const Tensor& tensor, const char* name) {
  if (tensor.dim() != 4) fail(name, ": expected 4 dimensions, got ", tensor.dim());
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (sizes[3] > 1 && strides[3] != 1) {
    fail(name, ": expected a contiguous last dimension, got stride ", strides[3]);
  }
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  CacheRows rows;
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
  Places(const CacheRows& cache, const char* name, int64_t batch,
         const View<const int32_t, 2>& table, bool paged)
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
  const CacheRows& cache_;
  const View<const int32_t, 2>& table_;
  const bool paged_;
};

inline View<const int32_t, 2> view_table(const std::optional<Tensor>& page_table, int64_t batch) {
  const auto table = view<int32_t, 2>(page_table, "page_table");
  if (page_table.has_value()) check_shape(table, "page_table", {batch, -1});
  return table;
}

constexpr int64_t kBytesPerThread = 1 << 16;

// Rows of so many bytes that a thread is started for.
inline int64_t grain_of_bytes(int64_t bytes) {
  return std::max<int64_t>(1, kBytesPerThread / (bytes + 1));
}

}  // namespace eagle2
