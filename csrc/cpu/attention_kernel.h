// The attention kernel, compiled once per level of isa.h: a source of each includes this file
// inside a namespace of its own with the level's instructions switched on and EAGLE2_VECTOR_BYTES
// set. No include guard, no includes.
//
// One task is (request, KV head, range of nodes, range of chunks). Its rows are node-major, then
// the query heads of the group. C is the type of the caches (that of q and out, or float8), A that
// of the arithmetic. Keys are taken in position order; chunk c holds positions c * chunk and
// following:
//
//     prefix                                   | own path
//     [ chunk 0 ][ chunk 1 ] ... [ chunk c ....|.........][ chunk c + 1 ]
//
// Every row sees the prefix at the same positions, so a prefix chunk is loaded once (K transposed,
// both converted to the accumulation type) and used by all rows. A row's path (the ancestors of its
// node in order of depth, itself last) follows at positions prefix_len, prefix_len + 1, ...: it
// completes the prefix's last chunk and may go on behind it. A causal chain has one path for all
// rows and is treated as more prefix with an end per row.
//
// Why a row gets the same bits whatever stands beside it: a score is one chain of multiply-adds
// over the head dim, an output element one chain over the chunk's keys in position order, and
// vector lanes hold different keys or different elements, so that blocking, batching and order of
// storage cannot touch a chain. The only sum across lanes (the softmax denominator of a chunk)
// assigns lanes by position. Chunks merge in ascending order, one by one, in the task that made
// them or, where several tasks share the keys, in merge_parts.

namespace {

using torch::headeronly::ScalarType;

#include "attention_products.h"
#include "attention_views.h"

// In place on whole vectors: scores of pairs are scaled (queries of other forms came scaled); with
// a cap they are then divided by it and leave as cap * tanh(score), in units of log2. An infinite
// score becomes NaN: a row that sees a non-finite key must show it, and -inf would drop the key in
// silence. Returns the largest, NaN never is.
template <typename A, int Pack>
A cap_scores(A* scores, int64_t begin, int64_t end, A scale, A cap) {
  constexpr int L = kLanes<A>;
  constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();
  if (Pack == 1 && !(cap > 0)) {
    auto most = broadcast<A>(kMinusInfinity);
    typename Vector<A>::type odd = {};
    for (int64_t j = begin; j < end; j += L) {
      const auto x = load(scores + j);
      odd = odd + x * A(0);
      most = larger(x, most);
    }
    if (!any_nan(odd)) return max_lanes<A>(most);
  }
  auto most = broadcast<A>(kMinusInfinity);
  for (int64_t j = begin; j < end; j += L) {
    auto x = load(scores + j);
    if constexpr (Pack == 2) x = x * scale;
    x = x + x * A(0);
    if (cap > 0) x = hyperbolic_tangent(x) * cap;
    store(scores + j, x);
    most = larger(x, most);
  }
  return max_lanes<A>(most);
}

template <typename A>
A largest(const A* scores, int64_t begin, int64_t end) {
  auto most = broadcast<A>(-std::numeric_limits<A>::infinity());
  for (int64_t j = begin; j < end; j += kLanes<A>) most = larger(load(scores + j), most);
  return max_lanes<A>(most);
}

// Scores to weights 2^(score - peak) on whole vectors, a word of them for a word of keys; the
// caller has set what the row does not see to -inf. `weights` may be `scores`. Returns the weights'
// sum.
template <typename A, int Pack>
A exponentiate(const A* scores, int64_t begin, int64_t end, A* weights, A peak) {
  constexpr int L = kLanes<A>;
  const auto shift = broadcast<A>(peak);
  typename Vector<A>::type sum = {};
  for (int64_t j = begin; j < end; j += L) {
    const auto weight = exp2_nonpositive(load(scores + j) - shift);
    sum = sum + weight;
#ifdef EAGLE2_BF16_PAIRS
    if constexpr (Pack == 2) {
      const __m256bh words = _mm512_cvtneps_pbh((__m512)weight);
      __builtin_memcpy(weights + j / 2, &words, sizeof words);
      continue;
    }
#endif
    store(weights + j, weight);
  }
  return sum_lanes<A>(sum);
}

// The running softmax of a row takes in one part. The larger of the two peaks keeps its weight of
// exactly 1, so each update is a single multiply-add. A softmax of nothing has a total of 0.
template <typename A>
void merge_part(A peak, A total, const A* sum, int64_t dim, A* row_peak, A* row_total, A* row_sum) {
  if (*row_total == 0) {
    std::copy(sum, sum + dim, row_sum);
    *row_peak = peak;
    *row_total = total;
  } else if (peak > *row_peak) {
    const A decay = exp2_nonpositive_scalar<A>(*row_peak - peak);
    for (int64_t d = 0; d < dim; d += kLanes<A>) {
      store(row_sum + d, load(sum + d) + load(row_sum + d) * decay);
    }
    *row_total = total + *row_total * decay;
    *row_peak = peak;
  } else {
    const A decay = exp2_nonpositive_scalar<A>(peak - *row_peak);
    for (int64_t d = 0; d < dim; d += kLanes<A>) {
      store(row_sum + d, load(row_sum + d) + load(sum + d) * decay);
    }
    *row_total = *row_total + total * decay;
  }
}

// Rows whose running softmax is kept while the keys go by once.
constexpr int64_t kTileRows = 256;

// Tree slots whose scores are computed for every row, whether it sees them or not.
constexpr int64_t kFewSlots = 64;

// Logits are kept in units of log2, which saves the exponential a multiplication.
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// Query rows lie at `offset` in q, output rows at `offset` in out.
template <typename T, typename A>
void load_query_as(const AttentionParams& p, int64_t offset, A scale, A* to) {
  const T* from = static_cast<const T*>(p.q) + offset;
  for (int64_t d = 0; d < p.k_dim; ++d) to[d] = static_cast<A>(from[d]) * scale;
}

template <typename T, typename A>
void store_output_as(const AttentionParams& p, int64_t offset, const A* sum, A share) {
  T* to = static_cast<T*>(p.out) + offset;
  for (int64_t d = 0; d < p.v_dim; ++d) to[d] = static_cast<T>(sum[d] * share);
}

// The type of q and out is the caches', but beside a float8 cache. Pairs stay as they are: their
// scores are scaled.
template <typename C, typename A>
void load_query(const AttentionParams& p, int64_t offset, A scale, A* to) {
  if constexpr (kPack<C> == 2) {
    std::fill(to + p.k_dim / 2, to + words_of<C>(p.k_dim), A(0));  // both halves of the last word
    __builtin_memcpy(to, static_cast<const C*>(p.q) + offset, p.k_dim * sizeof(C));
  } else if constexpr (!kFloat8<C>) {
    load_query_as<C>(p, offset, scale, to);
  } else if (p.q_type == ScalarType::Float) {
    load_query_as<float>(p, offset, scale, to);
  } else if (p.q_type == ScalarType::Half) {
    load_query_as<c10::Half>(p, offset, scale, to);
  } else {
    load_query_as<c10::BFloat16>(p, offset, scale, to);
  }
}

template <typename C, typename A>
void store_output(const AttentionParams& p, int64_t offset, const A* sum, A share) {
  if constexpr (!kFloat8<C>) {
    store_output_as<C>(p, offset, sum, share);
  } else if (p.q_type == ScalarType::Float) {
    store_output_as<float>(p, offset, sum, share);
  } else if (p.q_type == ScalarType::Half) {
    store_output_as<c10::Half>(p, offset, sum, share);
  } else {
    store_output_as<c10::BFloat16>(p, offset, sum, share);
  }
}

// The sink joins the softmax, then the row is normalised and stored. A row that saw nothing has a
// `sum` of zeros.
template <typename C, typename A>
void store_row(const AttentionParams& p, const Request& request, int64_t node, int64_t head, A peak,
               A total, const A* sum) {
  const bool empty = total == 0;
  A weight = 1;
  if (p.sinks != nullptr) {
    const A sink = static_cast<A>(p.sinks[head] * kLog2E);
    if (empty) {
      peak = sink;
      total = 1;
    } else if (sink > peak) {
      weight = exp2_nonpositive_scalar<A>(peak - sink);
      total = 1 + total * weight;
      peak = sink;
    } else {
      total = total + exp2_nonpositive_scalar<A>(sink - peak);
    }
  }
  const int64_t row = request.first_row + node;
  store_output<C>(p,
                  request.index * p.out_stride[0] + row * p.out_stride[1] + head * p.out_stride[2],
                  sum, empty ? A(0) : weight / total);
  if (p.lse == nullptr) return;
  const bool nothing = empty && p.sinks == nullptr;
  p.lse[request.index * p.lse_stride[0] + row * p.lse_stride[1] + head * p.lse_stride[2]] =
      nothing ? -std::numeric_limits<float>::infinity()
              : static_cast<float>((peak + std::log2(total)) * static_cast<A>(kLn2));
}

// The softmax of a row over one chunk, where several tasks share the keys: peak, total, sum.
template <typename A>
inline A* part_of(const AttentionParams& p, int64_t request, int64_t kv_head, int64_t row,
                  int64_t chunk) {
  const int64_t size = part_size(p.v_dim, kLanes<A>);
  const int64_t rows = std::max(p.nodes, p.padding_rows) * p.group;
  const int64_t at = ((request * p.kv_heads + kv_head) * rows + row) * p.chunks + chunk;
  return static_cast<A*>(p.partial) + at * size;
}

template <typename C, typename A>
void attend(const AttentionParams& p, const AttentionTask& task) {
  constexpr int L = kLanes<A>, Pack = kPack<C>, Unit = kUnit<C>;
  constexpr int64_t kWhole = std::max(L, Unit);  // keys whose weights are made together
  constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();
  // KV heads of the same keys follow each other: their rows share pages and often lines.
  const int64_t kv_head = task.index % p.kv_heads;
  const int64_t part = task.index / p.kv_heads % p.parts;
  const Request request = request_of(p, task.index / p.kv_heads / p.parts);
  const int64_t part_begin = p.chunks * part / p.parts;
  const int64_t part_end = p.chunks * (part + 1) / p.parts;
  const int64_t most = std::max(p.nodes, p.padding_rows);
  const int64_t node_begin = request.rows * task.node_begin / most;
  const int64_t node_end = request.rows * task.node_end / most;
  if (node_begin == node_end) return;

  const int64_t k_dim = p.k_dim, v_dim = p.v_dim, group = p.group, chunk = p.chunk;
  const int64_t words = words_of<C>(k_dim);  // of a query
  const int64_t vectors = (v_dim + L - 1) / L, row_pitch = vectors * L;
  const int64_t pitch = round_up(chunk, kWhole), key_vectors = pitch / L;
  const int64_t scores_pitch = pitch + L;              // a path's scores begin anywhere
  const int64_t steps = round_up(chunk, Unit) / Pack;  // words of values
  const int64_t tile_nodes =
      std::min(std::max<int64_t>(1, kTileRows / group), node_end - node_begin);
  const int64_t tile_rows = tile_nodes * group;
  const auto panels = [](int64_t count) {
    return (count + kColumns - 1) / kColumns * kColumns * L;
  };

  const int64_t prefix = request.prefix;
  const int64_t slots = std::min(request.tree_len, p.capacity - prefix);
  // A chain whose positions are its slots needs no path: it is more prefix, with an end per row.
  const bool chain = p.mask == nullptr && (p.window == 0 || request.depths == nullptr);
  const Reader<C, A> read_k = {p.k_scale}, read_v = {p.v_scale};

  [[maybe_unused]] const TileScope tiles;
  Arena arena;
  A* q = arena.take<A>(tile_rows * words);
  A* row_peak = arena.take<A>(tile_rows);
  A* row_total = arena.take<A>(tile_rows);
  A* row_sum = arena.take<A>(tile_rows * row_pitch);
  A* columns = arena.take<A>(words * panels(key_vectors));
  A* path_columns = arena.take<A>(words * panels(key_vectors));
  A* values = arena.take<A>(steps * panels(vectors));
  A* path_values = arena.take<A>((steps + kDepth) * panels(vectors));
  A* scores = arena.take<A>(kRows * scores_pitch);
  A* weights = Pack == 1 ? scores : arena.take<A>(kRows * scores_pitch);
  A* sum = arena.take<A>(kRows * row_pitch);
  C* zero = arena.take<C>(std::max(k_dim, v_dim));
  // Of this chunk and of the next, which is fetched into the cache meanwhile. Behind the last lie
  // other rows of the cache: whole vectors of keys are scored, and rows ahead fetched, from them.
  const int64_t row_slots = pitch + L;
  const C** k_rows = arena.take<const C*>(4 * row_slots);
  const C **v_rows = k_rows + row_slots, **next_k = v_rows + row_slots;
  const C** next_v = next_k + row_slots;
  const C** path_k = arena.take<const C*>(pitch);
  bool* valued = arena.take<bool>(steps / kDepth + 1);
  NodeView* view = arena.take<NodeView>(tile_nodes);
  int32_t* node_of = arena.take<int32_t>(tile_rows);
  std::fill(zero, zero + std::max(k_dim, v_dim), static_cast<C>(0.0f));
  std::fill(k_rows, k_rows + 4 * row_slots, zero);

  // A path's scores are chosen from those of all slots where these are few, otherwise each node's
  // are computed alone.
  const int64_t slot_vectors = (slots + L - 1) / L, slots_pitch = slot_vectors * L;
  const bool few_slots = !chain && slots <= kFewSlots && slot_vectors <= node_end - node_begin;
  const C **k_slots = nullptr, **v_slots = nullptr;
  A *slot_columns = nullptr, *slot_scores = nullptr;
  if (!chain) {
    k_slots = arena.take<const C*>(slots_pitch);
    v_slots = arena.take<const C*>(slots);
    cache_rows<C>(p, p.k, p.k_stride, request.index, kv_head, prefix, slots, zero, k_slots);
    cache_rows<C>(p, p.v, p.v_stride, request.index, kv_head, prefix, slots, zero, v_slots);
  }
  if (few_slots) {
    std::fill(k_slots + slots, k_slots + slots_pitch, zero);
    slot_columns = arena.take<A>(words * panels(slot_vectors));
    slot_scores = arena.take<A>(kRows * slots_pitch);
    load_transposed<C, A>(read_k, k_slots, slots, k_dim, 0, slot_columns);
  }

  // Divided by the cap where there is one, see cap_scores.
  const A scale = static_cast<A>(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E);
  const A cap = static_cast<A>(p.softcap * kLog2E);

  static thread_local std::vector<int32_t> depths, paths, rest;
  if (!chain && p.mask != nullptr) slot_depths(p, request, slots, depths);

  for (int64_t tile = node_begin; tile < node_end; tile += tile_nodes) {
    const int64_t nodes = std::min(tile_nodes, node_end - tile);
    const int64_t rows = nodes * group;

    paths.clear();
    int64_t first_key = INT64_MAX, shared_end = 0, last_key = 0;
    for (int64_t n = 0; n < nodes; ++n) {
      view[n] = view_node(p, request, tile + n, slots, chain, depths, paths, rest);
      const NodeView& see = view[n];
      if (see.end > 0) first_key = std::min(first_key, see.begin);
      if (see.path_count > 0) first_key = std::min(first_key, prefix);
      shared_end = std::max(shared_end, see.end);
      last_key = std::max({last_key, see.end, see.path_count > 0 ? prefix + see.path_count : 0});
    }

    // Queries, scaled; empty running softmax.
    for (int64_t r = 0; r < rows; ++r) {
      node_of[r] = static_cast<int32_t>(r / group);
      load_query<C>(p,
                    request.index * p.q_stride[0] +
                        (request.first_row + tile + node_of[r]) * p.q_stride[1] +
                        (kv_head * group + r % group) * p.q_stride[2],
                    scale, q + r * words);
      row_peak[r] = kMinusInfinity;
      row_total[r] = 0;
      if (p.parts == 1) {
        std::fill(row_sum + r * row_pitch, row_sum + (r + 1) * row_pitch, A(0));
        continue;
      }
      for (int64_t c = part_begin; c < part_end; ++c) {
        part_of<A>(p, request.index, kv_head, tile * group + r, c)[1] = 0;
      }
    }

    const bool in_place = !kTiles && v_dim % (Pack * L) == 0 &&
                          ((std::is_same_v<C, A> && rows <= 64) || rows <= kRows);
    const int64_t first_chunk = first_key == INT64_MAX ? 0 : first_key / chunk;
    const int64_t last_chunk = (last_key + chunk - 1) / chunk;
    const auto shared_of = [&](int64_t c) {
      return std::clamp<int64_t>(shared_end - c * chunk, 0, chunk);
    };
    const auto find_rows = [&](int64_t c, int64_t head, const C** to_k, const C** to_v) {
      const int64_t shared = shared_of(c);
      const int64_t skip = std::clamp<int64_t>(first_key - c * chunk, 0, shared) / L * L;
      cache_rows<C>(p, p.k, p.k_stride, request.index, head, c * chunk + skip, shared - skip, zero,
                    to_k + skip);
      cache_rows<C>(p, p.v, p.v_stride, request.index, head, c * chunk + skip, shared - skip, zero,
                    to_v + skip);
    };
    int64_t found = -1;  // the chunk whose rows next_k and next_v name
    const int64_t chunk_begin = std::max(first_chunk, part_begin);
    const int64_t chunk_end = std::min(last_chunk, part_end);

    for (int64_t c = chunk_begin; c < chunk_end; ++c) {
      const int64_t start = c * chunk;
      const int64_t shared = shared_of(c);
      const int64_t skip = std::clamp<int64_t>(first_key - start, 0, shared) / L * L;
      if (found != c) find_rows(c, kv_head, next_k, next_v);
      std::swap(k_rows, next_k);
      std::swap(v_rows, next_v);
      // The last chunk of a task fetches the first of the next task: of the next head or, behind
      // the last head, of the next part.
      const bool one_block = rows <= kRows;
      const bool last = c + 1 == chunk_end;
      const bool next_head = last && kv_head + 1 < p.kv_heads;
      const bool other = next_head || (last && p.parts > 1);
      found = next_head ? chunk_begin : c + 1;
      const int64_t ahead = last && !other ? 0 : shared_of(found);
      if (ahead > 0) {
        find_rows(found, next_head ? kv_head + 1 : other ? 0 : kv_head, next_k, next_v);
      }
      if (other) found = -1;
      if (shared > skip) {
        const int64_t count = shared - skip;
        if (!one_block || kTiles) {
          load_transposed<C, A>(read_k, k_rows + skip, count, k_dim, skip / L, columns,
                                one_block || c == chunk_begin ? v_rows + skip : nullptr, v_dim);
        }
        if (!in_place) {
          for (int64_t i = skip / Unit * kDepth; i < shared / Unit * kDepth; ++i) {
            load_value<C, A>(read_v, v_rows + i * Pack, v_dim, i, steps, values);
            if (kTiles && one_block && ahead > 0) prefetch_rows(next_k + i * Pack, Pack, k_dim);
          }
        }
      }

      RowsAhead<C> fetch{next_k, next_v, std::max(k_dim, v_dim), 0, 0};
      int64_t loaded_node = -1, valued_node = -1;  // whose path's keys and values are at hand
      for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
        const int count = static_cast<int>(std::min<int64_t>(kRows, rows - r0));
        if (!one_block) fetch.end = ahead * std::min(r0 + kRows, rows) / rows;
        int64_t begin[kRows], end[kRows];  // shared keys of this chunk each row sees
        int64_t low = chunk, high = 0;
        for (int r = 0; r < count; ++r) {
          const NodeView& see = view[node_of[r0 + r]];
          begin[r] = std::clamp<int64_t>(see.begin - start, 0, chunk);
          end[r] = std::clamp<int64_t>(see.end - start, 0, chunk);
          if (begin[r] >= end[r]) begin[r] = end[r] = 0;
          if (end[r] > 0) low = std::min(low, begin[r]);
          high = std::max(high, end[r]);
        }
        if (low < high) {
          const int64_t from = low / L * L;
          const bool direct = one_block && !kTiles;
          if constexpr (!kTiles) {
            if (direct) {
              score_in_place<C, A>(count, read_k, q, k_dim, k_rows + from, high - from,
                                   scores + from, scores_pitch,
                                   v_dim >= k_dim ? v_rows + from : nullptr);
            }
          }
          if (!direct) {
            score<A, Pack>(count, q + r0 * words, words, columns, from / L, (high + L - 1) / L,
                           scores, scores_pitch, fetch);
          }
        }
        fetch.finish();

        // Positions of the path inside this chunk: [path_begin, path_end), per row.
        int64_t path_begin[kRows], path_end[kRows];
        NothingAhead nothing;
        if (few_slots && last_key > std::max(start, prefix) && start + chunk > prefix) {
          int64_t last = 0;  // slot that a row sees
          for (int r = 0; r < count; ++r) last = std::max(last, view[node_of[r0 + r]].last_slot);
          score<A, Pack>(count, q + r0 * words, words, slot_columns, 0, last / L + 1, slot_scores,
                         slots_pitch, nothing);
        }
        for (int r = 0; r < count; ++r) {
          const int64_t n = node_of[r0 + r];
          const NodeView& see = view[n];
          path_begin[r] = std::clamp<int64_t>(prefix - start, 0, chunk);
          path_end[r] = see.path_count == 0
                            ? path_begin[r]
                            : std::clamp<int64_t>(prefix + see.path_count - start, 0, chunk);
          const int64_t length = path_end[r] - path_begin[r];
          if (length <= 0) continue;
          const int32_t* path = paths.data() + see.path + (start + path_begin[r] - prefix);
          if (few_slots) {
            A* to = scores + r * scores_pitch + path_begin[r];
            const A* from = slot_scores + r * slots_pitch;
            for (int64_t j = 0; j < length; ++j) to[j] = from[path[j] < 0 ? ~path[j] : path[j]];
            continue;
          }
          if (n != loaded_node) {
            for (int64_t j = 0; j < length; ++j) {
              path_k[j] = k_slots[path[j] < 0 ? ~path[j] : path[j]];
            }
            for (int64_t j = length; j % L != 0; ++j) path_k[j] = zero;
            load_transposed<C, A>(read_k, path_k, length, k_dim, 0, path_columns);
            loaded_node = n;
          }
          // The rows of one node follow each other and are scored together.
          const int same = static_cast<int>(std::min<int64_t>(count - r, (n + 1) * group - r0 - r));
          score<A, Pack>(same, q + (r0 + r) * words, words, path_columns, 0, (length + L - 1) / L,
                         scores + r * scores_pitch + path_begin[r], scores_pitch, nothing);
          for (int i = 1; i < same; ++i) {
            path_begin[r + i] = path_begin[r];
            path_end[r + i] = path_end[r];
          }
          r += same - 1;
        }

        A peak[kRows], total[kRows];
        bool sees[kRows];
        int64_t unit_from[kRows], unit_to[kRows];
        for (int r = 0; r < count; ++r) {
          const bool path = path_end[r] > path_begin[r];
          sees[r] = path || begin[r] < end[r];
          if (!sees[r]) continue;
          const int64_t from = begin[r] < end[r] ? begin[r] : path_begin[r];
          const int64_t to = path ? path_end[r] : end[r];
          const int64_t whole_from = from / L * L, whole_to = round_up(to, L);
          A* row = scores + r * scores_pitch;
          peak[r] = cap_scores<A, Pack>(row, whole_from, whole_to, scale, cap);
          const bool masked = path || from > whole_from || to < whole_to;
          unit_from[r] = from / kWhole * kWhole;
          unit_to[r] = round_up(to, kWhole);
          std::fill(row + unit_from[r], row + from, kMinusInfinity);
          std::fill(row + to, row + unit_to[r], kMinusInfinity);
          if (path) {
            const NodeView& see = view[node_of[r0 + r]];
            bool any = begin[r] < end[r];
            for (int64_t j = path_begin[r]; j < path_end[r]; ++j) {
              if (paths[see.path + start + j - prefix] < 0) {
                row[j] = kMinusInfinity;
              } else {
                any = true;
              }
            }
            sees[r] = any;
            if (!any) continue;
          }
          if (masked) peak[r] = largest<A>(row, whole_from, whole_to);
        }
        for (int r = 0; r < count; ++r) {
          if (!sees[r]) continue;
          total[r] = exponentiate<A, Pack>(scores + r * scores_pitch, unit_from[r], unit_to[r],
                                           weights + r * scores_pitch, peak[r]);
        }

        // Words of shared keys in the units that a row sees whole; a unit it sees some keys of is
        // completed by rows of zeros, or by the first keys of its path.
        std::fill(sum, sum + count * row_pitch, A(0));
        int64_t word_begin[kRows], word_end[kRows];
        const auto add_unit = [&](int r, int64_t unit) {
          const C* keys[Unit];
          for (int j = 0; j < Unit; ++j) {
            const int64_t key = unit * Unit + j;
            keys[j] = begin[r] <= key && key < end[r] ? v_rows[key] : zero;
          }
          const int64_t all = steps + kDepth;
          for (int i = 0; i < kDepth; ++i) {
            load_value<C, A>(read_v, keys + i * Pack, v_dim, steps + i, all, path_values);
          }
          accumulate<A, Pack>(1, weights + r * scores_pitch + unit * kDepth - steps, scores_pitch,
                              Panels<A>{path_values, all}, steps, all, vectors, sum + r * row_pitch,
                              row_pitch);
        };
        for (int r = 0; r < count; ++r) {
          const bool path = path_end[r] > path_begin[r];
          word_begin[r] = (begin[r] + Unit - 1) / Unit * kDepth;
          word_end[r] = std::max(word_begin[r], end[r] / Unit * kDepth);
          if (begin[r] % Unit != 0 && !(path && begin[r] / Unit == path_begin[r] / Unit)) {
            add_unit(r, begin[r] / Unit);
          }
        }
        if constexpr (!kTiles) {
          if (in_place) {
            const auto add_rows = [&](auto rows) {
              accumulate_shared<A, Pack>(count, weights, scores_pitch, rows, word_begin, word_end,
                                         vectors, sum, row_pitch);
            };
            if (one_block && ahead > 0 && k_dim >= v_dim) {
              add_rows(RowsInPlace<C, A, true>{v_rows, read_v, next_k});
            } else {
              add_rows(RowsInPlace<C, A, false>{v_rows, read_v, nullptr});
            }
          }
        }
        if (!in_place) {
          accumulate_shared<A, Pack>(count, weights, scores_pitch, Panels<A>{values, steps},
                                     word_begin, word_end, vectors, sum, row_pitch);
        }
        for (int r = 0; r < count;) {
          const int64_t n = node_of[r0 + r];
          const int same = static_cast<int>(std::min<int64_t>(count - r, (n + 1) * group - r0 - r));
          if (path_end[r] <= path_begin[r]) {
            for (; r < count && node_of[r0 + r] == n; ++r) {
              const bool added = begin[r] % Unit != 0 && begin[r] / Unit == end[r] / Unit;
              if (end[r] % Unit != 0 && !added) add_unit(r, end[r] / Unit);
            }
            continue;
          }
          const int32_t* path = paths.data() + view[n].path + (start - prefix);
          const int64_t first = path_begin[r] / Unit, last = (path_end[r] + Unit - 1) / Unit;
          if (n != valued_node) {
            // The value at a position, null where the node does not see it.
            const auto seen = [&](int64_t j) -> const C* {
              if (j >= path_end[r]) return nullptr;
              if (j >= path_begin[r]) return path[j] < 0 ? nullptr : v_slots[path[j]];
              return begin[r] <= j && j < end[r] ? v_rows[j] : nullptr;
            };
            for (int64_t i = first; i < last; ++i) {
              const C* keys[Unit];
              bool any = false;
              for (int j = 0; j < Unit; ++j) {
                const C* row = seen(i * Unit + j);
                any |= row != nullptr;
                keys[j] = row == nullptr ? zero : row;
              }
              valued[i - first] = any;
              for (int j = 0; any && j < kDepth; ++j) {
                load_value<C, A>(read_v, keys + j * Pack, v_dim, (i - first) * kDepth + j,
                                 steps + kDepth, path_values);
              }
            }
            valued_node = n;
          }
          for (int64_t i = 0, stop; i < last - first; i = stop + 1) {
            for (stop = i; stop < last - first && valued[stop];) ++stop;
            accumulate<A, Pack>(same, weights + r * scores_pitch + first * kDepth, scores_pitch,
                                Panels<A>{path_values, steps + kDepth}, i * kDepth, stop * kDepth,
                                vectors, sum + r * row_pitch, row_pitch);
          }
          r += same;
        }

        for (int r = 0; r < count; ++r) {
          if (!sees[r]) continue;
          if (p.parts == 1) {
            merge_part<A>(peak[r], total[r], sum + r * row_pitch, row_pitch, &row_peak[r0 + r],
                          &row_total[r0 + r], row_sum + (r0 + r) * row_pitch);
            continue;
          }
          A* to = part_of<A>(p, request.index, kv_head, tile * group + r0 + r, c);
          to[0] = peak[r];
          to[1] = total[r];
          std::copy(sum + r * row_pitch, sum + (r + 1) * row_pitch, to + L);
        }
      }
    }

    if (p.parts > 1) continue;
    for (int64_t r = 0; r < rows; ++r) {
      store_row<C>(p, request, tile + node_of[r], kv_head * group + r % group, row_peak[r],
                   row_total[r], row_sum + r * row_pitch);
    }
  }
}

// Merges and stores the rows of one (request, KV head, node) whose keys several tasks shared.
template <typename C, typename A>
void merge_parts(const AttentionParams& p, int64_t task) {
  constexpr int L = kLanes<A>;
  const int64_t nodes = std::max(p.nodes, p.padding_rows);
  const int64_t node = task % nodes, kv_head = task / nodes % p.kv_heads;
  const Request request = request_of(p, task / nodes / p.kv_heads);
  if (node >= request.rows) return;
  const int64_t row_pitch = (p.v_dim + L - 1) / L * L;
  Arena arena;
  A* sum = arena.take<A>(row_pitch);
  for (int64_t g = 0; g < p.group; ++g) {
    A peak = -std::numeric_limits<A>::infinity(), total = 0;
    std::fill(sum, sum + row_pitch, A(0));
    for (int64_t c = 0; c < p.chunks; ++c) {
      const A* part = part_of<A>(p, request.index, kv_head, node * p.group + g, c);
      if (part[1] != 0) merge_part<A>(part[0], part[1], part + L, row_pitch, &peak, &total, sum);
    }
    store_row<C>(p, request, node, kv_head * p.group + g, peak, total, sum);
  }
}

template <typename C, typename A>
constexpr AttentionKernel kKernel = {attend<C, A>, merge_parts<C, A>, sizeof(A), kLanes<A>};

}  // namespace

#ifdef EAGLE2_BF16_PAIRS
extern const AttentionKernel kBFloat16 = kKernel<c10::BFloat16, float>;
#else
extern const AttentionKernels kAttention = {
    kKernel<double, double>,
    kKernel<float, float>,
    kKernel<c10::Half, float>,
    kKernel<c10::BFloat16, float>,
    kKernel<c10::Float8_e4m3fn, float>,
};
#endif
