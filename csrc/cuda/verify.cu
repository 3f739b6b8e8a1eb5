// verify_tree and verify_tree_coins on CUDA: tree.h run by one thread block per request. Each slot
// looks for its own step first, so that walking waits for no memory but the block's own.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <optional>
#include <tuple>

#include "common.cuh"

namespace eagle2 {
namespace {

struct Links {
  const int64_t* draft_tokens;  // [B, N], as the next
  const int32_t* first_child;
  const int32_t* next_sibling;
  const int32_t* num_nodes;  // [B] or null
  int64_t slots, max_depth;

  __device__ bool active(int64_t b) const {
    return slots > 0 && (num_nodes == nullptr || num_nodes[b] > 0);
  }
};

struct Accepted {
  int32_t* index;  // [B, max_depth + 1]
  int32_t* length;
  int64_t* bonus;
};

struct VerifyArgs {
  const int64_t* target_tokens;  // [B, N]
  Links links;
  BlockScratch scratch;
  Accepted accepted;
};

// Shared memory: 4 N bytes where they fit.
//   bytes = B * (24 N + 4 read at most, 4 * (max_depth + 1) + 12 written)
//   flops = 0
__global__ void verify_tree_kernel(VerifyArgs args) {
  const Links& links = args.links;
  const int64_t b = blockIdx.x, at = b * links.slots;
  int32_t* index = args.accepted.index + b * (links.max_depth + 1);
  if (!links.active(b)) {
    accept_nothing(BlockTeam{}, links.max_depth, index, args.accepted.length + b,
                   args.accepted.bonus + b);
    return;
  }
  accept_path(BlockTeam{}, args.target_tokens + at, links.draft_tokens + at, links.first_child + at,
              links.next_sibling + at, links.slots, links.max_depth,
              reinterpret_cast<int32_t*>(args.scratch.of_block()), index, args.accepted.length + b,
              args.accepted.bonus + b);
}

__device__ double widen(double x) { return x; }
__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Uniform numbers, float32 or float64.
struct Coins {
  const void* data;
  bool wide;

  __device__ double at(int64_t i) const {
    return wide ? static_cast<const double*>(data)[i] : static_cast<const float*>(data)[i];
  }
};

struct CoinArgs {
  const void* probabilities;  // [B, N, V]
  int64_t stride[3];
  int64_t vocab;
  Coins coins, final_coins;  // [B, N], [B]
  Links links;
  BlockScratch scratch;
  Accepted accepted;
};

// What a block needs: lane sums of a row, a step per slot, a bit per token.
int64_t coin_scratch_bytes(int64_t slots, int64_t vocab) {
  return 8 * draw_chunks(vocab) * kDrawLanes + static_cast<int64_t>(sizeof(CoinStep)) * slots +
         4 * ((vocab + 31) / 32);
}

// One block per request reads the row it draws from, and of other rows one probability for each
// child. The loads of the row are what it waits for, so a block is as large as blocks get. Scratch:
// lane sums and the tokens excluded.
//   bytes = B * ((V + N) * element + 32 N read, 4 * (max_depth + 1) + 12 written,
//           V / 4 + V / 8 of scratch)
//   flops = B * (V + 2 N)
template <typename T>
__global__ void __launch_bounds__(1024, 1) verify_tree_coins_kernel(CoinArgs args) {
  __shared__ double shared[2];
  __shared__ int64_t found[2];
  const Links& links = args.links;
  const int64_t b = blockIdx.x, at = b * links.slots;
  int32_t* index = args.accepted.index + b * (links.max_depth + 1);
  if (!links.active(b)) {
    accept_nothing(BlockTeam{}, links.max_depth, index, args.accepted.length + b,
                   args.accepted.bonus + b);
    return;
  }
  double* sums = reinterpret_cast<double*>(args.scratch.of_block());
  CoinStep* steps = reinterpret_cast<CoinStep*>(sums + draw_chunks(args.vocab) * kDrawLanes);
  uint32_t* excluded = reinterpret_cast<uint32_t*>(steps + links.slots);
  const int64_t* tokens = links.draft_tokens + at;
  const int32_t* siblings = links.next_sibling + at;
  const T* rows = static_cast<const T*>(args.probabilities) + b * args.stride[0];
  const auto probability = [&](int64_t slot, int64_t token) {
    if (token < 0 || token >= args.vocab) return 0.0;
    return mass_of(widen(rows[slot * args.stride[1] + token * args.stride[2]]));
  };
  const auto draw = [&](int64_t slot, int32_t first) {
    exclude_children(BlockTeam{}, first, siblings, tokens, links.slots, args.vocab, excluded);
    const T* row = rows + slot * args.stride[1];
    const auto mass = [&](int64_t token) {
      const double p = mass_of(widen(row[token * args.stride[2]]));
      return is_excluded(excluded, token) ? 0.0 : p;
    };
    return draw_token(BlockTeam{}, mass, args.vocab, args.final_coins.at(b),
                      DrawScratch{sums, shared, found});
  };
  accept_by_coins(
      BlockTeam{}, probability, [&](int64_t slot) { return args.coins.at(at + slot); }, draw,
      tokens, links.first_child + at, siblings, links.slots, links.max_depth, steps, index,
      args.accepted.length + b, args.accepted.bonus + b);
}

Links links_of(const CudaArgs& cuda, const Tensor& draft_tokens, const Tensor& first_child,
               const Tensor& next_sibling, const std::optional<Tensor>& num_nodes, int64_t batch,
               int64_t slots, int64_t max_depth) {
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  if (slots > INT32_MAX / 2) fail("draft_tokens: expected fewer than 2^30 slots, got ", slots);
  Links links{};
  links.draft_tokens = cuda.input<int64_t, 2>(draft_tokens, "draft_tokens", {batch, slots});
  links.first_child = cuda.input<int32_t, 2>(first_child, "first_child", {batch, slots});
  links.next_sibling = cuda.input<int32_t, 2>(next_sibling, "next_sibling", {batch, slots});
  if (num_nodes.has_value()) {
    links.num_nodes = cuda.input<int32_t, 1>(*num_nodes, "num_nodes", {batch});
  }
  links.slots = slots;
  links.max_depth = max_depth;
  return links;
}

Accepted accepted_of(const CudaArgs& cuda, const Tensor& accept_index, const Tensor& accept_length,
                     const Tensor& bonus_token, int64_t batch, int64_t max_depth) {
  return {cuda.output<int32_t, 2>(accept_index, "accept_index", {batch, max_depth + 1}),
          cuda.output<int32_t, 1>(accept_length, "accept_length", {batch}),
          cuda.output<int64_t, 1>(bonus_token, "bonus_token", {batch})};
}

using Results = std::tuple<Tensor, Tensor, Tensor>;

// accept_index, accept_length and bonus_token.
Results allocate_accepted(const CudaArgs& cuda, int64_t batch, int64_t max_depth) {
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  return {cuda.allocate<int32_t>({batch, max_depth + 1}), cuda.allocate<int32_t>({batch}),
          cuda.allocate<int64_t>({batch})};
}

void verify_tree_out(const Tensor& target_tokens, const Tensor& draft_tokens,
                     const Tensor& first_child, const Tensor& next_sibling, int64_t max_depth,
                     const std::optional<Tensor>& num_nodes, const Tensor& accept_index,
                     const Tensor& accept_length, const Tensor& bonus_token) {
  check_rank(target_tokens, "target_tokens", 2);
  const int64_t batch = target_tokens.size(0), slots = target_tokens.size(1);
  const CudaArgs cuda(target_tokens);
  VerifyArgs args{};
  args.target_tokens = cuda.input<int64_t, 2>(target_tokens, "target_tokens", {batch, slots});
  args.links =
      links_of(cuda, draft_tokens, first_child, next_sibling, num_nodes, batch, slots, max_depth);
  args.accepted = accepted_of(cuda, accept_index, accept_length, bonus_token, batch, max_depth);
  if (batch == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  const ScratchOwner scratch(cuda, batch, 4 * slots);
  args.scratch = scratch.scratch();
  verify_tree_kernel<<<static_cast<unsigned>(batch), threads_for(slots), scratch.shared_bytes(),
                       cuda.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Results verify_tree(const Tensor& target_tokens, const Tensor& draft_tokens,
                    const Tensor& first_child, const Tensor& next_sibling, int64_t max_depth,
                    const std::optional<Tensor>& num_nodes) {
  check_rank(target_tokens, "target_tokens", 2);
  Results results = allocate_accepted(CudaArgs(target_tokens), target_tokens.size(0), max_depth);
  std::apply(
      [&](const auto&... outs) {
        verify_tree_out(target_tokens, draft_tokens, first_child, next_sibling, max_depth,
                        num_nodes, outs...);
      },
      results);
  return results;
}

template <int Rank>
Coins coins_of(const CudaArgs& cuda, const Tensor& coins, const char* name,
               const std::array<int64_t, Rank>& shape) {
  if (coins.scalar_type() == ScalarType::Double) {
    return {cuda.input<double, Rank>(coins, name, shape), true};
  }
  return {cuda.input<float, Rank>(coins, name, shape), false};
}

using CoinKernel = void (*)(CoinArgs);

CoinKernel coin_kernel(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return &verify_tree_coins_kernel<double>;
    case ScalarType::Float:
      return &verify_tree_coins_kernel<float>;
    case ScalarType::Half:
      return &verify_tree_coins_kernel<__half>;
    case ScalarType::BFloat16:
      return &verify_tree_coins_kernel<__nv_bfloat16>;
    default:
      fail("target_probs: expected a float dtype, got ", torch::headeronly::toString(type));
  }
}

void verify_tree_coins_out(const Tensor& target_probs, const Tensor& draft_tokens,
                           const Tensor& first_child, const Tensor& next_sibling,
                           const Tensor& coins, const Tensor& final_coins, int64_t max_depth,
                           const std::optional<Tensor>& num_nodes, const Tensor& accept_index,
                           const Tensor& accept_length, const Tensor& bonus_token) {
  check_rank(target_probs, "target_probs", 3);
  const CoinKernel kernel = coin_kernel(target_probs.scalar_type());
  const int64_t batch = target_probs.size(0), slots = target_probs.size(1);
  const CudaArgs cuda(target_probs);
  cuda.check_device(target_probs, "target_probs");
  CoinArgs args{};
  args.probabilities = target_probs.const_data_ptr();
  for (int i = 0; i < 3; ++i) args.stride[i] = target_probs.stride(i);
  args.vocab = target_probs.size(2);
  if (args.vocab < 1) fail("target_probs: expected a vocabulary of at least 1, got 0");
  args.links =
      links_of(cuda, draft_tokens, first_child, next_sibling, num_nodes, batch, slots, max_depth);
  args.coins = coins_of<2>(cuda, coins, "coins", {batch, slots});
  args.final_coins = coins_of<1>(cuda, final_coins, "final_coins", {batch});
  args.accepted = accepted_of(cuda, accept_index, accept_length, bonus_token, batch, max_depth);
  if (batch == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  const ScratchOwner scratch(cuda, batch, coin_scratch_bytes(slots, args.vocab));
  args.scratch = scratch.scratch();
  const unsigned threads = threads_for(std::max(slots, args.vocab), 1024);
  kernel<<<static_cast<unsigned>(batch), threads, scratch.shared_bytes(), cuda.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Results verify_tree_coins(const Tensor& target_probs, const Tensor& draft_tokens,
                          const Tensor& first_child, const Tensor& next_sibling,
                          const Tensor& coins, const Tensor& final_coins, int64_t max_depth,
                          const std::optional<Tensor>& num_nodes) {
  check_rank(target_probs, "target_probs", 3);
  Results results = allocate_accepted(CudaArgs(target_probs), target_probs.size(0), max_depth);
  std::apply(
      [&](const auto&... outs) {
        verify_tree_coins_out(target_probs, draft_tokens, first_child, next_sibling, coins,
                              final_coins, max_depth, num_nodes, outs...);
      },
      results);
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CUDA, m) {
  m.impl("verify_tree", TORCH_BOX(&verify_tree));
  m.impl("verify_tree_out", TORCH_BOX(&verify_tree_out));
  m.impl("verify_tree_coins", TORCH_BOX(&verify_tree_coins));
  m.impl("verify_tree_coins_out", TORCH_BOX(&verify_tree_coins_out));
}

}  // namespace eagle2
