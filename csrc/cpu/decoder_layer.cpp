// decoder_layer on the CPU: the operators of linear.cpp, layer.cpp, cache.cpp and attention.cpp one
// after another, over memory of the call's own. All arguments are checked before anything is
// written.
#include <algorithm>

#include "attention_call.h"
#include "layer.h"
#include "linear_call.h"
#include "rope.h"
#include "scratch.h"

namespace eagle2 {
namespace {

constexpr ScalarType kType = ScalarType::BFloat16;
constexpr int64_t kItem = 2;

// Elements of rows that a thread is started for.
constexpr int64_t kElementsPerThread = 1 << 15;

template <typename Row>
void for_rows(int64_t rows, int64_t width, const Row& row) {
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(width, 1));
  parallel_for(rows, grain, [&row](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i);
  });
}

LinearRows even_rows(const uint16_t* data, int64_t rows, int64_t stride) {
  LinearRows x;
  x.data = data;
  x.dims = 1;
  x.size[0] = rows;
  x.stride[0] = stride;
  return x;
}

void check_bfloat16(const Tensor& tensor, const char* name, int64_t dims) {
  if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor");
  if (tensor.scalar_type() != kType) {
    fail(name, ": expected dtype BFloat16, got ",
         torch::headeronly::toString(tensor.scalar_type()));
  }
  if (tensor.dim() != dims) fail(name, ": expected ", dims, " dimensions, got ", tensor.dim());
}

const void* norm_of(const Tensor& weight, const char* name, int64_t width) {
  check_bfloat16(weight, name, 1);
  if (weight.size(0) != width || !weight.is_contiguous()) {
    fail(name, ": expected ", width, " contiguous elements in one dimension");
  }
  return weight.const_data_ptr();
}

void decoder_layer(const Tensor& hidden, const Tensor& cos, const Tensor& sin,
                   const Tensor& k_cache, const Tensor& v_cache, const Tensor& prefix_lens,
                   const Tensor& qkv_packed, const Tensor& o_packed, const Tensor& post_norm_weight,
                   const Tensor& gate_up_packed, const Tensor& down_packed, int64_t num_heads,
                   int64_t intermediate_size, const std::optional<Tensor>& norm_weight,
                   const std::optional<Tensor>& tree_mask, const std::optional<Tensor>& lengths,
                   const std::optional<Tensor>& attention_input,
                   const std::optional<Tensor>& qkv_bias, const std::optional<Tensor>& o_bias,
                   const std::optional<Tensor>& gate_up_bias,
                   const std::optional<Tensor>& down_bias, const std::optional<Tensor>& q_weight,
                   const std::optional<Tensor>& k_weight, double eps,
                   const std::optional<Tensor>& page_table, std::optional<int64_t> tree_len,
                   const std::optional<Tensor>& depths, std::optional<double> sm_scale,
                   double softcap, std::optional<int64_t> window) {
  check_bfloat16(hidden, "hidden", 3);
  if (!hidden.is_contiguous()) fail("hidden: expected a contiguous tensor");
  const int64_t batch = hidden.size(0), nodes = hidden.size(1), size = hidden.size(2);
  const int64_t rows = batch * nodes;
  check_bfloat16(k_cache, "k_cache", 4);
  const Heads heads = {num_heads, k_cache.size(2), k_cache.size(3)};
  if (heads.kv < 1 || heads.dim < 1) {
    fail("k_cache: expected at least one head of one element");
  }
  if (heads.q < 1 || heads.q % heads.kv != 0) {
    fail("num_heads: expected a multiple of the ", heads.kv, " KV heads, got ", heads.q);
  }
  if (intermediate_size < 1)
    fail("intermediate_size: expected at least 1, got ", intermediate_size);
  const int64_t slots = tree_len.value_or(nodes);
  if (slots < nodes) fail("tree_len: expected at least the ", nodes, " rows, got ", slots);

  const void* norm = nullptr;
  if (norm_weight.has_value()) norm = norm_of(*norm_weight, "norm_weight", size);
  LinearRows input = even_rows(nullptr, rows, size);
  int64_t width = size;
  if (attention_input.has_value()) {
    if (norm != nullptr) fail("norm_weight: expected none beside attention_input");
    check_bfloat16(*attention_input, "attention_input", 3);
    width = attention_input->size(2);
    if (attention_input->size(0) != batch || attention_input->size(1) != nodes) {
      fail("attention_input: expected [", batch, ", ", nodes, ", W] for the rows of hidden");
    }
    input = linear_rows(*attention_input, "attention_input");
  }
  const int64_t q_size = heads.q * heads.dim, merged = q_size + 2 * heads.kv * heads.dim;
  const int64_t inner = intermediate_size;
  const PackedLinear qkv =
      packed_layer(qkv_packed, "qkv_packed", qkv_bias, "qkv_bias", width, merged);
  const PackedLinear o = packed_layer(o_packed, "o_packed", o_bias, "o_bias", q_size, size);
  const void* post_norm = norm_of(post_norm_weight, "post_norm_weight", size);
  const PackedLinear gate_up =
      packed_layer(gate_up_packed, "gate_up_packed", gate_up_bias, "gate_up_bias", size, 2 * inner);
  const PackedLinear down =
      packed_layer(down_packed, "down_packed", down_bias, "down_bias", inner, size);

  // The widest of what lies between two products, the rows of q, and what attention makes of them.
  CallArena arena;
  uint16_t* const row = arena.take<uint16_t>(rows * size);
  uint16_t* const wide = arena.take<uint16_t>(rows * std::max(merged, 2 * inner));
  uint16_t* const q = arena.take<uint16_t>(rows * q_size);
  uint16_t* const attended = arena.take<uint16_t>(rows * q_size);

  const QkvRows qkv_rows = {
      reinterpret_cast<const char*>(wide),     kType, kItem, batch, nodes, merged,
      {nodes * merged * kItem, merged * kItem}};
  const CacheRows q_rows = {reinterpret_cast<char*>(q),
                            {batch, nodes, heads.q},
                            {nodes * q_size * kItem, q_size * kItem, heads.dim * kItem},
                            heads.dim * kItem,
                            heads.dim};
  const RopeAndWrite rope(qkv_rows, heads, cos, sin, k_cache, v_cache, prefix_lens, slots - nodes,
                          lengths, page_table, q_weight, k_weight, eps, q_rows);
  AttentionRows from = {
      q, kType, {batch, nodes, heads.q, heads.dim}, {nodes * q_size, q_size, heads.dim, 1}, 0};
  AttentionRows to = from;
  to.data = attended;
  AttentionParams attention =
      attention_params(from, k_cache, v_cache, prefix_lens,
                       {tree_mask, slots, kNoTensor, std::nullopt, page_table, depths, sm_scale,
                        softcap, window, kNoTensor, kNoTensor, std::nullopt},
                       to);
  if (rows == 0) return;

  const LayerKernel& kernel = layer_kernel(kType, "hidden");
  uint16_t* const stream = static_cast<uint16_t*>(hidden.mutable_data_ptr());
  const auto epsilon = static_cast<float>(eps);
  if (norm != nullptr) {
    for_rows(rows, size, [&](int64_t i) {
      kernel.rms_norm(stream + i * size, norm, size, epsilon, row + i * size);
    });
    input.data = row;
  } else if (!attention_input.has_value()) {
    input.data = stream;
  }
  run_linear(input, rows, qkv, wide);
  rope.run();
  attend(attention, kType);
  run_linear(even_rows(attended, rows, q_size), rows, o, row);
  for_rows(rows, size, [&](int64_t i) {
    kernel.add_rms_norm(row + i * size, stream + i * size, post_norm, size, epsilon);
  });
  run_linear(even_rows(row, rows, size), rows, gate_up, wide);
  for_rows(rows, 4 * inner, [&](int64_t i) {
    uint16_t* const gate = wide + i * 2 * inner;
    kernel.silu_and_mul(gate, gate + inner, inner, gate);
  });
  run_linear(even_rows(wide, rows, 2 * inner), rows, down, row);
  for_rows(rows, size, [&](int64_t i) { kernel.add(row + i * size, stream + i * size, size); });
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("decoder_layer", TORCH_BOX(&decoder_layer));
}

}  // namespace
}  // namespace eagle2
