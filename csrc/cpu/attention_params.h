// One tree_attention call on raw pointers, as the kernels of attention_kernel.h read it. Strides
// are in elements.
#pragma once

#include <cstdint>

namespace eagle2 {

struct AttentionParams {
  int64_t batch, nodes, q_heads, kv_heads, group, head_dim;
  int64_t tree_len;    // tree slots whose keys lie behind the prefix; the queries are the last
                       // `nodes` of them
  int64_t capacity;    // cache slots of one request
  int64_t page_size;   // slots per block: a page, or the whole dense cache of a request
  int64_t num_blocks;  // pages, or requests
  int64_t chunk;       // kv_chunk: keys per chunk of the online softmax
  int64_t window;      // 0: none
  int64_t splits;      // tasks that share one (request, KV head), each with a part of the nodes
  double scale, softcap;

  const void* q;
  int64_t q_stride[3];  // request, node, head
  const void* k;
  int64_t k_stride[3];  // block, slot, head
  const void* v;
  int64_t v_stride[3];
  const int32_t* prefix_lens;
  int64_t prefix_stride;
  const int64_t* mask;  // null: a causal chain
  int64_t mask_stride[3];
  const int32_t* depths;  // null: not given
  int64_t depths_stride[2];
  const int32_t* page_table;  // null: dense cache
  int64_t table_stride[2];
  int64_t table_entries;
  const double* sinks;  // [q_heads], null: none
  void* out;
  int64_t out_stride[3];
  float* lse;  // null: not asked for
  int64_t lse_stride[3];
};

}  // namespace eagle2
