// extend_draft_tree on CUDA: tree.h run by one thread block per request, a frontier entry to a
// thread.
#include "common.cuh"

namespace eagle2 {
namespace {

struct ExtendArgs {
  int64_t level, top_k, words;
  const int64_t* beam;   // [B, K]
  const uint64_t* mask;  // [B, K, W]
  int32_t* candidate_parents;
  int64_t parents_stride;  // of a request
  uint64_t* next_mask;     // [B, K, W]
};

//   bytes = B * (8 K * (1 + W) read, 4 K * K + 8 K * W written; 4 K + 8 K * W at level 0)
//   flops = 0
__global__ void extend_draft_tree_kernel(ExtendArgs args) {
  const int64_t b = blockIdx.x, row = b * args.top_k * args.words;
  extend_level(BlockTeam{}, args.level, args.top_k, args.words, args.beam + b * args.top_k,
               args.mask + row, args.candidate_parents + b * args.parents_stride,
               args.next_mask + row);
}

void extend_draft_tree_out(const Tensor& candidate_parents, const Tensor& draft_mask,
                           const Tensor& beam, int64_t level, const Tensor& next_draft_mask) {
  check_rank(draft_mask, "draft_mask", 3);
  const int64_t batch = draft_mask.size(0), top_k = draft_mask.size(1), words = draft_mask.size(2);
  const CudaArgs cuda(draft_mask);
  ExtendArgs args{};
  args.level = level;
  args.top_k = top_k;
  args.words = words;
  args.mask = reinterpret_cast<const uint64_t*>(
      cuda.input<int64_t, 3>(draft_mask, "draft_mask", {batch, top_k, words}));
  args.beam = cuda.input<int64_t, 2>(beam, "beam", {batch, top_k});
  cuda.check_device(candidate_parents, "candidate_parents");
  const auto parents = mutable_view<int32_t, 2>(candidate_parents, "candidate_parents");
  check_shape(parents, "candidate_parents", {batch, -1});
  if (parents.stride[1] != 1 && parents.size[1] > 1) {
    fail("candidate_parents: expected a contiguous last dimension, got stride ", parents.stride[1]);
  }
  args.candidate_parents = parents.data;
  args.parents_stride = parents.stride[0];
  if (top_k < 1) fail("draft_mask: expected a top_k of at least 1, got 0");
  // A level has a candidate at least, so one past them all is refused before it can overflow.
  if (level < 0 || level > parents.size[1]) {
    fail("level: expected 0 to ", parents.size[1], ", got ", level);
  }
  const int64_t needed = level_offset(level + 1, top_k);
  if (parents.size[1] < needed) {
    fail("candidate_parents: expected at least ", needed, " candidates for level ", level,
         " with top_k ", top_k, ", got ", parents.size[1]);
  }
  if (level * top_k > words * kWordBits) {
    fail("draft_mask: expected at least ", mask_words(level * top_k), " words for level ", level,
         " with top_k ", top_k, ", got ", words);
  }
  args.next_mask = reinterpret_cast<uint64_t*>(
      cuda.output<int64_t, 3>(next_draft_mask, "next_draft_mask", {batch, top_k, words}));
  if (batch == 0) return;
  if (args.next_mask == args.mask) fail("next_draft_mask: expected memory of its own");

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  extend_draft_tree_kernel<<<static_cast<unsigned>(batch), threads_for(top_k), 0, cuda.stream()>>>(
      args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor extend_draft_tree(const Tensor& candidate_parents, const Tensor& draft_mask,
                         const Tensor& beam, int64_t level) {
  check_rank(draft_mask, "draft_mask", 3);
  Tensor next =
      CudaArgs(draft_mask)
          .allocate<int64_t>({draft_mask.size(0), draft_mask.size(1), draft_mask.size(2)});
  extend_draft_tree_out(candidate_parents, draft_mask, beam, level, next);
  return next;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CUDA, m) {
  m.impl("extend_draft_tree", TORCH_BOX(&extend_draft_tree));
  m.impl("extend_draft_tree_out", TORCH_BOX(&extend_draft_tree_out));
}

}  // namespace eagle2
