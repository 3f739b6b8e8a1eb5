// One tree_attention call on raw pointers, as the kernels of attention_kernel.h read it. Strides
// are in elements.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <cstdint>
#include <type_traits>

namespace eagle2 {

// Element types of a cache that come with a scale and without arithmetic of their own.
template <typename C>
constexpr bool kFloat8 = std::is_same_v<C, c10::Float8_e4m3fn>;

struct AttentionParams {
  int64_t batch, q_heads, kv_heads, group, k_dim, v_dim;
  int64_t nodes;         // queries of each request; ragged: at most so many
  int64_t padding_rows;  // ragged: rows of q behind the last request's, they see nothing
  int64_t tree_len;      // tree slots whose keys lie behind the prefix; the queries are the last of
                         // them. -1: as many as the request has queries
  int64_t capacity;      // cache slots of one request
  int64_t page_size;     // slots per block: a page, or the whole dense cache of a request
  int64_t num_blocks;    // pages, or requests
  int64_t chunk;         // kv_chunk: keys per chunk of the online softmax
  int64_t window;        // 0: none
  int64_t parts;         // tasks that share a (request, KV head), each with some of the chunks
  int64_t chunks;        // that hold the keys of any request
  double scale, softcap;
  float k_scale, v_scale;                // of a float8 cache, else 1
  torch::headeronly::ScalarType q_type;  // of q and out

  // q, mask and out are indexed [request, row, ...]. Ragged: the first stride is 0 and a request's
  // rows begin at qo_indptr[request].
  const void* q;
  int64_t q_stride[3];       // request, row, head
  const int32_t* qo_indptr;  // null: `nodes` rows for every request
  int64_t indptr_stride;
  const void* k;
  int64_t k_stride[3];  // block, slot, head
  const void* v;
  int64_t v_stride[3];
  const int32_t* prefix_lens;
  int64_t prefix_stride;
  const int64_t* mask;  // null: a causal chain
  int64_t mask_stride[3];
  const int32_t* depths;  // null: not given. [request, slot], or [row] when the slots are the rows
  int64_t depths_stride[2];
  const int32_t* page_table;  // null: dense cache
  int64_t table_stride[2];
  int64_t table_entries;
  const double* sinks;  // [q_heads], null: none
  void* out;
  int64_t out_stride[3];
  void* partial;  // parts > 1: [request, KV head, row, chunk] of part_size elements
  float* lse;     // null: not asked for
  int64_t lse_stride[3];
};

// Some of the nodes of a (request, KV head, part). Nodes are counted as if every request had
// AttentionParams::nodes of them: a request with fewer gives a task that share of its own.
struct AttentionTask {
  int64_t index;  // (request, part, KV head), the last fastest
  int64_t node_begin, node_end;
};

// What a task needs to know of its request.
struct Request {
  int64_t index;      // in prefix_lens, page_table and a dense cache
  int64_t first_row;  // in q, mask and out
  int64_t rows;       // queries, the last slots of the tree
  int64_t prefix;     // cache slots before the tree
  int64_t tree_len;
  const int32_t* depths;  // of its slots, null: not given
};

// A row's softmax over one chunk: peak and total in the first `lanes` elements, then the sum.
constexpr int64_t part_size(int64_t v_dim, int64_t lanes) {
  return (v_dim + lanes - 1) / lanes * lanes + lanes;
}

// One type of caches at one level: `attend` is for all nodes of the batch * parts * kv_heads tasks
// of a call (ragged: a request more where rows pad). With parts > 1 `merge` follows, for each
// (request, KV head, node).
struct AttentionKernel {
  void (*attend)(const AttentionParams&, const AttentionTask& task);
  void (*merge)(const AttentionParams&, int64_t task);
  int64_t element_size, lanes;  // of the arithmetic
};

// The kernels of one level of isa.h, by type of the caches. One file instantiates each level.
struct AttentionKernels {
  AttentionKernel float64, float32, float16, bfloat16, float8;
};
namespace portable {
extern const AttentionKernels kAttention;
}
namespace avx2 {
extern const AttentionKernels kAttention;
}
namespace avx512 {
extern const AttentionKernels kAttention;
}
namespace avx512_bf16 {  // the other types as in avx512, here and below
extern const AttentionKernel kBFloat16;
}
namespace amx {
extern const AttentionKernel kBFloat16;
}
namespace amx_model {  // the same on a software model of the matrix unit
extern const AttentionKernel kBFloat16;
}

}  // namespace eagle2
