// tree_attention and merge_attention_states on the CPU: argument checks, choice of instruction set,
// threads. The arithmetic is in attention_kernel.h.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention_call.h"
#include "attention_params.h"
#include "common.h"
#include "isa.h"

namespace eagle2 {
namespace {

// The kernels of the level in use.
const AttentionKernels& kernels() {
  static const AttentionKernels chosen = [] {
    switch (cpu_isa()) {
#ifdef EAGLE2_X86_LEVELS
      case Isa::kAvx512Bf16: {
        AttentionKernels level = avx512::kAttention;
        level.bfloat16 = cpu_level().matrix == Matrix::kAmx     ? amx::kBFloat16
                         : cpu_level().matrix == Matrix::kModel ? amx_model::kBFloat16
                                                                : avx512_bf16::kBFloat16;
        return level;
      }
      case Isa::kAvx512:
        return avx512::kAttention;
      case Isa::kAvx2:
        return avx2::kAttention;
#endif
      default:
        return portable::kAttention;
    }
  }();
  return chosen;
}

// Bytes of partial results that a call may take, and a thread keeps for the next.
constexpr int64_t kMostPartial = int64_t{64} << 20, kKeptPartial = int64_t{16} << 20;

// Bytes of them that are worth a thread's start.
constexpr int64_t kLeastMerge = int64_t{16} << 10;

// Rows per KV head up to which a call is bound by memory.
constexpr int64_t kStreamedRows = 16;

// Into how many parts the keys are shared. Threads share the nodes of all (request, KV head) in
// order, where a head's are divided both load its keys; so too few heads share their keys first, if
// there are enough. What the tasks do never shows in a row's bits.
void share_out(AttentionParams& p, const AttentionKernel& kernel) {
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t prefix = std::clamp<int64_t>(p.prefix_lens[b * p.prefix_stride], 0, p.capacity);
    longest =
        std::max(longest, std::min(p.capacity, prefix + (p.tree_len < 0 ? p.nodes : p.tree_len)));
  }
  p.chunks = std::max<int64_t>(1, (longest + p.chunk - 1) / p.chunk);
  p.parts = 1;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t heads = (p.batch + (p.padding_rows > 0 ? 1 : 0)) * p.kv_heads;
  // Few rows wait for memory: all heads of some chunks in turn, then the next chunks, read the
  // caches nearly in order.
  const bool streams = p.nodes * p.group <= kStreamedRows;
  if (p.chunks < 4 || (!streams && heads >= threads)) return;
  const int64_t row_bytes = p.chunks * part_size(p.v_dim, kernel.lanes) * kernel.element_size;
  const int64_t rows = heads * std::max(p.nodes, p.padding_rows) * p.group;
  if (rows * row_bytes > kMostPartial) return;
  p.parts = streams ? (p.chunks + 2) / 3 : 4;
  while (p.parts < p.chunks && heads * p.parts % threads != 0) ++p.parts;
}

void attend_with(AttentionParams& p, const AttentionKernel& kernel) {
  static thread_local std::vector<double> memory;
  share_out(p, kernel);
  const int64_t heads = (p.batch + (p.padding_rows > 0 ? 1 : 0)) * p.kv_heads;
  const int64_t nodes = std::max(p.nodes, p.padding_rows);
  if (p.parts > 1) {
    const int64_t elements = heads * nodes * p.group * p.chunks * part_size(p.v_dim, kernel.lanes);
    const size_t words = static_cast<size_t>(elements * kernel.element_size) / sizeof(double) + 1;
    if (memory.size() < words) memory = std::vector<double>(words);
    p.partial = memory.data();
  }
  parallel_for(heads * p.parts * nodes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t first = at % nodes, last = std::min(nodes, first + end - at);
      kernel.attend(p, {at / nodes, first, last});
      at += last - first;
    }
  });
  if (p.parts == 1) return;
  const int64_t bytes = p.group * p.chunks * part_size(p.v_dim, kernel.lanes) * kernel.element_size;
  const int64_t grain = std::max<int64_t>(1, kLeastMerge / bytes);
  parallel_for(heads * nodes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) kernel.merge(p, task);
  });
  if (static_cast<int64_t>(memory.size() * sizeof(double)) > kKeptPartial) {
    memory = std::vector<double>();
  }
}

// Keys per chunk when the caller does not say: long, as a chunk costs each row a merge, but with K
// and V, converted, in the second-level cache. Depends on the head dim only, so that a row's bits
// do.
int64_t default_chunk(int64_t head_dim) {
  return head_dim <= 64 ? 256 : head_dim <= 128 ? 192 : 64;
}

constexpr int64_t kMaxChunk = 1 << 16;

double scalar_at(const Tensor& tensor, int64_t offset) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return static_cast<const double*>(data)[offset];
    case ScalarType::Float:
      return static_cast<const float*>(data)[offset];
    case ScalarType::Half:
      return static_cast<const c10::Half*>(data)[offset];
    case ScalarType::BFloat16:
      return static_cast<const c10::BFloat16*>(data)[offset];
    default:
      fail("sinks: expected a floating point dtype, got ",
           torch::headeronly::toString(tensor.scalar_type()));
  }
}

using Rows = AttentionRows;

Rows rows_of(const Tensor& tensor, const char* name, bool flat) {
  const int added = flat ? 1 : 0;
  if (tensor.dim() != 4 - added) {
    fail(name, ": expected ", 4 - added, " dimensions, got ", tensor.dim());
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  Rows rows = {tensor.const_data_ptr(), tensor.scalar_type(), {1}, {0}, added};
  for (int i = added; i < 4; ++i) {
    rows.size[i] = sizes[i - added];
    rows.stride[i] = strides[i - added];
  }
  if (rows.size[3] < 1) fail(name, ": expected a head dim of at least 1, got ", rows.size[3]);
  if (rows.size[3] > 1 && rows.stride[3] != 1) {
    fail(name, ": expected a contiguous last dimension, got stride ", rows.stride[3]);
  }
  return rows;
}

void check_rows(const Rows& rows, const char* name, std::initializer_list<int64_t> want) {
  int i = 0;
  for (const int64_t size : want) {
    if (size >= 0 && rows.size[i] != size) {
      fail(name, ": expected size ", size, " in dimension ", i - rows.added, ", got ",
           rows.size[i]);
    }
    ++i;
  }
}

void check_dtype(ScalarType type, const char* name, ScalarType want, const char* why) {
  if (type != want) {
    fail(name, ": expected dtype ", torch::headeronly::toString(want), why, ", got ",
         torch::headeronly::toString(type));
  }
}

void check_dtype(const Tensor& tensor, const char* name, ScalarType want, const char* why) {
  check_dtype(tensor.scalar_type(), name, want, why);
}

float scale_of(const std::optional<Tensor>& scale, const char* name, bool float8) {
  if (!scale.has_value()) return 1.0f;
  if (!float8) fail(name, ": expected none, the caches are not float8");
  check_dtype(*scale, name, ScalarType::Float, "");
  if (scale->numel() != 1) fail(name, ": expected one element, got ", scale->numel());
  return *static_cast<const float*>(scale->const_data_ptr());
}

// Fills in what q, the caches and out say.
void set_rows(AttentionParams& p, const Rows& query, const Tensor& k_cache, const Tensor& v_cache,
              const Rows& result, bool flat, bool paged) {
  const Rows k = rows_of(k_cache, "k_cache", false);
  const Rows v = rows_of(v_cache, "v_cache", false);
  p.q_type = query.type;
  check_dtype(result.type, "out", p.q_type, " like q");
  if (k_cache.scalar_type() != ScalarType::Float8_e4m3fn) {
    check_dtype(k_cache, "k_cache", p.q_type, " like q");
  } else if (p.q_type != ScalarType::Float && p.q_type != ScalarType::Half &&
             p.q_type != ScalarType::BFloat16) {
    fail("q: expected float32, float16 or bfloat16 beside float8 caches, got ",
         torch::headeronly::toString(p.q_type));
  }
  check_dtype(v_cache, "v_cache", k_cache.scalar_type(), " like k_cache");

  if (!flat) p.batch = query.size[0];
  p.nodes = query.size[1];
  p.q_heads = query.size[2];
  p.k_dim = query.size[3];
  p.v_dim = v.size[3];
  p.num_blocks = k.size[0];
  p.page_size = k.size[1];
  p.kv_heads = k.size[2];
  if (p.kv_heads < 1 || p.q_heads < 1 || p.q_heads % p.kv_heads != 0) {
    fail("q: expected a multiple of the ", p.kv_heads, " KV heads, got ", p.q_heads, " heads");
  }
  p.group = p.q_heads / p.kv_heads;
  check_rows(k, "k_cache", {paged ? -1 : p.batch, -1, -1, p.k_dim});
  check_rows(v, "v_cache", {p.num_blocks, p.page_size, p.kv_heads, -1});
  check_rows(result, "out", {query.size[0], p.nodes, p.q_heads, p.v_dim});
  p.q = query.data;
  p.k = k.data;
  p.v = v.data;
  p.out = const_cast<void*>(result.data);
  for (int i = 0; i < 3; ++i) {
    p.q_stride[i] = query.stride[i];
    p.k_stride[i] = k.stride[i];
    p.v_stride[i] = v.stride[i];
    p.out_stride[i] = result.stride[i];
  }
}

// Flat ragged queries: every row must belong to one request at most.
void set_indptr(AttentionParams& p, const View<const int32_t, 1>& indptr, int64_t max_q) {
  const int64_t total = p.nodes;
  if (max_q < 0) fail("max_q: expected a number of rows, got ", max_q);
  if (indptr(0) != 0) fail("qo_indptr[0]: expected 0, got ", indptr(0));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t start = indptr(b), stop = indptr(b + 1);
    if (stop < start || stop > total) {
      fail("qo_indptr[", b + 1, "]: expected ", start, " to ", total, ", got ", stop);
    }
    const int64_t most = p.tree_len > 0 ? std::min(max_q, p.tree_len) : max_q;
    if (stop - start > most) {
      fail("qo_indptr: expected at most ", most, " rows of request ", b, ", got ", stop - start);
    }
  }
  p.qo_indptr = indptr.data;
  p.indptr_stride = indptr.stride[0];
  p.padding_rows = total - indptr(p.batch);
  p.nodes = std::min(max_q, total);
}

}  // namespace

AttentionParams attention_params(const AttentionRows& q, const Tensor& k_cache,
                                 const Tensor& v_cache, const Tensor& prefix_lens,
                                 const AttentionOptions& options, const AttentionRows& out) {
  const auto& [tree_mask, tree_len, qo_indptr, max_q, page_table, depths, sm_scale, softcap, window,
               k_scale, v_scale, kv_chunk] = options;
  const bool ragged = qo_indptr.has_value();
  if (max_q.has_value() && !ragged) fail("max_q: expected qo_indptr beside it");
  AttentionParams p{};
  const auto indptr = view<int32_t, 1>(qo_indptr, "qo_indptr");
  if (ragged) {
    if (indptr.size[0] < 1) fail("qo_indptr: expected B + 1 entries, got none");
    p.batch = indptr.size[0] - 1;
  }
  set_rows(p, q, k_cache, v_cache, out, ragged, page_table.has_value());
  const int64_t total = p.nodes;  // ragged: rows of q
  const bool float8 = k_cache.scalar_type() == ScalarType::Float8_e4m3fn;
  p.k_scale = scale_of(k_scale, "k_scale", float8);
  p.v_scale = scale_of(v_scale, "v_scale", float8);

  if (tree_len.has_value() && (*tree_len < 0 || *tree_len > std::numeric_limits<int32_t>::max())) {
    fail("tree_len: expected 0 or more, got ", *tree_len);
  }
  p.tree_len = tree_len.value_or(ragged ? -1 : p.nodes);
  const bool slots_are_rows = p.tree_len < 0;
  if (ragged) {
    set_indptr(p, indptr, max_q.value_or(total));
  } else if (p.tree_len != 0 && p.tree_len < p.nodes) {
    fail("tree_len: expected 0 or at least the ", p.nodes, " queries, got ", p.tree_len);
  }

  const auto lens = view<int32_t, 1>(prefix_lens, "prefix_lens");
  check_shape(lens, "prefix_lens", {p.batch});
  p.prefix_lens = lens.data;
  p.prefix_stride = lens.stride[0];

  const auto table = view<int32_t, 2>(page_table, "page_table");
  if (table.data != nullptr || page_table.has_value()) {
    check_shape(table, "page_table", {p.batch, -1});
    if (p.page_size < 1) fail("k_cache: expected a page size of at least 1, got ", p.page_size);
    p.page_table = table.data;
    p.table_stride[0] = table.stride[0];
    p.table_stride[1] = table.stride[1];
    p.table_entries = table.size[1];
    p.capacity = p.table_entries * p.page_size;
  } else {
    p.capacity = p.page_size;
  }

  if (tree_mask.has_value()) {
    const int64_t words = ((slots_are_rows ? max_q.value_or(total) : p.tree_len) + 63) / 64;
    const int64_t* data = nullptr;
    if (ragged) {
      const auto mask = view<int64_t, 2>(tree_mask, "tree_mask");
      check_shape(mask, "tree_mask", {total, words});
      p.mask_stride[1] = mask.stride[0];
      p.mask_stride[2] = mask.stride[1];
      data = mask.data;
    } else {
      const auto mask = view<int64_t, 3>(tree_mask, "tree_mask");
      check_shape(mask, "tree_mask", {p.batch, p.nodes, words});
      std::copy_n(mask.stride, 3, p.mask_stride);
      data = mask.data;
    }
    // An empty tensor may have no memory: without slots there is no word to read.
    if (words > 0) p.mask = data;
  }
  if (depths.has_value()) {
    if (slots_are_rows) {
      const auto depth = view<int32_t, 1>(depths, "depths");
      check_shape(depth, "depths", {total});
      p.depths = depth.data;
      p.depths_stride[1] = depth.stride[0];
    } else {
      const auto depth = view<int32_t, 2>(depths, "depths");
      check_shape(depth, "depths", {p.batch, p.tree_len});
      p.depths = depth.data;
      std::copy_n(depth.stride, 2, p.depths_stride);
    }
  }
  if (window.has_value()) {
    if (*window < 1) fail("window: expected at least 1 key, got ", *window);
    if (p.tree_len == 0) fail("window: with tree_len 0 the queries have no position");
    if (p.mask != nullptr && !depths.has_value()) {
      fail("depths: needed with window, a slot of a tree does not tell its position");
    }
    p.window = *window;
  }
  if (!(softcap >= 0) || std::isinf(softcap)) {
    fail("softcap: expected 0 (off) or a positive number, got ", softcap);
  }
  p.softcap = softcap;
  p.scale = sm_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.k_dim)));
  p.chunk = kv_chunk.value_or(default_chunk(p.k_dim));
  if (p.chunk < 1 || p.chunk > kMaxChunk) {
    fail("kv_chunk: expected 1 to ", kMaxChunk, " keys, got ", p.chunk);
  }
  return p;
}

void attend(AttentionParams& p, ScalarType type) {
  const AttentionKernels& level = kernels();
  switch (type) {
    case ScalarType::Double:
      return attend_with(p, level.float64);
    case ScalarType::Float:
      return attend_with(p, level.float32);
    case ScalarType::Half:
      return attend_with(p, level.float16);
    case ScalarType::BFloat16:
      return attend_with(p, level.bfloat16);
    case ScalarType::Float8_e4m3fn:
      return attend_with(p, level.float8);
    default:
      fail("q: expected float64, float32, float16 or bfloat16, got ",
           torch::headeronly::toString(p.q_type));
  }
}

namespace {

void tree_attention_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& prefix_lens, const std::optional<Tensor>& tree_mask,
                        std::optional<int64_t> tree_len, const std::optional<Tensor>& qo_indptr,
                        std::optional<int64_t> max_q, const std::optional<Tensor>& page_table,
                        const std::optional<Tensor>& depths, std::optional<int64_t> max_prefix_len,
                        std::optional<double> sm_scale, double softcap,
                        std::optional<int64_t> window, const std::optional<Tensor>& sinks,
                        const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                        std::optional<int64_t> kv_chunk, const Tensor& out,
                        const std::optional<Tensor>& lse) {
  if (max_prefix_len.has_value() && *max_prefix_len < 0) {
    fail("max_prefix_len: expected a length, got ", *max_prefix_len);
  }
  const bool ragged = qo_indptr.has_value();
  const Rows query = rows_of(q, "q", ragged);
  Rows result = rows_of(out, "out", ragged);
  check_written(out, "out");
  result.data = out.mutable_data_ptr();
  AttentionParams p = attention_params(query, k_cache, v_cache, prefix_lens,
                                       {tree_mask, tree_len, qo_indptr, max_q, page_table, depths,
                                        sm_scale, softcap, window, k_scale, v_scale, kv_chunk},
                                       result);
  const int64_t total = query.size[1];  // ragged: rows of q
  std::vector<double> sink_values;
  if (sinks.has_value()) {
    if (sinks->dim() != 1 || sinks->size(0) != p.q_heads) {
      fail("sinks: expected shape [", p.q_heads, "], one logit per query head");
    }
    for (int64_t h = 0; h < p.q_heads; ++h) {
      sink_values.push_back(scalar_at(*sinks, h * sinks->stride(0)));
    }
    p.sinks = sink_values.data();
  }
  if (lse.has_value() && ragged) {
    const auto sums = mutable_view<float, 2>(*lse, "lse");
    check_shape(sums, "lse", {total, p.q_heads});
    p.lse = sums.data;
    p.lse_stride[1] = sums.stride[0];
    p.lse_stride[2] = sums.stride[1];
  } else if (lse.has_value()) {
    const auto sums = mutable_view<float, 3>(*lse, "lse");
    check_shape(sums, "lse", {p.batch, p.nodes, p.q_heads});
    p.lse = sums.data;
    std::copy_n(sums.stride, 3, p.lse_stride);
  }
  if (total == 0 || (p.batch == 0 && !ragged)) return;
  attend(p, k_cache.scalar_type());
}

// A [B, N, H, D] or [rows, H, D] tensor (without D: an LSE) as [B, N, H, D].
template <typename T>
View<T, 4> merge_view(const Tensor& tensor, const char* name, bool flat, bool lse) {
  const int64_t rank = 4 - (flat ? 1 : 0) - (lse ? 1 : 0);
  if (tensor.dim() != rank) fail(name, ": expected ", rank, " dimensions, got ", tensor.dim());
  check_dtype(tensor, name, torch::headeronly::CppTypeToScalarType<std::remove_const_t<T>>::value,
              "");
  View<T, 4> view;
  if constexpr (std::is_const_v<T>) {
    view.data = static_cast<T*>(tensor.const_data_ptr());
  } else {
    check_written(tensor, name);
    view.data = static_cast<T*>(tensor.mutable_data_ptr());
  }
  view.size[0] = view.size[3] = 1;
  for (int64_t i = 0; i < rank; ++i) {
    view.size[i + (flat ? 1 : 0)] = tensor.sizes()[i];
    view.stride[i + (flat ? 1 : 0)] = tensor.strides()[i];
  }
  return view;
}

template <typename T>
void merge_typed(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                 const Tensor& out, const Tensor& lse) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const bool flat = out_a.dim() == 3;
  const auto a = merge_view<const T>(out_a, "out_a", flat, false);
  const auto b = merge_view<const T>(out_b, "out_b", flat, false);
  const auto to = merge_view<T>(out, "out", flat, false);
  const auto sum_a = merge_view<const float>(lse_a, "lse_a", flat, true);
  const auto sum_b = merge_view<const float>(lse_b, "lse_b", flat, true);
  const auto sum = merge_view<float>(lse, "lse", flat, true);
  const int64_t batch = a.size[0], nodes = a.size[1], heads = a.size[2], dim = a.size[3];
  check_shape(b, "out_b", {batch, nodes, heads, dim});
  check_shape(to, "out", {batch, nodes, heads, dim});
  check_shape(sum_a, "lse_a", {batch, nodes, heads, 1});
  check_shape(sum_b, "lse_b", {batch, nodes, heads, 1});
  check_shape(sum, "lse", {batch, nodes, heads, 1});
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  parallel_for(batch * nodes, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r = row / nodes, n = row % nodes;
      for (int64_t h = 0; h < heads; ++h) {
        const float x = sum_a(r, n, h), y = sum_b(r, n, h);
        const bool no_x = x == kMinusInfinity, no_y = y == kMinusInfinity;
        if (no_x || no_y) {
          const auto& only = no_y ? a : b;
          for (int64_t d = 0; d < dim; ++d) {
            to(r, n, h, d) = no_x && no_y ? static_cast<T>(0.0f) : only(r, n, h, d);
          }
          sum(r, n, h) = no_y ? x : y;
          continue;
        }
        const float peak = x > y ? x : y;
        const float weight_x = std::exp(x - peak), weight_y = std::exp(y - peak);
        const float total = weight_x + weight_y;
        const A share_x = weight_x / total, share_y = weight_y / total;
        for (int64_t d = 0; d < dim; ++d) {
          to(r, n, h, d) = static_cast<T>(static_cast<A>(a(r, n, h, d)) * share_x +
                                          static_cast<A>(b(r, n, h, d)) * share_y);
        }
        sum(r, n, h) = peak + std::log(total);
      }
    }
  });
}

void merge_attention_states_out(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                const Tensor& lse_b, const Tensor& out, const Tensor& lse) {
  switch (out_a.scalar_type()) {
    case ScalarType::Double:
      return merge_typed<double>(out_a, lse_a, out_b, lse_b, out, lse);
    case ScalarType::Float:
      return merge_typed<float>(out_a, lse_a, out_b, lse_b, out, lse);
    case ScalarType::Half:
      return merge_typed<c10::Half>(out_a, lse_a, out_b, lse_b, out, lse);
    case ScalarType::BFloat16:
      return merge_typed<c10::BFloat16>(out_a, lse_a, out_b, lse_b, out, lse);
    default:
      fail("out_a: expected float64, float32, float16 or bfloat16, got ",
           torch::headeronly::toString(out_a.scalar_type()));
  }
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& out_a, const Tensor& lse_a,
                                                  const Tensor& out_b, const Tensor& lse_b) {
  Tensor out = torch::stable::new_empty(out_a, out_a.sizes());
  Tensor lse = torch::stable::new_empty(lse_a, lse_a.sizes());
  merge_attention_states_out(out_a, lse_a, out_b, lse_b, out, lse);
  return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("tree_attention_out", TORCH_BOX(&tree_attention_out));
  m.impl("merge_attention_states", TORCH_BOX(&merge_attention_states));
  m.impl("merge_attention_states_out", TORCH_BOX(&merge_attention_states_out));
}

}  // namespace
}  // namespace eagle2
