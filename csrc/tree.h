// The draft tree on raw pointers: re-ranking, flattening, links, ancestor masks, walks and the
// sampling noise, each stated once. It knows neither torch nor CUDA; csrc/cpu and csrc/cuda put ops
// around it, and tests/test_tree_core.py binds it directly.
//
// Functions that a thread block runs together take a team: `rank()` of `size()` members, `sync()`
// (a barrier, and a memory fence between members), `any(flag)` (a sync that says whether a member
// raised its flag) and an atomic `add(counter, value)` that returns the old value. Members call
// them in step. The CPU ops run a team of one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define EAGLE2_HD __host__ __device__ __forceinline__
#else
#define EAGLE2_HD inline __attribute__((always_inline))
#endif

namespace eagle2 {

struct SoloTeam {
  EAGLE2_HD int rank() const { return 0; }
  EAGLE2_HD int size() const { return 1; }
  EAGLE2_HD void sync() const {}
  EAGLE2_HD bool any(bool flag) const { return flag; }
  EAGLE2_HD int32_t add(int32_t* counter, int32_t value) const {
    const int32_t old = *counter;
    *counter += value;
    return old;
  }
};

constexpr int64_t kWordBits = 64;

EAGLE2_HD int64_t mask_words(int64_t slots) { return (slots + kWordBits - 1) / kWordBits; }

EAGLE2_HD float minus_infinity() { return -INFINITY; }

EAGLE2_HD int64_t clamp_index(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : (value > high ? high : value);
}

EAGLE2_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

EAGLE2_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// One tree given by its parents [n], in any slot order.

// Steps from `slot` to the root (slot 0, whose parent is -1), or -1 when the walk leaves [0, n) or
// does not end within n - 1 steps.
EAGLE2_HD int32_t depth_of(const int32_t* parents, int32_t n, int32_t slot) {
  if (n <= 0 || parents[0] != -1) return -1;
  int32_t depth = 0;
  while (slot != 0) {
    const int32_t parent = parents[slot];
    if (parent < 0 || parent >= n || depth + 1 >= n) return -1;
    slot = parent;
    ++depth;
  }
  return depth;
}

// Sets the bit of `slot` and of each of its `depth` ancestors in words that are zero.
EAGLE2_HD void mark_ancestors(const int32_t* parents, int32_t slot, int32_t depth,
                              uint64_t* words) {
  for (int32_t step = 0; step <= depth; ++step) {
    words[slot / kWordBits] |= uint64_t{1} << (slot % kWordBits);
    if (step < depth) slot = parents[slot];
  }
}

// What the slots of one request share. `depths` [capacity] is read by the functions below.
struct TreeView {
  const int32_t* parents;
  const int32_t* depths;  // -1: not under the root
  int32_t n;              // slots in use
  int32_t capacity;       // slots there are
};

EAGLE2_HD bool has_parent(const TreeView& tree, int32_t slot) { return tree.depths[slot] > 0; }

// Child and sibling links, siblings in ascending slot order, -1 where there is none. A team of one
// threads the lists backwards in one pass; a larger team gives each slot a search of its own.
template <class Team>
EAGLE2_HD void link_slots(const Team& team, const TreeView& tree, int32_t* first_child,
                          int32_t* next_sibling) {
  for (int32_t i = team.rank(); i < tree.capacity; i += team.size()) {
    first_child[i] = -1;
    next_sibling[i] = -1;
  }
  team.sync();
  if (team.size() == 1) {
    for (int32_t i = tree.n - 1; i > 0; --i) {
      if (!has_parent(tree, i)) continue;
      next_sibling[i] = first_child[tree.parents[i]];
      first_child[tree.parents[i]] = i;
    }
    return;
  }
  for (int32_t i = team.rank(); i < tree.n; i += team.size()) {
    if (tree.depths[i] < 0) continue;
    int32_t j = 1;
    while (j < tree.n && !(tree.parents[j] == i && has_parent(tree, j))) ++j;
    if (j < tree.n) first_child[i] = j;
    if (i == 0) continue;
    j = i + 1;
    while (j < tree.n && tree.parents[j] != tree.parents[i]) ++j;
    if (j < tree.n) next_sibling[i] = j;
  }
}

// Position ids, links and mask words [capacity, mask_words(capacity)] of a tree whose depths are
// known; slots outside the tree sit at the prefix's end, unlinked, with an empty mask row.
template <class Team>
EAGLE2_HD void describe_slots(const Team& team, const TreeView& tree, int64_t prefix_len,
                              int64_t* position_ids, int32_t* first_child, int32_t* next_sibling,
                              uint64_t* tree_mask) {
  const int64_t words = mask_words(tree.capacity);
  for (int32_t i = team.rank(); i < tree.capacity; i += team.size()) {
    const bool in_tree = i < tree.n && tree.depths[i] >= 0;
    position_ids[i] = prefix_len + (in_tree ? tree.depths[i] : 0);
    uint64_t* row = tree_mask + i * words;
    for (int64_t w = 0; w < words; ++w) row[w] = 0;
    if (in_tree) mark_ancestors(tree.parents, i, tree.depths[i], row);
  }
  link_slots(team, tree, first_child, next_sibling);
}

// flatten_tree for one request. Reads parents [capacity], writes every output slot.
template <class Team>
EAGLE2_HD void flatten_tree(const Team& team, const int32_t* parents, int32_t capacity,
                            int32_t num_nodes, int64_t prefix_len, int32_t* depths,
                            int64_t* position_ids, int32_t* first_child, int32_t* next_sibling,
                            uint64_t* tree_mask) {
  const int32_t n = static_cast<int32_t>(clamp_index(num_nodes, 0, capacity));
  for (int32_t i = team.rank(); i < capacity; i += team.size()) {
    depths[i] = i < n ? depth_of(parents, n, i) : 0;
  }
  team.sync();
  describe_slots(team, TreeView{parents, depths, n, capacity}, prefix_len, position_ids,
                 first_child, next_sibling, tree_mask);
}

// The sum of `value` over the members before this one; `total` takes that over all. Each round adds
// the sums of twice as many members. `sums` is scratch for two numbers per member.
template <class Team>
EAGLE2_HD int32_t sum_before(const Team& team, int32_t value, int32_t* sums, int32_t* total) {
  const int32_t rank = team.rank(), size = team.size();
  int32_t *now = sums, *next = sums + size;
  now[rank] = value;
  team.sync();
  for (int32_t gap = 1; gap < size; gap *= 2) {
    next[rank] = now[rank] + (rank >= gap ? now[rank - gap] : 0);
    int32_t* const last = now;
    now = next;
    next = last;
    team.sync();
  }
  *total = now[size - 1];
  return now[rank] - value;
}

// retrieve_indices for one request: the slots from the root to each leaf, one row of `width` per
// leaf in ascending leaf slot, at most the first `width` of a path; the rest of [capacity, width]
// is -1. `children` is scratch for a number per slot, `sums` for two per member. Returns the number
// of leaves.
template <class Team>
EAGLE2_HD int32_t leaf_paths(const Team& team, const int32_t* parents, int32_t capacity,
                             int32_t num_nodes, int64_t width, int32_t* children, int32_t* sums,
                             int64_t* rows) {
  const int32_t n = static_cast<int32_t>(clamp_index(num_nodes, 0, capacity));
  for (int64_t i = team.rank(); i < capacity * width; i += team.size()) rows[i] = -1;
  for (int32_t i = team.rank(); i < capacity; i += team.size()) children[i] = 0;
  team.sync();
  for (int32_t i = 1 + team.rank(); i < n; i += team.size()) {
    const int32_t parent = parents[i];
    // A reachable parent makes its children reachable, so any child will do.
    if (parent >= 0 && parent < n) team.add(&children[parent], 1);
  }
  team.sync();
  // A member takes slots in a row, so that rows of leaves follow the order of members.
  const int32_t share = (n + team.size() - 1) / team.size();
  const int32_t first = static_cast<int32_t>(clamp_index(int64_t{share} * team.rank(), 0, n));
  const int32_t end = static_cast<int32_t>(clamp_index(int64_t{first} + share, 0, n));
  int32_t* const depths = children;
  int32_t mine = 0, leaves = 0;
  for (int32_t i = first; i < end; ++i) {
    depths[i] = children[i] > 0 ? -1 : depth_of(parents, n, i);
    mine += depths[i] >= 0;
  }
  int64_t row = sum_before(team, mine, sums, &leaves);
  for (int32_t leaf = first; leaf < end; ++leaf) {
    if (depths[leaf] < 0) continue;
    int32_t slot = leaf;
    for (int32_t d = depths[leaf]; d >= 0; --d) {
      if (d < width) rows[row * width + d] = slot;
      if (d > 0) slot = parents[slot];
    }
    ++row;
  }
  return leaves;
}

// Masks as bytes and as words.

// Elements before row `r` of a tensor whose leading dimensions are `shape` [dims], `stride` apart.
EAGLE2_HD int64_t row_offset(int64_t r, const int64_t* shape, const int64_t* stride, int64_t dims) {
  int64_t sum = 0;
  for (int64_t i = dims; i-- > 0;) {
    sum += r % shape[i] * stride[i];
    r /= shape[i];
  }
  return sum;
}

// pack_tree_mask for one row: bit j % 64 of word j / 64 says that byte j is not 0. Bytes, because a
// bool tensor may be a view of bytes other than 0 and 1.
template <class Team>
EAGLE2_HD void pack_row(const Team& team, const uint8_t* row, int64_t step, int64_t width,
                        uint64_t* words) {
  for (int64_t w = team.rank(); w < mask_words(width); w += team.size()) {
    const int64_t first = w * kWordBits;
    const int64_t count = clamp_index(width - first, 0, kWordBits);
    uint64_t word = 0;
    for (int64_t j = 0; j < count; ++j) {
      word |= uint64_t{row[(first + j) * step] != 0} << j;
    }
    words[w] = word;
  }
}

// unpack_tree_mask for one row.
template <class Team>
EAGLE2_HD void unpack_row(const Team& team, const uint64_t* words, int64_t step, int64_t num_keys,
                          bool* row) {
  for (int64_t j = team.rank(); j < num_keys; j += team.size()) {
    row[j] = words[j / kWordBits * step] >> (j % kWordBits) & 1;
  }
}

// Re-ranking: the best candidates of all levels become the tree.

// Candidates [m] in parent-before-child order; parent -1 is the root.
struct Candidates {
  const int64_t* tokens;
  const float* scores;
  const int32_t* parents;
  int32_t m;
};

// Scratch of build_tree for one request. Two of each: rounds read one and write the other.
struct BuildScratch {
  float* effective[2];  // [m] the smallest score on the way to the root
  int32_t* up[2];       // [m] an ancestor not yet accounted for, -1 when none is left
  int32_t* depth[2];    // [m]
  uint64_t* kept;       // [sort_capacity(max_nodes)] depth << 32 | candidate
  int32_t* histogram;   // [256]
  int32_t* shared;      // [4] kept count, digit, wanted in digit, eligible count
};

EAGLE2_HD int32_t sort_capacity(int32_t max_nodes) {
  int32_t capacity = 1;
  while (capacity < max_nodes - 1) capacity *= 2;
  return capacity;
}

// 32 bits that order as the float does; both zeros map to one value.
EAGLE2_HD uint32_t ordered_bits(float value) {
  const uint32_t bits = float_bits(value == 0.0f ? 0.0f : value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Greater is better: score descending, then index ascending. No two candidates share a key.
EAGLE2_HD uint64_t rank_key(float effective, int32_t candidate) {
  return uint64_t{ordered_bits(effective)} << 32 | (0xffffffffu - static_cast<uint32_t>(candidate));
}

// Effective score (own score, capped by every ancestor's: the kept set is closed under parents) and
// depth of each candidate, by pointer doubling. A NaN score, or a parent that is not an earlier
// candidate, counts as -inf. Returns which of the two scratch arrays holds the result.
template <class Team>
EAGLE2_HD int resolve_candidates(const Team& team, const Candidates& c, const BuildScratch& s) {
  bool open = false;
  for (int32_t i = team.rank(); i < c.m; i += team.size()) {
    const int32_t parent = c.parents[i];
    const bool known = parent >= -1 && parent < i;
    const float score = c.scores[i];
    s.effective[0][i] = known && score == score ? score : minus_infinity();
    s.up[0][i] = known ? parent : -1;
    s.depth[0][i] = 1;
    open |= known && parent >= 0;
  }
  int now = 0;
  while (team.any(open)) {
    open = false;
    for (int32_t i = team.rank(); i < c.m; i += team.size()) {
      float effective = s.effective[now][i];
      int32_t up = s.up[now][i], depth = s.depth[now][i];
      if (up >= 0) {
        const float above = s.effective[now][up];
        effective = above < effective ? above : effective;
        depth += s.depth[now][up];
        up = s.up[now][up];
      }
      s.effective[1 - now][i] = effective;
      s.up[1 - now][i] = up;
      s.depth[1 - now][i] = depth;
      open |= up >= 0;
    }
    now = 1 - now;
  }
  return now;
}

EAGLE2_HD bool eligible(float effective, int32_t depth, int64_t depth_limit) {
  return effective > minus_infinity() && depth <= depth_limit;
}

// The smallest rank key among the best `wanted` eligible candidates: radix selection, a byte of the
// key per round.
template <class Team>
EAGLE2_HD uint64_t selection_threshold(const Team& team, const float* effective,
                                       const int32_t* depth, int32_t m, int64_t depth_limit,
                                       int32_t wanted, const BuildScratch& s) {
  uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int32_t bin = team.rank(); bin < 256; bin += team.size()) s.histogram[bin] = 0;
    team.sync();
    for (int32_t i = team.rank(); i < m; i += team.size()) {
      if (!eligible(effective[i], depth[i], depth_limit)) continue;
      const uint64_t key = rank_key(effective[i], i);
      // Shifting by 64 is undefined, so the prefix above the first byte is compared as no prefix.
      if (shift < 56 && (key ^ prefix) >> (shift + 8) != 0) continue;
      team.add(&s.histogram[key >> shift & 255], 1);
    }
    team.sync();
    if (team.rank() == 0) {
      int32_t digit = 255, left = wanted;
      while (s.histogram[digit] < left) left -= s.histogram[digit--];
      s.shared[1] = digit;
      s.shared[2] = left;
    }
    team.sync();
    prefix |= static_cast<uint64_t>(s.shared[1]) << shift;
    wanted = s.shared[2];
    const bool whole_bin = s.histogram[s.shared[1]] == wanted;
    team.sync();
    if (whole_bin) break;
  }
  return prefix;
}

// Ascending bitonic sort of `size` keys, a power of two.
template <class Team>
EAGLE2_HD void sort_keys(const Team& team, uint64_t* keys, int32_t size) {
  for (int32_t block = 2; block <= size; block *= 2) {
    for (int32_t gap = block / 2; gap > 0; gap /= 2) {
      for (int32_t pair = team.rank(); pair < size / 2; pair += team.size()) {
        const int32_t low = pair + (pair & -gap);  // gap is a power of two
        const bool ascending = (low & block) == 0;
        const uint64_t a = keys[low], b = keys[low + gap];
        if ((a > b) == ascending) {
          keys[low] = b;
          keys[low + gap] = a;
        }
      }
      team.sync();
    }
  }
}

EAGLE2_HD int32_t find_key(const uint64_t* keys, int32_t count, uint64_t key) {
  int32_t low = 0, high = count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (keys[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// What build_tree writes for one request: [max_nodes] each, but the mask's words and num_nodes.
struct TreeOut {
  int64_t* draft_tokens;
  int32_t* parents;
  int32_t* depths;
  int64_t* position_ids;
  float* scores;
  int32_t* first_child;
  int32_t* next_sibling;
  uint64_t* tree_mask;
  int32_t* num_nodes;

  // The place of request b in arrays of a batch.
  EAGLE2_HD TreeOut request(int64_t b, int64_t max_nodes) const {
    const int64_t at = b * max_nodes;
    return TreeOut{draft_tokens + at, parents + at,
                   depths + at,       position_ids + at,
                   scores + at,       first_child + at,
                   next_sibling + at, tree_mask + at * mask_words(max_nodes),
                   num_nodes + b};
  }
};

// Writes the tree of the root and of the `keep` candidates in `kept` (depth << 32 | candidate,
// ascending; every candidate's parent among them). Without a root the request is inactive.
template <class Team>
EAGLE2_HD void write_tree(const Team& team, const Candidates& c, const int32_t* depth,
                          const uint64_t* kept, int32_t keep, bool rooted, int64_t root_token,
                          int64_t prefix_len, int32_t max_nodes, const TreeOut& out) {
  const int32_t n = rooted ? keep + 1 : 0;
  for (int32_t slot = team.rank(); slot < max_nodes; slot += team.size()) {
    int64_t token = 0;
    int32_t parent = -1, slot_depth = 0;
    float score = slot == 0 && n > 0 ? 0.0f : minus_infinity();
    if (slot == 0 && n > 0) token = root_token;
    if (slot > 0 && slot < n) {
      const int32_t candidate = static_cast<int32_t>(kept[slot - 1] & 0xffffffffu);
      const int32_t from = c.parents[candidate];
      token = c.tokens[candidate];
      score = c.scores[candidate];
      slot_depth = depth[candidate];
      const uint64_t above =
          static_cast<uint64_t>(slot_depth - 1) << 32 | static_cast<uint32_t>(from);
      parent = from < 0 ? 0 : 1 + find_key(kept, keep, above);
    }
    out.draft_tokens[slot] = token;
    out.parents[slot] = parent;
    out.depths[slot] = slot_depth;
    out.scores[slot] = score;
  }
  if (team.rank() == 0) *out.num_nodes = n;
  team.sync();
  describe_slots(team, TreeView{out.parents, out.depths, n, max_nodes}, prefix_len,
                 out.position_ids, out.first_child, out.next_sibling, out.tree_mask);
}

// build_tree for one request. `slot_limit` bounds the slots, root included (none left: the request
// is inactive), `depth_limit` the depth of the deepest kept candidate.
template <class Team>
EAGLE2_HD void build_tree(const Team& team, const Candidates& c, int64_t root_token,
                          int64_t prefix_len, int32_t max_nodes, int64_t slot_limit,
                          int64_t depth_limit, const BuildScratch& s, const TreeOut& out) {
  const int now = resolve_candidates(team, c, s);
  const float* effective = s.effective[now];
  const int32_t* depth = s.depth[now];

  const int32_t capacity = sort_capacity(max_nodes);
  for (int32_t i = team.rank(); i < capacity; i += team.size()) s.kept[i] = ~uint64_t{0};
  if (team.rank() == 0) s.shared[0] = s.shared[3] = 0;
  team.sync();
  int32_t mine = 0;
  for (int32_t i = team.rank(); i < c.m; i += team.size()) {
    mine += eligible(effective[i], depth[i], depth_limit);
  }
  if (mine > 0) team.add(&s.shared[3], mine);
  team.sync();
  const int32_t room = static_cast<int32_t>(clamp_index(slot_limit, 0, max_nodes));
  const int32_t keep = room <= 0 ? 0 : (room - 1 < s.shared[3] ? room - 1 : s.shared[3]);
  if (keep > 0) {
    uint64_t threshold = 0;
    if (keep < s.shared[3]) {
      threshold = selection_threshold(team, effective, depth, c.m, depth_limit, keep, s);
    }
    for (int32_t i = team.rank(); i < c.m; i += team.size()) {
      if (!eligible(effective[i], depth[i], depth_limit)) continue;
      if (rank_key(effective[i], i) < threshold) continue;
      s.kept[team.add(&s.shared[0], 1)] =
          static_cast<uint64_t>(depth[i]) << 32 | static_cast<uint32_t>(i);
    }
    team.sync();
    sort_keys(team, s.kept, capacity);
  }
  write_tree(team, c, depth, s.kept, keep, room > 0, root_token, prefix_len, max_nodes, out);
}

// The best prefixes of independent positions: a tree without a draft head run per level.

// `depth` positions of one request with `top_k` tokens each, log-probabilities descending. An entry
// counts for no more than 0 and no more than the entry before it, NaN as -inf: so a prefix ranks
// below its parent and below its previous sibling, whatever came.
struct Marginals {
  const int64_t* tokens;   // [depth, top_k]
  const float* log_probs;  // [depth, top_k]
  int32_t depth, top_k;
};

// A prefix whose parent is taken and whose previous sibling is: the next to be taken, or later.
struct OpenPrefix {
  float score;
  float log_prob;  // what its last token counts for
  int32_t depth, rank;
  int32_t parent;  // index of the taken prefix it extends, -1: the root
};

// Scratch of build_tree_from_marginals for one request: [max_nodes] each, but `kept`.
struct MarginalsScratch {
  OpenPrefix* open;  // a heap, the next prefix first; a prefix taken opens two at most
  int64_t* tokens;   // of the prefixes taken, in the order they were taken; as the next
  float* scores;
  int32_t* parents;
  int32_t* depths;
  uint64_t* kept;   // [sort_capacity(max_nodes)] depth << 32 | prefix
  int32_t* shared;  // [1] prefixes taken
};

EAGLE2_HD bool comes_before(const OpenPrefix& a, const OpenPrefix& b) {
  if (a.score != b.score) return a.score > b.score;
  if (a.depth != b.depth) return a.depth < b.depth;
  if (a.rank != b.rank) return a.rank < b.rank;
  return a.parent < b.parent;
}

EAGLE2_HD void push_prefix(OpenPrefix* heap, int32_t count, const OpenPrefix& added) {
  int32_t at = count;
  while (at > 0 && comes_before(added, heap[(at - 1) / 2])) {
    heap[at] = heap[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  heap[at] = added;
}

// Takes the first of `count` prefixes off the heap.
EAGLE2_HD OpenPrefix pop_prefix(OpenPrefix* heap, int32_t count) {
  const OpenPrefix top = heap[0], moved = heap[count - 1];
  const int32_t left = count - 1;
  int32_t at = 0;
  for (int32_t child = 1; child < left; child = 2 * at + 1) {
    if (child + 1 < left && comes_before(heap[child + 1], heap[child])) ++child;
    if (!comes_before(heap[child], moved)) break;
    heap[at] = heap[child];
    at = child;
  }
  if (left > 0) heap[at] = moved;
  return top;
}

// Best-first: taking a prefix opens its next sibling and its first child. Takes at most `wanted`
// prefixes of at most `deepest` tokens and returns how many there were above -inf.
EAGLE2_HD int32_t take_best_prefixes(const Marginals& m, int32_t wanted, int64_t deepest,
                                     const MarginalsScratch& s) {
  int32_t count = 0, taken = 0;
  const auto open = [&](int32_t depth, int32_t rank, int32_t parent, float bound) {
    if (depth > m.depth || depth > deepest || rank >= m.top_k) return;
    const float own = m.log_probs[(depth - 1) * int64_t{m.top_k} + rank];
    const float log_prob = own == own ? (own < bound ? own : bound) : minus_infinity();
    const float score = (parent < 0 ? 0.0f : s.scores[parent]) + log_prob;
    if (score > minus_infinity()) {
      push_prefix(s.open, count++, OpenPrefix{score, log_prob, depth, rank, parent});
    }
  };
  if (wanted > 0) open(1, 0, -1, 0.0f);
  while (taken < wanted && count > 0) {
    const OpenPrefix next = pop_prefix(s.open, count--);
    s.tokens[taken] = m.tokens[(next.depth - 1) * int64_t{m.top_k} + next.rank];
    s.scores[taken] = next.score;
    s.parents[taken] = next.parent;
    s.depths[taken] = next.depth;
    open(next.depth, next.rank + 1, next.parent, next.log_prob);
    open(next.depth + 1, 0, taken, 0.0f);
    ++taken;
  }
  return taken;
}

// build_tree_from_marginals for one request; limits as in build_tree. One member searches, which is
// a matter of `max_nodes` heap steps; the team writes.
template <class Team>
EAGLE2_HD void build_tree_from_marginals(const Team& team, const Marginals& m, int64_t root_token,
                                         int64_t prefix_len, int32_t max_nodes, int64_t slot_limit,
                                         int64_t depth_limit, const MarginalsScratch& s,
                                         const TreeOut& out) {
  const int32_t room = static_cast<int32_t>(clamp_index(slot_limit, 0, max_nodes));
  const int32_t capacity = sort_capacity(max_nodes);
  if (team.rank() == 0) s.shared[0] = take_best_prefixes(m, room - 1, depth_limit, s);
  team.sync();
  const int32_t keep = s.shared[0];
  for (int32_t i = team.rank(); i < capacity; i += team.size()) {
    s.kept[i] = i < keep ? static_cast<uint64_t>(s.depths[i]) << 32 | static_cast<uint32_t>(i)
                         : ~uint64_t{0};
  }
  team.sync();
  sort_keys(team, s.kept, capacity);
  write_tree(team, Candidates{s.tokens, s.scores, s.parents, keep}, s.depths, s.kept, keep,
             room > 0, root_token, prefix_len, max_nodes, out);
}

// Growing the tree.

constexpr int32_t kNoParent = -2;  // neither the root nor a candidate

// Where the candidates of a level start: top_k at level 0, top_k * top_k at each level after it.
EAGLE2_HD int64_t level_offset(int64_t level, int64_t top_k) {
  return level <= 0 ? 0 : top_k + (level - 1) * top_k * top_k;
}

// extend_draft_tree for one request: from level 1 on, frontier entry j is the previous level's
// candidate beam[j] and takes draft slot (level - 1) * top_k + j. A beam entry outside that level's
// candidates gives its children kNoParent, which build_tree drops, and no ancestors. At level 0
// candidates hang under the root and the mask stays.
template <class Team>
EAGLE2_HD void extend_level(const Team& team, int64_t level, int64_t top_k, int64_t words,
                            const int64_t* beam, const uint64_t* mask, int32_t* candidate_parents,
                            uint64_t* next_mask) {
  if (level == 0) {
    for (int64_t j = team.rank(); j < top_k; j += team.size()) candidate_parents[j] = -1;
    for (int64_t w = team.rank(); w < top_k * words; w += team.size()) next_mask[w] = mask[w];
    return;
  }
  const int64_t above = level_offset(level - 1, top_k), below = level_offset(level, top_k);
  const int64_t candidates = below - above;
  for (int64_t j = team.rank(); j < top_k; j += team.size()) {
    const bool known = beam[j] >= 0 && beam[j] < candidates;
    const int32_t parent = known ? static_cast<int32_t>(above + beam[j]) : kNoParent;
    for (int64_t r = 0; r < top_k; ++r) candidate_parents[below + j * top_k + r] = parent;
    const int64_t slot = (level - 1) * top_k + j;
    for (int64_t w = 0; w < words; ++w) {
      const uint64_t inherited = known ? mask[beam[j] / top_k * words + w] : 0;
      const bool own = w == slot / kWordBits;
      next_mask[j * words + w] = inherited | (own ? uint64_t{1} << (slot % kWordBits) : 0);
    }
  }
}

// Verification.

// The first of the siblings from `first` on for which `wanted(child, place)` holds, or -1. Ends
// after `slots` steps, whatever the links hold.
template <class Wanted>
EAGLE2_HD int32_t find_sibling(int32_t first, const int32_t* next_sibling, int64_t slots,
                               const Wanted& wanted) {
  int32_t child = first;
  for (int64_t place = 0; place < slots && child >= 0 && child < slots; ++place) {
    if (wanted(child, place)) return child;
    child = next_sibling[child];
  }
  return -1;
}

// Walks from the root to the child that carries the target's own token, until there is none or
// `max_depth` drafts are accepted. `target(slot)` gives the target's token after a slot and is
// asked at visited slots only. Writes the visited slots and the target's token at each of them;
// returns the drafts accepted.
template <class Target>
EAGLE2_HD int32_t walk_tree(const Target& target, const int64_t* draft_tokens,
                            const int32_t* first_child, const int32_t* next_sibling, int64_t slots,
                            int64_t max_depth, int32_t* accept_index, int64_t* emitted) {
  int32_t slot = 0, accepted = 0;
  int64_t token = target(0);
  accept_index[0] = 0;
  emitted[0] = token;
  while (accepted < max_depth) {
    const int32_t child =
        find_sibling(first_child[slot], next_sibling, slots,
                     [&](int32_t sibling, int64_t) { return draft_tokens[sibling] == token; });
    if (child < 0) break;
    slot = child;
    ++accepted;
    token = target(slot);
    accept_index[accepted] = slot;
    emitted[accepted] = token;
  }
  return accepted;
}

// Outputs of a request that has no tree to walk.
template <class Team>
EAGLE2_HD void accept_nothing(const Team& team, int64_t max_depth, int32_t* accept_index,
                              int32_t* accept_length, int64_t* bonus) {
  for (int64_t i = team.rank(); i <= max_depth; i += team.size()) accept_index[i] = -1;
  if (team.rank() != 0) return;
  *accept_length = -1;
  *bonus = -1;
}

// verify_tree for one request, slots >= 1: walk_tree where the target's tokens are known at every
// slot. Each slot looks for its own step, then one member follows them. `steps` is scratch for a
// number per slot.
template <class Team>
EAGLE2_HD void accept_path(const Team& team, const int64_t* target_tokens,
                           const int64_t* draft_tokens, const int32_t* first_child,
                           const int32_t* next_sibling, int64_t slots, int64_t max_depth,
                           int32_t* steps, int32_t* accept_index, int32_t* accept_length,
                           int64_t* bonus) {
  for (int64_t slot = team.rank(); slot < slots; slot += team.size()) {
    const int64_t token = target_tokens[slot];
    steps[slot] =
        find_sibling(first_child[slot], next_sibling, slots,
                     [&](int32_t sibling, int64_t) { return draft_tokens[sibling] == token; });
  }
  for (int64_t i = team.rank(); i <= max_depth; i += team.size()) {
    accept_index[i] = i == 0 ? 0 : -1;
  }
  team.sync();
  if (team.rank() != 0) return;
  int32_t slot = 0, accepted = 0;
  while (accepted < max_depth && steps[slot] >= 0) {
    slot = steps[slot];
    accept_index[++accepted] = slot;
  }
  *accept_length = accepted;
  *bonus = target_tokens[slot];
}

// A probability as it counts: NaN and negative numbers as 0, +inf as the largest finite number.
EAGLE2_HD double mass_of(float p) {
  const float largest = 0x1.fffffep127f;
  return p > 0 ? (p < largest ? p : largest) : 0;
}

EAGLE2_HD double mass_of(double p) {
  const double largest = 0x1.fffffffffffffp1023;
  return p > 0 ? (p < largest ? p : largest) : 0;
}

// Whether one of the `count` siblings from `first` on carries `token`.
EAGLE2_HD bool is_carried(int32_t first, const int32_t* next_sibling, const int64_t* draft_tokens,
                          int64_t count, int64_t token) {
  for (; count > 0; --count, first = next_sibling[first]) {
    if (draft_tokens[first] == token) return true;
  }
  return false;
}

// What the coin of a slot says to its children.
struct CoinStep {
  int32_t child;     // the one to step to, -1: none
  int32_t possible;  // the last of those looked at that has a probability of its own, -1: none
};

// The first child of `slot`, from `first` on (-1: none), whose cumulative probability exceeds
// `threshold`. `probability(slot, token)` is 0 outside the vocabulary. A token that siblings repeat
// counts once.
template <class Probability>
EAGLE2_HD CoinStep step_by_coin(const Probability& probability, double threshold, int64_t slot,
                                int32_t first, const int64_t* draft_tokens,
                                const int32_t* next_sibling, int64_t slots) {
  double cumulative = 0;
  int32_t possible = -1;
  const int32_t child =
      find_sibling(first, next_sibling, slots, [&](int32_t sibling, int64_t place) {
        const int64_t token = draft_tokens[sibling];
        const double p = probability(slot, token);
        if (!(p > 0) || is_carried(first, next_sibling, draft_tokens, place, token)) return false;
        cumulative += p;
        possible = sibling;
        return cumulative > threshold;
      });
  return CoinStep{child, possible};
}

// Walks from the root by uniform numbers: to the first child whose cumulative target probability
// exceeds the coin of the slot it hangs under. Where none does, `draw(slot, first)` draws the last
// token from what the children from `first` on (-1: none) leave of that slot's probabilities, or
// returns -1 when they leave nothing. Writes the visited slots and the last token; returns the
// drafts accepted.
template <class Probability, class Coin, class Draw>
EAGLE2_HD int32_t walk_tree_coins(const Probability& probability, const Coin& coin,
                                  const Draw& draw, const int64_t* draft_tokens,
                                  const int32_t* first_child, const int32_t* next_sibling,
                                  int64_t slots, int64_t max_depth, int32_t* accept_index,
                                  int64_t* bonus) {
  int32_t slot = 0, accepted = 0;
  accept_index[0] = 0;
  while (true) {
    const int32_t first = accepted < max_depth ? first_child[slot] : -1;
    const CoinStep step =
        step_by_coin(probability, coin(slot), slot, first, draft_tokens, next_sibling, slots);
    int32_t child = step.child;
    if (child < 0) {
      *bonus = draw(slot, first);
      if (*bonus >= 0) return accepted;
      // Only rounding kept the coin above the children's sum, so the last of them is meant. A row
      // without any probability yields the lowest id.
      child = step.possible;
      if (child < 0) {
        *bonus = 0;
        return accepted;
      }
    }
    slot = child;
    accept_index[++accepted] = slot;
  }
}

// verify_tree_coins for one request, slots >= 1: walk_tree_coins where each slot looks for its own
// step first, then the members follow them side by side and draw together. `steps` is scratch for
// one per slot.
template <class Team, class Probability, class Coin, class Draw>
EAGLE2_HD void accept_by_coins(const Team& team, const Probability& probability, const Coin& coin,
                               const Draw& draw, const int64_t* draft_tokens,
                               const int32_t* first_child, const int32_t* next_sibling,
                               int64_t slots, int64_t max_depth, CoinStep* steps,
                               int32_t* accept_index, int32_t* accept_length, int64_t* bonus) {
  for (int64_t slot = team.rank(); slot < slots; slot += team.size()) {
    steps[slot] = step_by_coin(probability, coin(slot), slot, first_child[slot], draft_tokens,
                               next_sibling, slots);
  }
  for (int64_t i = team.rank(); i <= max_depth; i += team.size()) {
    accept_index[i] = i == 0 ? 0 : -1;
  }
  team.sync();
  int32_t slot = 0, accepted = 0;
  while (true) {
    const bool leaf = accepted >= max_depth;
    int32_t child = leaf ? -1 : steps[slot].child;
    if (child < 0) {
      const int64_t token = draw(slot, leaf ? -1 : first_child[slot]);
      child = leaf || token >= 0 ? -1 : steps[slot].possible;
      if (child < 0) {
        if (team.rank() == 0) {
          *bonus = token < 0 ? 0 : token;
          *accept_length = accepted;
        }
        return;
      }
    }
    slot = child;
    ++accepted;
    if (team.rank() == 0) accept_index[accepted] = slot;
  }
}

// The tokens of the children from `first` on, as bits; `bits` [(vocab + 31) / 32] need not be
// clean.
template <class Team>
EAGLE2_HD void exclude_children(const Team& team, int32_t first, const int32_t* next_sibling,
                                const int64_t* draft_tokens, int64_t slots, int64_t vocab,
                                uint32_t* bits) {
  for (int64_t i = team.rank(); i < (vocab + 31) / 32; i += team.size()) bits[i] = 0;
  team.sync();
  if (team.rank() == 0) {
    find_sibling(first, next_sibling, slots, [&](int32_t child, int64_t) {
      const int64_t token = draft_tokens[child];
      if (token >= 0 && token < vocab) bits[token / 32] |= 1u << (token % 32);
      return false;
    });
  }
  team.sync();
}

EAGLE2_HD bool is_excluded(const uint32_t* bits, int64_t token) {
  return bits[token / 32] >> (token % 32) & 1;
}

// Drawing from a row of probabilities. They are summed in float64 in an order that does not depend
// on the team: by lanes inside a chunk, then chunk after chunk.
constexpr int64_t kDrawLanes = 32;
constexpr int64_t kDrawChunk = kDrawLanes * kDrawLanes;

// Scratch of draw_token.
struct DrawScratch {
  double* sums;    // [kDrawLanes] for each started chunk of the vocabulary
  double* shared;  // [2] the sum of all, the sum before the chunk drawn from
  int64_t* found;  // [2] the chunk drawn from, the token
};

EAGLE2_HD int64_t draw_chunks(int64_t vocab) { return (vocab + kDrawChunk - 1) / kDrawChunk; }

// The first of `count` parts whose sum is positive and takes `before`, the sum of the parts before
// it, past `threshold`; where none does, the last that is positive, or -1. `before` becomes the sum
// before that part.
template <class Part>
EAGLE2_HD int64_t find_part(const Part& part, int64_t count, double threshold, double* before) {
  double cumulative = *before;
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const double sum = part(i);
    if (!(sum > 0)) continue;
    last = i;
    *before = cumulative;
    cumulative += sum;
    if (cumulative > threshold) break;
  }
  return last;
}

// The lowest token whose cumulative probability exceeds `coin` times that of the whole row, or -1
// when there is none at all. `mass(token)` is not negative. What it returns has a positive
// probability, whatever the coin is and however the sums were rounded. All members return it.
template <class Team, class Mass>
EAGLE2_HD int64_t draw_token(const Team& team, const Mass& mass, int64_t vocab, double coin,
                             const DrawScratch& s) {
  const int64_t chunks = draw_chunks(vocab);
  for (int64_t i = team.rank(); i < chunks * kDrawLanes; i += team.size()) {
    const int64_t first = i / kDrawLanes * kDrawChunk + i % kDrawLanes;
    double sum = 0;
    if (first + kDrawChunk - kDrawLanes < vocab) {
      // Nothing to check per token, so that a GPU has many loads under way.
#if defined(__CUDA_ARCH__)
#pragma unroll 16
#endif
      for (int64_t j = 0; j < kDrawLanes; ++j) sum += mass(first + j * kDrawLanes);
    } else {
      for (int64_t token = first; token < vocab; token += kDrawLanes) sum += mass(token);
    }
    s.sums[i] = sum;
  }
  team.sync();
  for (int64_t chunk = team.rank(); chunk < chunks; chunk += team.size()) {
    double* const lanes = s.sums + chunk * kDrawLanes;
    for (int64_t lane = 1; lane < kDrawLanes; ++lane) lanes[0] += lanes[lane];
  }
  team.sync();
  if (team.rank() == 0) {
    const auto chunk_sum = [&](int64_t chunk) { return s.sums[chunk * kDrawLanes]; };
    double sum = 0, before = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += chunk_sum(chunk);
    const double threshold = coin * sum;
    s.found[0] = find_part(chunk_sum, chunks, threshold, &before);
    s.shared[0] = sum;
    s.shared[1] = before;
  }
  team.sync();
  const double sum = s.shared[0], threshold = coin * sum;
  if (!(sum > 0)) return -1;
  const int64_t chunk = s.found[0] * kDrawChunk;
  // Inside the chunk the parts are tokens in a row.
  for (int64_t part = team.rank(); part < kDrawLanes; part += team.size()) {
    const int64_t first = chunk + part * kDrawLanes;
    double part_sum = 0;
    for (int64_t token = first; token < first + kDrawLanes && token < vocab; ++token) {
      part_sum += mass(token);
    }
    s.sums[part] = part_sum;
  }
  team.sync();
  if (team.rank() == 0) {
    double before = s.shared[1];
    const auto part_sum = [&](int64_t i) { return s.sums[i]; };
    const int64_t part = find_part(part_sum, kDrawLanes, threshold, &before);
    const int64_t first = chunk + part * kDrawLanes;
    const auto one = [&](int64_t i) { return first + i < vocab ? mass(first + i) : 0.0; };
    s.found[1] = first + find_part(one, kDrawLanes, threshold, &before);
  }
  team.sync();
  return s.found[1];
}

// The sampling noise. Bits are part of the contract: every backend and the oracle repeat these
// operations in this order. There is no product followed by a sum except inside fma_once, so a
// compiler that contracts has nothing to contract.

EAGLE2_HD float fma_once(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Philox4x32-10 of key `seed` and counter (position low, position high, block, 0).
EAGLE2_HD void philox4x32(uint64_t seed, uint64_t position, uint32_t block, uint32_t out[4]) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = block, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * c0, second = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// Natural logarithm of a positive normal x: Cephes' polynomial.
EAGLE2_HD float log_poly(float x) {
  // The mantissa is brought to [sqrt(1/2), sqrt(2)). Choices are made on integers, which compilers
  // vectorise without having to give up exact floating-point semantics.
  const uint32_t bits = float_bits(x), fraction = bits & 0x007fffffu;
  const uint32_t low = fraction < 0x003504f3u;
  const float e =
      static_cast<float>(static_cast<int32_t>(bits >> 23) - 126 - static_cast<int32_t>(low));
  const float m = bits_float(fraction | (0x3f000000u + (low << 23))) - 1.0f;
  const float square = m * m;
  float y = 7.0376836292e-2f;
  y = fma_once(y, m, -1.1514610310e-1f);
  y = fma_once(y, m, 1.1676998740e-1f);
  y = fma_once(y, m, -1.2420140846e-1f);
  y = fma_once(y, m, 1.4249322787e-1f);
  y = fma_once(y, m, -1.6668057665e-1f);
  y = fma_once(y, m, 2.0000714765e-1f);
  y = fma_once(y, m, -2.4999993993e-1f);
  y = fma_once(y, m, 3.3333331174e-1f);
  y = (y * m) * square;
  y = fma_once(-2.12194440e-4f, e, y);
  y = fma_once(-0.5f, square, y);
  return fma_once(0.693359375f, e, m + y);
}

// e^x for x <= 0: Cephes' polynomial; 0 below the smallest normal result, -inf included.
EAGLE2_HD float exp_poly(float x) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = fma_once(x, 1.44269504088896341f, shifter);
  const float n = shifted - shifter;
  const float r = fma_once(n, 2.12194440e-4f, fma_once(n, -0.693359375f, x));
  float y = 1.9875691500e-4f;
  y = fma_once(y, r, 1.3981999507e-3f);
  y = fma_once(y, r, 8.3334519073e-3f);
  y = fma_once(y, r, 4.1665795894e-2f);
  y = fma_once(y, r, 1.6666665459e-1f);
  y = fma_once(y, r, 5.0000001201e-1f);
  y = fma_once(y, r * r, r) + 1.0f;
  const uint32_t exponent = (float_bits(shifted) - float_bits(shifter) + 127) << 23;
  const uint32_t tiny = (float_bits(x) & 0x7fffffffu) > 0x42aeac4fu;  // 87.3365
  return bits_float(float_bits(y * bits_float(exponent)) & (tiny - 1));
}

// G = -log(-log1p(-v)) with v = min((word + 0.5) * 2^-32, 1 - 2^-24).
EAGLE2_HD float gumbel(uint32_t word) {
  const float scaled = static_cast<float>(static_cast<double>(word) + 0.5) * 0x1p-32f;
  const uint32_t bits = float_bits(scaled), largest = 0x3f7fffffu;
  const float v = bits_float(bits < largest ? bits : largest);
  const float u = 1.0f - v;
  const float lost = (1.0f - u) - v;  // log1p(-v) = log(u) + log(1 + lost / u)
  return -log_poly(-(log_poly(u) + lost / u));
}

EAGLE2_HD float gumbel_noise(uint64_t seed, uint64_t position, uint32_t token) {
  uint32_t words[4];
  philox4x32(seed, position, token / 4, words);
  return gumbel(words[token % 4]);
}

}  // namespace eagle2
