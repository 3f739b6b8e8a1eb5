// tree_attention behind its arguments: checks, and the rows in threads, for operators that hold it
// among other things.
#pragma once

#include <optional>

#include "attention_params.h"
#include "common.h"

namespace eagle2 {

// Memory, sizes and strides (in elements) of a [., ., heads, dim] tensor of any dtype; flat rows
// [., heads, dim] are read as one block of them.
struct AttentionRows {
  const void* data;
  ScalarType type;
  int64_t size[4], stride[4];
  int added;  // dimensions the tensor does not have
};

inline const std::optional<Tensor> kNoTensor;

// As tree_attention_out takes them.
struct AttentionOptions {
  const std::optional<Tensor>& tree_mask;
  std::optional<int64_t> tree_len;
  const std::optional<Tensor>& qo_indptr;
  std::optional<int64_t> max_q;
  const std::optional<Tensor>& page_table;
  const std::optional<Tensor>& depths;
  std::optional<double> sm_scale;
  double softcap;
  std::optional<int64_t> window;
  const std::optional<Tensor>& k_scale;
  const std::optional<Tensor>& v_scale;
  std::optional<int64_t> kv_chunk;
};

// All checks but those of sinks and lse, which are left out. `out` is written by `attend`.
AttentionParams attention_params(const AttentionRows& q, const Tensor& k_cache,
                                 const Tensor& v_cache, const Tensor& prefix_lens,
                                 const AttentionOptions& options, const AttentionRows& out);

// Writes out and lse, for caches of this dtype. There is at least one row.
void attend(AttentionParams& p, ScalarType type);

}  // namespace eagle2
