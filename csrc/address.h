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

// What of an accepted path moves: for i < length, the row at position start + index[i] goes to
// position start + i. The path ends before its first negative index.
struct AcceptedPath {
  const int32_t* index;  // entries `stride` apart
  int64_t stride;
  int64_t length;
  int64_t start;
};

// Scratch of move_path.
struct MoveScratch {
  char** from;      // [length] rows to read, null where nothing moves
  char** to;        // [length]
  int32_t* shared;  // [1] the path's own length
  char* staged;     // length * units * unit_bytes
};

// Pieces of a row (one cache position), `unit_bytes` each, `per_head` of them contiguous:
// [first, first + count) are moved.
struct RowUnits {
  int32_t first, count;
  int32_t per_head, unit_bytes;
  int64_t head_stride;

  EAGLE2_HOST_DEVICE int64_t offset(int32_t unit) const {
    return unit / per_head * head_stride + int64_t{unit % per_head} * unit_bytes;
  }
};

// compact_kv for one request in one cache, as a team of tree.h. `row_at(position)` gives the first
// byte of a position, or null when the cache has no such place; `copy(from, to)` moves a unit.
// Everything is read into `staged` before anything is written: paths may overlap their target.
template <class Team, class RowAt, class Copy>
EAGLE2_HOST_DEVICE inline void move_path(const Team& team, const AcceptedPath& path,
                                         const RowUnits& units, const RowAt& row_at,
                                         const Copy& copy, const MoveScratch& s) {
  if (team.rank() == 0) {
    int32_t length = 0;
    while (length < path.length && path.index[length * path.stride] >= 0) ++length;
    *s.shared = length;
  }
  team.sync();
  const int32_t length = *s.shared;
  for (int32_t i = team.rank(); i < length; i += team.size()) {
    const int64_t source = path.index[i * path.stride];
    s.from[i] = source == i ? nullptr : row_at(path.start + source);
    s.to[i] = source == i ? nullptr : row_at(path.start + i);
    if (s.to[i] == nullptr) s.from[i] = nullptr;
  }
  team.sync();
  // Members share out the units of all rows, one after another; dividing once is enough.
  const int32_t first_row = team.rank() / units.count, first_unit = team.rank() % units.count;
  const int32_t rows = team.size() / units.count, more = team.size() % units.count;
  const auto each = [&](const auto& move) {
    for (int32_t i = first_row, unit = first_unit; i < length;) {
      if (s.from[i] != nullptr) {
        move(i, units.offset(units.first + unit),
             s.staged + (int64_t{i} * units.count + unit) * units.unit_bytes);
      }
      i += rows;
      unit += more;
      if (unit >= units.count) {
        unit -= units.count;
        ++i;
      }
    }
  };
  each([&](int32_t i, int64_t offset, char* staged) { copy(s.from[i] + offset, staged); });
  team.sync();
  each([&](int32_t i, int64_t offset, char* staged) { copy(staged, s.to[i] + offset); });
}

}  // namespace eagle2
