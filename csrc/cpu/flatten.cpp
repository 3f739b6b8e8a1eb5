// build_tree, build_tree_from_marginals, flatten_tree, retrieve_indices and the mask packing:
// tree.h run by a team of one per request, requests in parallel.
#include <algorithm>
#include <tuple>

#include "../tree.h"
#include "args.h"

namespace eagle2 {
namespace {

// Below this many candidates or slots a second thread costs more than it saves.
int64_t grain_for(int64_t work_per_request) {
  return std::max<int64_t>(1, 4096 / std::max<int64_t>(1, work_per_request));
}

// The scratch of tree.h's build_tree, kept per thread.
class ScratchBuffers {
 public:
  BuildScratch prepare(int32_t m, int32_t max_nodes) {
    floats_.resize(2 * static_cast<size_t>(m));
    ints_.resize(4 * static_cast<size_t>(m) + 256 + 4);
    keys_.resize(static_cast<size_t>(sort_capacity(max_nodes)));
    float* f = floats_.data();
    int32_t* i = ints_.data();
    return BuildScratch{{f, f + m},   {i, i + m}, {i + 2 * m, i + 3 * m},
                        keys_.data(), i + 4 * m,  i + 4 * m + 256};
  }

 private:
  std::vector<float> floats_;
  std::vector<int32_t> ints_;
  std::vector<uint64_t> keys_;
};

// The outputs of a request's tree, checked; `request` of the result gives each its place.
TreeOut tree_out(int64_t batch, int64_t n, const Tensor& draft_tokens, const Tensor& parents,
                 const Tensor& depths, const Tensor& position_ids, const Tensor& scores,
                 const Tensor& first_child, const Tensor& next_sibling, const Tensor& tree_mask,
                 const Tensor& num_nodes) {
  return TreeOut{output<int64_t, 2>(draft_tokens, "draft_tokens", {batch, n}),
                 output<int32_t, 2>(parents, "parents", {batch, n}),
                 output<int32_t, 2>(depths, "depths", {batch, n}),
                 output<int64_t, 2>(position_ids, "position_ids", {batch, n}),
                 output<float, 2>(scores, "scores", {batch, n}),
                 output<int32_t, 2>(first_child, "first_child", {batch, n}),
                 output<int32_t, 2>(next_sibling, "next_sibling", {batch, n}),
                 reinterpret_cast<uint64_t*>(
                     output<int64_t, 3>(tree_mask, "tree_mask", {batch, n, mask_words(n)})),
                 output<int32_t, 1>(num_nodes, "num_nodes", {batch})};
}

using Tree = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tree allocate_tree(int64_t batch, int64_t n) {
  return {allocate<int64_t>({batch, n}), allocate<int32_t>({batch, n}),
          allocate<int32_t>({batch, n}), allocate<int64_t>({batch, n}),
          allocate<float>({batch, n}),   allocate<int32_t>({batch, n}),
          allocate<int32_t>({batch, n}), allocate<int64_t>({batch, n, mask_words(n)}),
          allocate<int32_t>({batch})};
}

void build_tree_out(const Tensor& root_tokens, const Tensor& prefix_lens,
                    const Tensor& candidate_tokens, const Tensor& candidate_scores,
                    const Tensor& candidate_parents, int64_t max_nodes,
                    const std::optional<Tensor>& limits, const Tensor& draft_tokens,
                    const Tensor& parents, const Tensor& depths, const Tensor& position_ids,
                    const Tensor& scores, const Tensor& first_child, const Tensor& next_sibling,
                    const Tensor& tree_mask, const Tensor& num_nodes) {
  const Packed<int64_t, 1> roots(root_tokens, "root_tokens", {-1});
  const int64_t batch = roots.size(0), n = max_nodes;
  if (n < 1 || n > INT32_MAX / 2) fail("max_nodes: expected at least 1, got ", n);
  const Packed<int32_t, 1> prefix(prefix_lens, "prefix_lens", {batch});
  const Packed<int64_t, 2> tokens(candidate_tokens, "candidate_tokens", {batch, -1});
  const int64_t m = tokens.size(1);
  if (m > INT32_MAX / 2) fail("candidate_tokens: expected fewer than 2^30 candidates, got ", m);
  const Packed<float, 2> own(candidate_scores, "candidate_scores", {batch, m});
  const Packed<int32_t, 2> up(candidate_parents, "candidate_parents", {batch, m});
  const auto bounds = packed<int32_t, 2>(limits, "limits", {batch, 2});
  const TreeOut out = tree_out(batch, n, draft_tokens, parents, depths, position_ids, scores,
                               first_child, next_sibling, tree_mask, num_nodes);

  parallel_for(batch, grain_for(m + n), [&](int64_t begin, int64_t end) {
    thread_local ScratchBuffers buffers;
    const BuildScratch scratch = buffers.prepare(static_cast<int32_t>(m), static_cast<int32_t>(n));
    for (int64_t b = begin; b < end; ++b) {
      const Candidates candidates{tokens.row(b), own.row(b), up.row(b), static_cast<int32_t>(m)};
      build_tree(SoloTeam{}, candidates, roots[b], prefix[b], static_cast<int32_t>(n),
                 bounds ? bounds->row(b)[0] : n, bounds ? bounds->row(b)[1] : m, scratch,
                 out.request(b, n));
    }
  });
}

Tree build_tree_op(const Tensor& root_tokens, const Tensor& prefix_lens,
                   const Tensor& candidate_tokens, const Tensor& candidate_scores,
                   const Tensor& candidate_parents, int64_t max_nodes,
                   const std::optional<Tensor>& limits) {
  if (max_nodes < 1) fail("max_nodes: expected at least 1, got ", max_nodes);
  Tree results = allocate_tree(root_tokens.numel(), max_nodes);
  std::apply(
      [&](const auto&... outs) {
        build_tree_out(root_tokens, prefix_lens, candidate_tokens, candidate_scores,
                       candidate_parents, max_nodes, limits, outs...);
      },
      results);
  return results;
}

// The scratch of tree.h's build_tree_from_marginals, kept per thread.
class MarginalsBuffers {
 public:
  MarginalsScratch prepare(int32_t max_nodes) {
    const size_t n = static_cast<size_t>(max_nodes);
    open_.resize(n);
    tokens_.resize(n);
    scores_.resize(n);
    ints_.resize(2 * n + 1);
    keys_.resize(static_cast<size_t>(sort_capacity(max_nodes)));
    int32_t* i = ints_.data();
    return MarginalsScratch{open_.data(), tokens_.data(), scores_.data(), i,
                            i + n,        keys_.data(),   i + 2 * n};
  }

 private:
  std::vector<OpenPrefix> open_;
  std::vector<int64_t> tokens_;
  std::vector<float> scores_;
  std::vector<int32_t> ints_;
  std::vector<uint64_t> keys_;
};

void build_tree_from_marginals_out(const Tensor& root_tokens, const Tensor& prefix_lens,
                                   const Tensor& tokens, const Tensor& log_probs, int64_t max_nodes,
                                   const std::optional<Tensor>& limits, const Tensor& draft_tokens,
                                   const Tensor& parents, const Tensor& depths,
                                   const Tensor& position_ids, const Tensor& scores,
                                   const Tensor& first_child, const Tensor& next_sibling,
                                   const Tensor& tree_mask, const Tensor& num_nodes) {
  const Packed<int64_t, 1> roots(root_tokens, "root_tokens", {-1});
  const int64_t batch = roots.size(0), n = max_nodes;
  if (n < 1 || n > INT32_MAX / 2) fail("max_nodes: expected at least 1, got ", n);
  const Packed<int32_t, 1> prefix(prefix_lens, "prefix_lens", {batch});
  const Packed<int64_t, 3> ids(tokens, "tokens", {batch, -1, -1});
  const int64_t depth = ids.size(1), top_k = ids.size(2);
  if (std::max(depth, top_k) > INT32_MAX / 2) {
    fail("tokens: expected fewer than 2^30 positions and choices, got ", depth, " and ", top_k);
  }
  const Packed<float, 3> marginals(log_probs, "log_probs", {batch, depth, top_k});
  const auto bounds = packed<int32_t, 2>(limits, "limits", {batch, 2});
  const TreeOut out = tree_out(batch, n, draft_tokens, parents, depths, position_ids, scores,
                               first_child, next_sibling, tree_mask, num_nodes);

  parallel_for(batch, grain_for(8 * n), [&](int64_t begin, int64_t end) {
    thread_local MarginalsBuffers buffers;
    const MarginalsScratch scratch = buffers.prepare(static_cast<int32_t>(n));
    for (int64_t b = begin; b < end; ++b) {
      const Marginals request{ids.row(b), marginals.row(b), static_cast<int32_t>(depth),
                              static_cast<int32_t>(top_k)};
      build_tree_from_marginals(SoloTeam{}, request, roots[b], prefix[b], static_cast<int32_t>(n),
                                bounds ? bounds->row(b)[0] : n, bounds ? bounds->row(b)[1] : depth,
                                scratch, out.request(b, n));
    }
  });
}

Tree build_tree_from_marginals_op(const Tensor& root_tokens, const Tensor& prefix_lens,
                                  const Tensor& tokens, const Tensor& log_probs, int64_t max_nodes,
                                  const std::optional<Tensor>& limits) {
  if (max_nodes < 1) fail("max_nodes: expected at least 1, got ", max_nodes);
  Tree results = allocate_tree(root_tokens.numel(), max_nodes);
  std::apply(
      [&](const auto&... outs) {
        build_tree_from_marginals_out(root_tokens, prefix_lens, tokens, log_probs, max_nodes,
                                      limits, outs...);
      },
      results);
  return results;
}

void flatten_tree_out(const Tensor& parents, const Tensor& num_nodes, const Tensor& prefix_lens,
                      const Tensor& depths, const Tensor& position_ids, const Tensor& first_child,
                      const Tensor& next_sibling, const Tensor& tree_mask) {
  const Packed<int32_t, 2> up(parents, "parents", {-1, -1});
  const int64_t batch = up.size(0), n = up.size(1), words = mask_words(n);
  const Packed<int32_t, 1> counts(num_nodes, "num_nodes", {batch});
  const Packed<int32_t, 1> prefix(prefix_lens, "prefix_lens", {batch});
  int32_t* depth = output<int32_t, 2>(depths, "depths", {batch, n});
  int64_t* position = output<int64_t, 2>(position_ids, "position_ids", {batch, n});
  int32_t* child = output<int32_t, 2>(first_child, "first_child", {batch, n});
  int32_t* sibling = output<int32_t, 2>(next_sibling, "next_sibling", {batch, n});
  int64_t* mask = output<int64_t, 3>(tree_mask, "tree_mask", {batch, n, words});
  parallel_for(batch, grain_for(n), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      flatten_tree(SoloTeam{}, up.row(b), static_cast<int32_t>(n), counts[b], prefix[b],
                   depth + b * n, position + b * n, child + b * n, sibling + b * n,
                   reinterpret_cast<uint64_t*>(mask) + b * n * words);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flatten_tree_op(const Tensor& parents,
                                                                   const Tensor& num_nodes,
                                                                   const Tensor& prefix_lens) {
  if (parents.dim() != 2) fail("parents: expected 2 dimensions, got ", parents.dim());
  const int64_t batch = parents.size(0), n = parents.size(1);
  auto results = std::make_tuple(allocate<int32_t>({batch, n}), allocate<int64_t>({batch, n}),
                                 allocate<int32_t>({batch, n}), allocate<int32_t>({batch, n}),
                                 allocate<int64_t>({batch, n, mask_words(n)}));
  std::apply(
      [&](const auto&... outs) { flatten_tree_out(parents, num_nodes, prefix_lens, outs...); },
      results);
  return results;
}

void retrieve_indices_out(const Tensor& parents, const Tensor& num_nodes, int64_t max_depth,
                          const Tensor& indices) {
  const Packed<int32_t, 2> up(parents, "parents", {-1, -1});
  const int64_t batch = up.size(0), n = up.size(1), width = max_depth + 1;
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  const Packed<int32_t, 1> counts(num_nodes, "num_nodes", {batch});
  int64_t* rows = output<int64_t, 3>(indices, "indices", {batch, n, width});
  parallel_for(batch, grain_for(n), [&](int64_t begin, int64_t end) {
    thread_local std::vector<int32_t> children;
    children.resize(static_cast<size_t>(n));
    int32_t sums[2];
    for (int64_t b = begin; b < end; ++b) {
      leaf_paths(SoloTeam{}, up.row(b), static_cast<int32_t>(n), counts[b], width, children.data(),
                 sums, rows + b * n * width);
    }
  });
}

Tensor retrieve_indices(const Tensor& parents, const Tensor& num_nodes, int64_t max_depth) {
  if (parents.dim() != 2) fail("parents: expected 2 dimensions, got ", parents.dim());
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  Tensor indices = allocate<int64_t>({parents.size(0), parents.size(1), max_depth + 1});
  retrieve_indices_out(parents, num_nodes, max_depth, indices);
  return indices;
}

// The size of a mask's last dimension, and how many rows of it there are.
struct MaskRows {
  MaskRows(const Tensor& tensor, const char* name, ScalarType dtype) {
    if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor");
    if (tensor.dim() < 1) fail(name, ": expected at least 1 dimension, got 0");
    if (tensor.scalar_type() != dtype) {
      fail(name, ": expected dtype ", torch::headeronly::toString(dtype), ", got ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
    const auto sizes = tensor.sizes();
    shape.assign(sizes.begin(), sizes.end());
    const auto steps = tensor.strides();
    strides.assign(steps.begin(), steps.end());
    width = shape.back();
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  }

  // Elements before row r.
  int64_t offset(int64_t r) const {
    return row_offset(r, shape.data(), strides.data(), static_cast<int64_t>(shape.size()) - 1);
  }

  std::vector<int64_t> with_width(int64_t other) const {
    std::vector<int64_t> result = shape;
    result.back() = other;
    return result;
  }

  std::vector<int64_t> shape, strides;
  int64_t width = 0;
  int64_t rows = 1;
};

void check_mask_out(const MaskRows& in, const Tensor& out, const char* name, ScalarType dtype,
                    int64_t width) {
  const MaskRows written(out, name, dtype);
  if (written.shape != in.with_width(width)) {
    fail(name, ": expected the input's shape with a last dimension of ", width);
  }
  if (!out.is_contiguous()) fail(name, ": expected a contiguous tensor");
}

void pack_tree_mask_out(const Tensor& mask, const Tensor& words) {
  const MaskRows in(mask, "mask", ScalarType::Bool);
  const int64_t width = mask_words(in.width), step = in.strides.back();
  check_mask_out(in, words, "words", ScalarType::Long, width);
  const uint8_t* bits = static_cast<const uint8_t*>(mask.const_data_ptr());
  uint64_t* out = static_cast<uint64_t*>(words.mutable_data_ptr());
  for (int64_t r = 0; r < in.rows; ++r) {
    pack_row(SoloTeam{}, bits + in.offset(r), step, in.width, out + r * width);
  }
}

Tensor pack_tree_mask(const Tensor& mask) {
  const MaskRows in(mask, "mask", ScalarType::Bool);
  Tensor words = allocate(in.with_width(mask_words(in.width)), aoti_torch_dtype_int64());
  pack_tree_mask_out(mask, words);
  return words;
}

void unpack_tree_mask_out(const Tensor& words, int64_t num_keys, const Tensor& mask) {
  const MaskRows in(words, "words", ScalarType::Long);
  if (num_keys < 0 || num_keys > in.width * kWordBits) {
    fail("num_keys: expected 0 to ", in.width * kWordBits, ", got ", num_keys);
  }
  check_mask_out(in, mask, "mask", ScalarType::Bool, num_keys);
  const uint64_t* data = static_cast<const uint64_t*>(words.const_data_ptr());
  const int64_t step = in.strides.back();
  bool* out = static_cast<bool*>(mask.mutable_data_ptr());
  for (int64_t r = 0; r < in.rows; ++r) {
    unpack_row(SoloTeam{}, data + in.offset(r), step, num_keys, out + r * num_keys);
  }
}

Tensor unpack_tree_mask(const Tensor& words, int64_t num_keys) {
  const MaskRows in(words, "words", ScalarType::Long);
  if (num_keys < 0 || num_keys > in.width * kWordBits) {
    fail("num_keys: expected 0 to ", in.width * kWordBits, ", got ", num_keys);
  }
  Tensor mask = allocate(in.with_width(num_keys), aoti_torch_dtype_bool());
  unpack_tree_mask_out(words, num_keys, mask);
  return mask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("build_tree", TORCH_BOX(&build_tree_op));
  m.impl("build_tree_out", TORCH_BOX(&build_tree_out));
  m.impl("build_tree_from_marginals", TORCH_BOX(&build_tree_from_marginals_op));
  m.impl("build_tree_from_marginals_out", TORCH_BOX(&build_tree_from_marginals_out));
  m.impl("flatten_tree", TORCH_BOX(&flatten_tree_op));
  m.impl("flatten_tree_out", TORCH_BOX(&flatten_tree_out));
  m.impl("retrieve_indices", TORCH_BOX(&retrieve_indices));
  m.impl("retrieve_indices_out", TORCH_BOX(&retrieve_indices_out));
  m.impl("pack_tree_mask", TORCH_BOX(&pack_tree_mask));
  m.impl("pack_tree_mask_out", TORCH_BOX(&pack_tree_mask_out));
  m.impl("unpack_tree_mask", TORCH_BOX(&unpack_tree_mask));
  m.impl("unpack_tree_mask_out", TORCH_BOX(&unpack_tree_mask_out));
}

}  // namespace eagle2
