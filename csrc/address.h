// Where a key or value lies in a cache: torch-free, one statement for every backend, all of it in
// 64 bits. A pool of some hundred pages of a large model passes 2^31 elements, and page ids pass
// 2^16.
#pragma once

#include <cstdint>

#ifndef EAGLE2_HOST_DEVICE
#ifdef __CUDACC__
#define EAGLE2_HOST_DEVICE __host__ __device__
#else
#define EAGLE2_HOST_DEVICE
#endif
#endif

namespace eagle2 {

// Offset, in elements, of slot `slot` and head `head` of block `block`. A dense cache [B, S, H, D]
// has one block per request and S slots in it; a paged cache [pages, page_size, H, D] has one block
// per page.
EAGLE2_HOST_DEVICE inline int64_t cache_offset(int64_t block, int64_t block_stride, int64_t slot,
                                               int64_t slot_stride, int64_t head,
                                               int64_t head_stride) {
  return block * block_stride + slot * slot_stride + head * head_stride;
}

// The block and the slot inside it of a request's cache position.
struct CacheSlot {
  int64_t block;  // -1: the position lies outside the cache or its page id is not a page
  int64_t slot;
};

// `table` is the request's row of the page table (entries `table_stride` apart), or null for a
// dense cache, where the block is the request itself. Never reads a table entry at or past
// `num_entries`.
EAGLE2_HOST_DEVICE inline CacheSlot cache_slot(int64_t position, int64_t request,
                                               const int32_t* table, int64_t table_stride,
                                               int64_t num_entries, int64_t page_size,
                                               int64_t num_blocks) {
  if (position < 0) return {-1, 0};
  if (table == nullptr) return {position < page_size ? request : -1, position};
  const int64_t entry = position / page_size;
  if (entry >= num_entries) return {-1, 0};
  const int64_t page = table[entry * table_stride];
  return {page >= 0 && page < num_blocks ? page : -1, position - entry * page_size};
}

}  // namespace eagle2
