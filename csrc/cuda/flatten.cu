// build_tree and flatten_tree on CUDA: tree.h run by one thread block per request. A step's tree is
// a few thousand numbers, so a block keeps it in its cache; the launch is what costs.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "../cpu/common.h"
#include "../tree.h"

namespace eagle2 {
namespace {

struct BlockTeam {
  EAGLE2_HD int rank() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x);
#else
    return 0;
#endif
  }
  EAGLE2_HD int size() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockDim.x);
#else
    return 1;
#endif
  }
  EAGLE2_HD void sync() const {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
  EAGLE2_HD bool any(bool flag) const {
#if defined(__CUDA_ARCH__)
    return __syncthreads_or(flag) != 0;
#else
    return flag;
#endif
  }
  EAGLE2_HD int32_t add(int32_t* counter, int32_t value) const {
#if defined(__CUDA_ARCH__)
    return atomicAdd(counter, value);
#else
    return *counter + value;
#endif
  }
};

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

// Reads a request's candidates once per selection round (from the cache after the first), writes
// its tree. Shared memory: the histogram and, where they fit, the sort keys.
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
__global__ void flatten_tree_kernel(FlattenArgs args) {
  const int64_t b = blockIdx.x, at = b * args.n;
  flatten_tree(BlockTeam{}, args.parents + at, args.n, args.num_nodes[b], args.prefix_lens[b],
               args.depths + at, args.position_ids + at, args.first_child + at,
               args.next_sibling + at, args.tree_mask + at * mask_words(args.n));
}

constexpr int64_t kSharedKeyBytes = 32 << 10;

unsigned threads_for(int64_t work) {
  return static_cast<unsigned>(std::min<int64_t>(256, (std::max<int64_t>(work, 1) + 31) / 32 * 32));
}

// Tensors of one call: all on one device, of the shape and dtype named.
class CudaArgs {
 public:
  explicit CudaArgs(const Tensor& first) : device_(first.get_device_index()) {}

  template <typename T, int Rank>
  const T* input(const Tensor& tensor, const char* name,
                 const std::array<int64_t, Rank>& shape) const {
    check(tensor, name);
    const auto v = view<T, Rank>(tensor, name);
    check_sizes(v.size, name, shape);
    return v.data;
  }

  template <typename T, int Rank>
  T* output(const Tensor& tensor, const char* name, const std::array<int64_t, Rank>& shape) const {
    check(tensor, name);
    const auto v = mutable_view<T, Rank>(tensor, name);
    check_sizes(v.size, name, shape);
    return v.data;
  }

  template <typename T>
  Tensor allocate(std::initializer_list<int64_t> shape) const {
    return torch::stable::empty(
        shape, torch::headeronly::CppTypeToScalarType<T>::value, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, device_));
  }

  cudaStream_t stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

  int32_t device() const { return device_; }

 private:
  void check(const Tensor& tensor, const char* name) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != device_) {
      fail(name, ": expected a tensor on cuda:", device_, ", like the first argument");
    }
    if (!tensor.is_contiguous()) fail(name, ": expected a contiguous tensor");
  }

  template <size_t Rank>
  static void check_sizes(const int64_t* got, const char* name,
                          const std::array<int64_t, Rank>& want) {
    for (size_t i = 0; i < Rank; ++i) {
      if (got[i] != want[i]) {
        fail(name, ": expected size ", want[i], " in dimension ", i, ", got ", got[i]);
      }
    }
  }

  int32_t device_;
};

void check_rank(const Tensor& tensor, const char* name, int64_t rank) {
  if (tensor.dim() != rank) fail(name, ": expected ", rank, " dimensions, got ", tensor.dim());
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
  args.out = {cuda.output<int64_t, 2>(draft_tokens, "draft_tokens", {batch, n}),
              cuda.output<int32_t, 2>(parents, "parents", {batch, n}),
              cuda.output<int32_t, 2>(depths, "depths", {batch, n}),
              cuda.output<int64_t, 2>(position_ids, "position_ids", {batch, n}),
              cuda.output<float, 2>(scores, "scores", {batch, n}),
              cuda.output<int32_t, 2>(first_child, "first_child", {batch, n}),
              cuda.output<int32_t, 2>(next_sibling, "next_sibling", {batch, n}),
              reinterpret_cast<uint64_t*>(
                  cuda.output<int64_t, 3>(tree_mask, "tree_mask", {batch, n, mask_words(n)})),
              cuda.output<int32_t, 1>(num_nodes, "num_nodes", {batch})};
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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> build_tree_op(
    const Tensor& root_tokens, const Tensor& prefix_lens, const Tensor& candidate_tokens,
    const Tensor& candidate_scores, const Tensor& candidate_parents, int64_t max_nodes,
    const std::optional<Tensor>& limits) {
  if (max_nodes < 1) fail("max_nodes: expected at least 1, got ", max_nodes);
  const int64_t batch = root_tokens.numel(), n = max_nodes;
  const CudaArgs cuda(root_tokens);
  auto results = std::make_tuple(
      cuda.allocate<int64_t>({batch, n}), cuda.allocate<int32_t>({batch, n}),
      cuda.allocate<int32_t>({batch, n}), cuda.allocate<int64_t>({batch, n}),
      cuda.allocate<float>({batch, n}), cuda.allocate<int32_t>({batch, n}),
      cuda.allocate<int32_t>({batch, n}), cuda.allocate<int64_t>({batch, n, mask_words(n)}),
      cuda.allocate<int32_t>({batch}));
  std::apply(
      [&](const auto&... outs) {
        build_tree_out(root_tokens, prefix_lens, candidate_tokens, candidate_scores,
                       candidate_parents, max_nodes, limits, outs...);
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CUDA, m) {
  m.impl("build_tree", TORCH_BOX(&build_tree_op));
  m.impl("build_tree_out", TORCH_BOX(&build_tree_out));
  m.impl("flatten_tree", TORCH_BOX(&flatten_tree_op));
  m.impl("flatten_tree_out", TORCH_BOX(&flatten_tree_out));
}

}  // namespace eagle2
