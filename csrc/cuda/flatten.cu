// build_tree, build_tree_from_marginals, flatten_tree, retrieve_indices and the mask packing on
// CUDA: tree.h run by one thread block per request. A step's tree is a few thousand numbers, so a
// block keeps it in its cache; the launch is what costs.
#include <tuple>

#include "common.cuh"

namespace eagle2 {
namespace {

constexpr int64_t kSharedKeyBytes = 32 << 10;

struct BuildArgs {
  const int64_t* root_tokens;  // [B]
  const int32_t* prefix_lens;  // [B]
  Candidates candidates;       // of request 0; [B, M] each
  const int32_t* limits;       // [B, 2] or null
  int32_t max_nodes;
  char* scratch;          // scratch_bytes per request
  int64_t scratch_bytes;  // multiple of 8
  bool keys_in_shared;
  TreeOut out;
};

// One block per request. The rounds of the selection after the first find scores and parents in the
// cache. Shared memory: the histogram and, where they fit, the sort keys.
//   bytes = B * (8 M + 20 + 8 N read, N * (36 + 8 W) + 4 written, 24 M of scratch),
//           W = mask_words(N)
//   flops = B * (5 M + N log2(N)^2), comparisons
__global__ void build_tree_kernel(BuildArgs args) {
  __shared__ int32_t histogram[256];
  __shared__ int32_t shared[4];
  extern __shared__ uint64_t shared_keys[];
  const int64_t b = blockIdx.x, m = args.candidates.m;
  char* mine = args.scratch + b * args.scratch_bytes;
  const int64_t key_bytes = args.keys_in_shared ? 0 : 8ll * sort_capacity(args.max_nodes);
  float* f = reinterpret_cast<float*>(mine + key_bytes);
  int32_t* i = reinterpret_cast<int32_t*>(f + 2 * m);
  const BuildScratch scratch{{f, f + m},
                             {i, i + m},
                             {i + 2 * m, i + 3 * m},
                             args.keys_in_shared ? shared_keys : reinterpret_cast<uint64_t*>(mine),
                             histogram,
                             shared};
  const Candidates candidates{args.candidates.tokens + b * m, args.candidates.scores + b * m,
                              args.candidates.parents + b * m, args.candidates.m};
  build_tree(BlockTeam{}, candidates, args.root_tokens[b], args.prefix_lens[b], args.max_nodes,
             args.limits ? args.limits[2 * b] : args.max_nodes,
             args.limits ? args.limits[2 * b + 1] : args.candidates.m, scratch,
             args.out.request(b, args.max_nodes));
}

struct FlattenArgs {
  const int32_t* parents;      // [B, N]
  const int32_t* num_nodes;    // [B]
  const int32_t* prefix_lens;  // [B]
  int32_t n;
  int32_t* depths;  // [B, N], as the next
  int64_t* position_ids;
  int32_t* first_child;
  int32_t* next_sibling;
  uint64_t* tree_mask;  // [B, N, W]
};

// Each slot walks to the root by itself; a request's parents stay in the cache.
//   bytes = B * (4 N + 8 read, N * (20 + 8 W) written), W = mask_words(N)
//   flops = 0
__global__ void flatten_tree_kernel(FlattenArgs args) {
  const int64_t b = blockIdx.x, at = b * args.n;
  flatten_tree(BlockTeam{}, args.parents + at, args.n, args.num_nodes[b], args.prefix_lens[b],
               args.depths + at, args.position_ids + at, args.first_child + at,
               args.next_sibling + at, args.tree_mask + at * mask_words(args.n));
}

// The outputs of a batch of trees, checked.
TreeOut tree_out(const CudaArgs& cuda, int64_t batch, int64_t n, const Tensor& draft_tokens,
                 const Tensor& parents, const Tensor& depths, const Tensor& position_ids,
                 const Tensor& scores, const Tensor& first_child, const Tensor& next_sibling,
                 const Tensor& tree_mask, const Tensor& num_nodes) {
  return {cuda.output<int64_t, 2>(draft_tokens, "draft_tokens", {batch, n}),
          cuda.output<int32_t, 2>(parents, "parents", {batch, n}),
          cuda.output<int32_t, 2>(depths, "depths", {batch, n}),
          cuda.output<int64_t, 2>(position_ids, "position_ids", {batch, n}),
          cuda.output<float, 2>(scores, "scores", {batch, n}),
          cuda.output<int32_t, 2>(first_child, "first_child", {batch, n}),
          cuda.output<int32_t, 2>(next_sibling, "next_sibling", {batch, n}),
          reinterpret_cast<uint64_t*>(
              cuda.output<int64_t, 3>(tree_mask, "tree_mask", {batch, n, mask_words(n)})),
          cuda.output<int32_t, 1>(num_nodes, "num_nodes", {batch})};
}

using Tree = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tree allocate_tree(const CudaArgs& cuda, int64_t batch, int64_t n) {
  return {cuda.allocate<int64_t>({batch, n}), cuda.allocate<int32_t>({batch, n}),
          cuda.allocate<int32_t>({batch, n}), cuda.allocate<int64_t>({batch, n}),
          cuda.allocate<float>({batch, n}),   cuda.allocate<int32_t>({batch, n}),
          cuda.allocate<int32_t>({batch, n}), cuda.allocate<int64_t>({batch, n, mask_words(n)}),
          cuda.allocate<int32_t>({batch})};
}

void build_tree_out(const Tensor& root_tokens, const Tensor& prefix_lens,
                    const Tensor& candidate_tokens, const Tensor& candidate_scores,
                    const Tensor& candidate_parents, int64_t max_nodes,
                    const std::optional<Tensor>& limits, const Tensor& draft_tokens,
                    const Tensor& parents, const Tensor& depths, const Tensor& position_ids,
                    const Tensor& scores, const Tensor& first_child, const Tensor& next_sibling,
                    const Tensor& tree_mask, const Tensor& num_nodes) {
  check_rank(root_tokens, "root_tokens", 1);
  check_rank(candidate_tokens, "candidate_tokens", 2);
  const int64_t batch = root_tokens.size(0), m = candidate_tokens.size(1), n = max_nodes;
  if (n < 1 || n > INT32_MAX / 2) fail("max_nodes: expected at least 1, got ", n);
  if (m > INT32_MAX / 2) fail("candidate_tokens: expected fewer than 2^30 candidates, got ", m);
  const CudaArgs cuda(root_tokens);
  BuildArgs args{};
  args.root_tokens = cuda.input<int64_t, 1>(root_tokens, "root_tokens", {batch});
  args.prefix_lens = cuda.input<int32_t, 1>(prefix_lens, "prefix_lens", {batch});
  args.candidates = {cuda.input<int64_t, 2>(candidate_tokens, "candidate_tokens", {batch, m}),
                     cuda.input<float, 2>(candidate_scores, "candidate_scores", {batch, m}),
                     cuda.input<int32_t, 2>(candidate_parents, "candidate_parents", {batch, m}),
                     static_cast<int32_t>(m)};
  if (limits.has_value()) {
    args.limits = cuda.input<int32_t, 2>(*limits, "limits", {batch, 2});
  }
  args.max_nodes = static_cast<int32_t>(n);
  args.out = tree_out(cuda, batch, n, draft_tokens, parents, depths, position_ids, scores,
                      first_child, next_sibling, tree_mask, num_nodes);
  if (batch == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  const int64_t key_bytes = 8ll * sort_capacity(args.max_nodes);
  args.keys_in_shared = key_bytes <= kSharedKeyBytes;
  args.scratch_bytes = (24 * m + (args.keys_in_shared ? 0 : key_bytes) + 7) / 8 * 8;
  const Tensor scratch = cuda.allocate<uint8_t>({batch, args.scratch_bytes});
  args.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  build_tree_kernel<<<static_cast<unsigned>(batch), threads_for(std::max(m, n)),
                      args.keys_in_shared ? static_cast<size_t>(key_bytes) : 0, cuda.stream()>>>(
      args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tree build_tree_op(const Tensor& root_tokens, const Tensor& prefix_lens,
                   const Tensor& candidate_tokens, const Tensor& candidate_scores,
                   const Tensor& candidate_parents, int64_t max_nodes,
                   const std::optional<Tensor>& limits) {
  if (max_nodes < 1) fail("max_nodes: expected at least 1, got ", max_nodes);
  Tree results = allocate_tree(CudaArgs(root_tokens), root_tokens.numel(), max_nodes);
  std::apply(
      [&](const auto&... outs) {
        build_tree_out(root_tokens, prefix_lens, candidate_tokens, candidate_scores,
                       candidate_parents, max_nodes, limits, outs...);
      },
      results);
  return results;
}

struct MarginalsArgs {
  const int64_t* root_tokens;  // [B]
  const int32_t* prefix_lens;  // [B]
  Marginals marginals;         // of request 0; [B, depth, top_k] each
  const int32_t* limits;       // [B, 2] or null
  int32_t max_nodes;
  BlockScratch scratch;
  TreeOut out;
};

int64_t marginals_scratch_bytes(int64_t n, int64_t keys) {
  return 8 * keys + n * static_cast<int64_t>(8 + sizeof(OpenPrefix) + 12);
}

// One thread searches, N heap steps in shared memory, then the block sorts and writes.
//   bytes = B * (24 N + 20 read, N * (36 + 8 W) + 4 written), W = mask_words(N)
//   flops = B * N * (2 log2(N) + 2)
__global__ void build_tree_from_marginals_kernel(MarginalsArgs args) {
  __shared__ int32_t shared[1];
  const int64_t b = blockIdx.x, n = args.max_nodes;
  uint64_t* keys = reinterpret_cast<uint64_t*>(args.scratch.of_block());
  int64_t* tokens = reinterpret_cast<int64_t*>(keys + sort_capacity(args.max_nodes));
  OpenPrefix* open = reinterpret_cast<OpenPrefix*>(tokens + n);
  float* scores = reinterpret_cast<float*>(open + n);
  int32_t* ints = reinterpret_cast<int32_t*>(scores + n);
  const MarginalsScratch scratch{open, tokens, scores, ints, ints + n, keys, shared};
  const int64_t at = b * args.marginals.depth * args.marginals.top_k;
  const Marginals marginals{args.marginals.tokens + at, args.marginals.log_probs + at,
                            args.marginals.depth, args.marginals.top_k};
  build_tree_from_marginals(BlockTeam{}, marginals, args.root_tokens[b], args.prefix_lens[b],
                            args.max_nodes, args.limits ? args.limits[2 * b] : args.max_nodes,
                            args.limits ? args.limits[2 * b + 1] : marginals.depth, scratch,
                            args.out.request(b, n));
}

void build_tree_from_marginals_out(const Tensor& root_tokens, const Tensor& prefix_lens,
                                   const Tensor& tokens, const Tensor& log_probs, int64_t max_nodes,
                                   const std::optional<Tensor>& limits, const Tensor& draft_tokens,
                                   const Tensor& parents, const Tensor& depths,
                                   const Tensor& position_ids, const Tensor& scores,
                                   const Tensor& first_child, const Tensor& next_sibling,
                                   const Tensor& tree_mask, const Tensor& num_nodes) {
  check_rank(root_tokens, "root_tokens", 1);
  check_rank(tokens, "tokens", 3);
  const int64_t batch = root_tokens.size(0), n = max_nodes;
  const int64_t depth = tokens.size(1), top_k = tokens.size(2);
  if (n < 1 || n > INT32_MAX / 2) fail("max_nodes: expected at least 1, got ", n);
  if (std::max(depth, top_k) > INT32_MAX / 2) {
    fail("tokens: expected fewer than 2^30 positions and choices, got ", depth, " and ", top_k);
  }
  const CudaArgs cuda(root_tokens);
  MarginalsArgs args{};
  args.root_tokens = cuda.input<int64_t, 1>(root_tokens, "root_tokens", {batch});
  args.prefix_lens = cuda.input<int32_t, 1>(prefix_lens, "prefix_lens", {batch});
  args.marginals = {cuda.input<int64_t, 3>(tokens, "tokens", {batch, depth, top_k}),
                    cuda.input<float, 3>(log_probs, "log_probs", {batch, depth, top_k}),
                    static_cast<int32_t>(depth), static_cast<int32_t>(top_k)};
  if (limits.has_value()) args.limits = cuda.input<int32_t, 2>(*limits, "limits", {batch, 2});
  args.max_nodes = static_cast<int32_t>(n);
  args.out = tree_out(cuda, batch, n, draft_tokens, parents, depths, position_ids, scores,
                      first_child, next_sibling, tree_mask, num_nodes);
  if (batch == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  const ScratchOwner scratch(cuda, batch,
                             marginals_scratch_bytes(n, sort_capacity(args.max_nodes)));
  args.scratch = scratch.scratch();
  build_tree_from_marginals_kernel<<<static_cast<unsigned>(batch), threads_for(n),
                                     scratch.shared_bytes(), cuda.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tree build_tree_from_marginals_op(const Tensor& root_tokens, const Tensor& prefix_lens,
                                  const Tensor& tokens, const Tensor& log_probs, int64_t max_nodes,
                                  const std::optional<Tensor>& limits) {
  if (max_nodes < 1) fail("max_nodes: expected at least 1, got ", max_nodes);
  Tree results = allocate_tree(CudaArgs(root_tokens), root_tokens.numel(), max_nodes);
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
  check_rank(parents, "parents", 2);
  const int64_t batch = parents.size(0), n = parents.size(1);
  if (n > INT32_MAX / 2) fail("parents: expected fewer than 2^30 slots, got ", n);
  const CudaArgs cuda(parents);
  FlattenArgs args{};
  args.parents = cuda.input<int32_t, 2>(parents, "parents", {batch, n});
  args.num_nodes = cuda.input<int32_t, 1>(num_nodes, "num_nodes", {batch});
  args.prefix_lens = cuda.input<int32_t, 1>(prefix_lens, "prefix_lens", {batch});
  args.n = static_cast<int32_t>(n);
  args.depths = cuda.output<int32_t, 2>(depths, "depths", {batch, n});
  args.position_ids = cuda.output<int64_t, 2>(position_ids, "position_ids", {batch, n});
  args.first_child = cuda.output<int32_t, 2>(first_child, "first_child", {batch, n});
  args.next_sibling = cuda.output<int32_t, 2>(next_sibling, "next_sibling", {batch, n});
  args.tree_mask = reinterpret_cast<uint64_t*>(
      cuda.output<int64_t, 3>(tree_mask, "tree_mask", {batch, n, mask_words(n)}));
  if (batch == 0 || n == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  flatten_tree_kernel<<<static_cast<unsigned>(batch), threads_for(n), 0, cuda.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flatten_tree_op(const Tensor& parents,
                                                                   const Tensor& num_nodes,
                                                                   const Tensor& prefix_lens) {
  check_rank(parents, "parents", 2);
  const int64_t batch = parents.size(0), n = parents.size(1);
  const CudaArgs cuda(parents);
  auto results =
      std::make_tuple(cuda.allocate<int32_t>({batch, n}), cuda.allocate<int64_t>({batch, n}),
                      cuda.allocate<int32_t>({batch, n}), cuda.allocate<int32_t>({batch, n}),
                      cuda.allocate<int64_t>({batch, n, mask_words(n)}));
  std::apply(
      [&](const auto&... outs) { flatten_tree_out(parents, num_nodes, prefix_lens, outs...); },
      results);
  return results;
}

struct PathsArgs {
  const int32_t* parents;    // [B, N]
  const int32_t* num_nodes;  // [B]
  int32_t n;
  int64_t width;  // max_depth + 1
  BlockScratch scratch;
  int64_t* rows;  // [B, N, width]
};

// Shared memory: 4 N bytes where they fit, and two numbers per thread to count leaves.
//   bytes = B * (4 N + 4 read, 8 N * width written), the rows of leaves twice
//   flops = 0
__global__ void retrieve_indices_kernel(PathsArgs args) {
  __shared__ int32_t sums[512];
  const int64_t b = blockIdx.x, at = b * args.n;
  leaf_paths(BlockTeam{}, args.parents + at, args.n, args.num_nodes[b], args.width,
             reinterpret_cast<int32_t*>(args.scratch.of_block()), sums,
             args.rows + at * args.width);
}

void retrieve_indices_out(const Tensor& parents, const Tensor& num_nodes, int64_t max_depth,
                          const Tensor& indices) {
  check_rank(parents, "parents", 2);
  const int64_t batch = parents.size(0), n = parents.size(1), width = max_depth + 1;
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  if (n > INT32_MAX / 2) fail("parents: expected fewer than 2^30 slots, got ", n);
  const CudaArgs cuda(parents);
  PathsArgs args{};
  args.parents = cuda.input<int32_t, 2>(parents, "parents", {batch, n});
  args.num_nodes = cuda.input<int32_t, 1>(num_nodes, "num_nodes", {batch});
  args.n = static_cast<int32_t>(n);
  args.width = width;
  args.rows = cuda.output<int64_t, 3>(indices, "indices", {batch, n, width});
  if (batch == 0 || n == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  const ScratchOwner scratch(cuda, batch, 4 * n);
  args.scratch = scratch.scratch();
  retrieve_indices_kernel<<<static_cast<unsigned>(batch), threads_for(n), scratch.shared_bytes(),
                            cuda.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor retrieve_indices(const Tensor& parents, const Tensor& num_nodes, int64_t max_depth) {
  check_rank(parents, "parents", 2);
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  Tensor indices =
      CudaArgs(parents).allocate<int64_t>({parents.size(0), parents.size(1), max_depth + 1});
  retrieve_indices_out(parents, num_nodes, max_depth, indices);
  return indices;
}

constexpr int64_t kMostLeading = 8;

// A mask's leading dimensions and its last one.
struct MaskRows {
  int64_t shape[kMostLeading], stride[kMostLeading];
  int64_t dims;  // leading ones
  int64_t rows, width, step;
};

// The threads that share a row: blockDim.y rows to a block.
struct RowTeam {
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
};

struct MaskArgs {
  MaskRows in;
  const void* from;
  void* to;  // contiguous rows
  int64_t num_keys;
};

// A thread builds a word from 64 bytes.
//   bytes = rows * num_keys * (1 read, 1/8 written)
//   flops = 0
__global__ void pack_tree_mask_kernel(MaskArgs args) {
  const int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (r >= args.in.rows) return;
  pack_row(RowTeam{},
           static_cast<const uint8_t*>(args.from) +
               row_offset(r, args.in.shape, args.in.stride, args.in.dims),
           args.in.step, args.num_keys,
           static_cast<uint64_t*>(args.to) + r * mask_words(args.num_keys));
}

// A thread writes a key's byte.
//   bytes = rows * num_keys * (1/8 read, 1 written)
//   flops = 0
__global__ void unpack_tree_mask_kernel(MaskArgs args) {
  const int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (r >= args.in.rows) return;
  unpack_row(RowTeam{},
             static_cast<const uint64_t*>(args.from) +
                 row_offset(r, args.in.shape, args.in.stride, args.in.dims),
             args.in.step, args.num_keys, static_cast<bool*>(args.to) + r * args.num_keys);
}

MaskRows mask_rows(const Tensor& tensor, const char* name, ScalarType dtype) {
  if (tensor.dim() < 1) fail(name, ": expected at least 1 dimension, got 0");
  if (tensor.dim() > kMostLeading + 1) {
    fail(name, ": expected at most ", kMostLeading + 1, " dimensions on CUDA, got ", tensor.dim());
  }
  if (tensor.scalar_type() != dtype) {
    fail(name, ": expected dtype ", torch::headeronly::toString(dtype), ", got ",
         torch::headeronly::toString(tensor.scalar_type()));
  }
  MaskRows in{};
  in.dims = tensor.dim() - 1;
  in.rows = 1;
  for (int64_t i = 0; i < in.dims; ++i) {
    in.shape[i] = tensor.size(i);
    in.stride[i] = tensor.stride(i);
    in.rows *= in.shape[i];
  }
  in.width = tensor.size(in.dims);
  in.step = tensor.stride(in.dims);
  return in;
}

void check_mask_out(const CudaArgs& cuda, const MaskRows& in, const Tensor& out, const char* name,
                    ScalarType dtype, int64_t width) {
  cuda.check_device(out, name);
  const MaskRows written = mask_rows(out, name, dtype);
  bool same = written.dims == in.dims && written.width == width;
  for (int64_t i = 0; same && i < in.dims; ++i) same = written.shape[i] == in.shape[i];
  if (!same) fail(name, ": expected the input's shape with a last dimension of ", width);
  if (!out.is_contiguous()) fail(name, ": expected a contiguous tensor");
}

Tensor allocate_mask(const CudaArgs& cuda, const MaskRows& in, int64_t width, ScalarType dtype) {
  std::vector<int64_t> shape(in.shape, in.shape + in.dims);
  shape.push_back(width);
  return cuda.allocate(shape, dtype);
}

void check_num_keys(const MaskRows& in, int64_t num_keys) {
  if (num_keys < 0 || num_keys > in.width * kWordBits) {
    fail("num_keys: expected 0 to ", in.width * kWordBits, ", got ", num_keys);
  }
}

// Blocks of 128 threads, as many to a row as there is work for.
void launch_rows(void (*kernel)(MaskArgs), const MaskArgs& args, int64_t work,
                 const CudaArgs& cuda) {
  if (args.in.rows == 0 || work == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  unsigned x = 1;
  while (x < 128 && x < work) x *= 2;
  const dim3 block(x, 128 / x);
  kernel<<<static_cast<unsigned>((args.in.rows + block.y - 1) / block.y), block, 0,
           cuda.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void pack_tree_mask_out(const Tensor& mask, const Tensor& words) {
  const CudaArgs cuda(mask);
  cuda.check_device(mask, "mask");
  const MaskRows in = mask_rows(mask, "mask", ScalarType::Bool);
  check_mask_out(cuda, in, words, "words", ScalarType::Long, mask_words(in.width));
  launch_rows(&pack_tree_mask_kernel,
              MaskArgs{in, mask.const_data_ptr(), words.mutable_data_ptr(), in.width},
              mask_words(in.width), cuda);
}

Tensor pack_tree_mask(const Tensor& mask) {
  const MaskRows in = mask_rows(mask, "mask", ScalarType::Bool);
  Tensor words = allocate_mask(CudaArgs(mask), in, mask_words(in.width), ScalarType::Long);
  pack_tree_mask_out(mask, words);
  return words;
}

void unpack_tree_mask_out(const Tensor& words, int64_t num_keys, const Tensor& mask) {
  const CudaArgs cuda(words);
  cuda.check_device(words, "words");
  const MaskRows in = mask_rows(words, "words", ScalarType::Long);
  check_num_keys(in, num_keys);
  check_mask_out(cuda, in, mask, "mask", ScalarType::Bool, num_keys);
  launch_rows(&unpack_tree_mask_kernel,
              MaskArgs{in, words.const_data_ptr(), mask.mutable_data_ptr(), num_keys}, num_keys,
              cuda);
}

Tensor unpack_tree_mask(const Tensor& words, int64_t num_keys) {
  const MaskRows in = mask_rows(words, "words", ScalarType::Long);
  check_num_keys(in, num_keys);
  Tensor mask = allocate_mask(CudaArgs(words), in, num_keys, ScalarType::Bool);
  unpack_tree_mask_out(words, num_keys, mask);
  return mask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CUDA, m) {
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
