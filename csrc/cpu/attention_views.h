// What a row sees: its request, its path through the tree, the cache's rows.
// A part of attention_kernel.h, which says how it is compiled.

// What the rows of one node see: the shared keys at positions [begin, end), then the path's slots.
// A slot outside the window stays in the path, so that the others keep their positions; it is
// stored as ~slot.
struct NodeView {
  int64_t begin, end;
  int64_t path, path_count;  // range in the task's list of slots
  int64_t last_slot;         // of the path, 0 without one
};

// The request of a task, its lengths cut to what has a place in the cache.
inline Request request_of(const AttentionParams& p, int64_t index) {
  Request request = {index, 0, p.nodes, 0, p.tree_len, nullptr};
  if (p.qo_indptr != nullptr) {
    request.first_row = p.qo_indptr[index * p.indptr_stride];
    if (index == p.batch) {
      request.rows = p.padding_rows;
      request.tree_len = 0;
      return request;
    }
    request.rows = p.qo_indptr[(index + 1) * p.indptr_stride] - request.first_row;
  }
  request.prefix = std::clamp<int64_t>(p.prefix_lens[index * p.prefix_stride], 0, p.capacity);
  if (p.depths != nullptr) {
    request.depths = p.depths + index * p.depths_stride[0];
    if (p.tree_len < 0) request.depths += request.first_row * p.depths_stride[1];
  }
  if (p.tree_len < 0) request.tree_len = request.rows;
  return request;
}

// Word `word` of a mask row without the bits from `slots` on; false behind the last word.
inline bool mask_word(const AttentionParams& p, const Request& request, int64_t node, int64_t word,
                      int64_t slots, uint64_t* bits) {
  const int64_t first = word * 64;
  if (first >= slots) return false;
  *bits = static_cast<uint64_t>(
      p.mask[request.index * p.mask_stride[0] + (request.first_row + node) * p.mask_stride[1] +
             word * p.mask_stride[2]]);
  if (slots - first < 64) *bits &= (uint64_t{1} << (slots - first)) - 1;
  return true;
}

// Depth of every tree slot as far as it is known, else -1: given, or the number of ancestors in the
// slot's own mask row. Slots of an earlier call (before the queries') have no row here.
inline void slot_depths(const AttentionParams& p, const Request& request, int64_t slots,
                        std::vector<int32_t>& depths) {
  depths.assign(slots, -1);
  if (request.depths != nullptr) {
    for (int64_t j = 0; j < slots; ++j) depths[j] = request.depths[j * p.depths_stride[1]];
    return;
  }
  const int64_t first = request.tree_len - request.rows;
  for (int64_t j = std::max<int64_t>(first, 0); j < slots; ++j) {
    int32_t count = 0;
    uint64_t bits;
    for (int64_t w = 0; mask_word(p, request, j - first, w, request.tree_len, &bits); ++w) {
      count += __builtin_popcountll(bits);
    }
    depths[j] = count - 1;
  }
}

// Appends the slots node `node` sees to `list`, in path order. In a tree they have the depths 0, 1,
// ..., so a slot of known depth has its place; the rest (earlier slots without depths, or a mask
// that is no tree) fill the free places in ascending order. Parents may have larger slots than
// their children.
inline void append_path(const AttentionParams& p, const Request& request, int64_t node,
                        int64_t slots, const std::vector<int32_t>& depths,
                        std::vector<int32_t>& list, std::vector<int32_t>& rest) {
  const size_t start = list.size();
  rest.clear();
  uint64_t bits;
  for (int64_t w = 0; mask_word(p, request, node, w, slots, &bits); ++w) {
    for (; bits != 0; bits &= bits - 1) {
      rest.push_back(static_cast<int32_t>(w * 64 + __builtin_ctzll(bits)));
    }
  }
  const int64_t count = static_cast<int64_t>(rest.size());
  list.resize(start + count, -1);
  size_t left = 0;
  for (const int32_t slot : rest) {
    const int32_t depth = depths[slot];
    if (depth >= 0 && depth < count && list[start + depth] < 0) {
      list[start + depth] = slot;
    } else {
      rest[left++] = slot;
    }
  }
  size_t next = 0;
  for (int64_t i = 0; next < left; ++i) {
    if (list[start + i] < 0) list[start + i] = rest[next++];
  }
}

// What node `node` sees, its path appended to `list`. `slots` of the tree have a place in the
// cache.
inline NodeView view_node(const AttentionParams& p, const Request& request, int64_t node,
                          int64_t slots, bool chain, const std::vector<int32_t>& depths,
                          std::vector<int32_t>& list, std::vector<int32_t>& rest) {
  const int64_t prefix = request.prefix, slot = request.tree_len - request.rows + node;
  NodeView see = {0, prefix, static_cast<int64_t>(list.size()), 0, 0};
  if (request.tree_len > 0 && chain) {
    see.end = prefix + std::min(slot + 1, slots);
    if (p.window > 0) see.begin = std::max<int64_t>(0, prefix + slot - p.window + 1);
  } else if (request.tree_len > 0) {
    if (p.mask != nullptr) {
      append_path(p, request, node, slots, depths, list, rest);
    } else {
      for (int64_t j = 0; j <= slot && j < slots; ++j) list.push_back(static_cast<int32_t>(j));
    }
    see.path_count = static_cast<int64_t>(list.size()) - see.path;
    for (int64_t i = see.path; i < see.path + see.path_count; ++i) {
      see.last_slot = std::max<int64_t>(see.last_slot, list[i]);
    }
    if (p.window > 0) {
      const int64_t own = request.depths[slot * p.depths_stride[1]];
      see.begin = std::clamp<int64_t>(prefix + own - p.window + 1, 0, prefix);
      for (int64_t i = see.path; i < see.path + see.path_count; ++i) {
        if (own - request.depths[list[i] * p.depths_stride[1]] >= p.window) list[i] = ~list[i];
      }
    }
    if (see.path_count == 0) see.end = 0;  // a padding row does not see the prefix either
  }
  if (see.begin >= see.end) see.begin = see.end = 0;
  return see;
}

// The rows of cache positions [first, first + count) of one KV head. Positions without a place in
// the cache point to `zero`, a row of zeros: a wrong length or page id gives a wrong result, never
// a wild read.
template <typename C>
void cache_rows(const AttentionParams& p, const void* cache, const int64_t* stride, int64_t request,
                int64_t head, int64_t first, int64_t count, const C* zero, const C** rows) {
  if (count <= 0) return;
  const C* base = static_cast<const C*>(cache);
  const int32_t* table =
      p.page_table == nullptr ? nullptr : p.page_table + request * p.table_stride[0];
  for (int64_t done = 0; done < count;) {
    const CacheSlot at = cache_slot(first + done, request, table, p.table_stride[1],
                                    p.table_entries, p.page_size, p.num_blocks);
    const int64_t offset = (first + done) % p.page_size;
    const int64_t run = std::min(count - done, p.page_size - offset);
    for (int64_t i = 0; i < run; ++i) {
      rows[done + i] = at.block < 0 ? zero
                                    : base + cache_offset(at.block, stride[0], at.slot + i,
                                                          stride[1], head, stride[2]);
    }
    done += run;
  }
}
