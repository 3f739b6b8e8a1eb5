// expand_topk and extend_draft_tree: one level of the draft tree. A row of logits is read once, a
// chunk at a time, for its maximum and its exponentials (sweep.h); what the sweep leaves as
// possible candidates is ranked by (logit, id).
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "../tree.h"
#include "args.h"
#include "rows.h"
#include "sweep.h"

namespace eagle2 {
namespace {

struct ExpandArgs {
  Logits logits;  // [B, P, V]
  int64_t batch, parents, vocab, top_k;
  const Packed<float, 2>& beam_scores;
  const std::optional<Packed<int64_t, 1>>& draft_to_target;
  int64_t* candidate_tokens;  // [B, P * K], as the next
  float* candidate_scores;
};

// Puts the k best logits of row (b, p) into `top` and returns the sum of e^(x - best one). Any
// dtype, any values.
template <typename T>
double read_row(const Logits& logits, int64_t b, int64_t p, TopK<T>& top) {
  thread_local std::vector<T> chunk(kChunk);
  T peak = -INFINITY;
  double total = 0;
  for (int64_t first = 0; first < logits.size[2]; first += kChunk) {
    const int64_t count = std::min(kChunk, logits.size[2] - first);
    read_logits(logits, b, p, first, count, chunk.data());
    const T highest = largest(chunk.data(), count);
    if (highest == -INFINITY) continue;
    if (highest > peak) {
      total *= std::exp(static_cast<double>(peak) - static_cast<double>(highest));
      peak = highest;
    }
    total += sum_exp(chunk.data(), count, peak);
    top.feed(chunk.data(), count, first);
  }
  return total;
}

// Offers the elements >= bound of some groups of the part [first, end): those whose index modulo
// `width` is one of `places`, which ascend.
template <typename T>
void offer_groups(const T* row, int64_t stride, int64_t first, int64_t end, int64_t width,
                  const int32_t* places, int64_t count, float bound, TopK<float>& top) {
  for (int64_t i = first; i < end; i += width) {
    for (int64_t g = 0; g < count; ++g) {
      const int64_t id = i + places[g];
      const float x = static_cast<float>(row[id * stride]);
      if (x >= bound) top.offer(x, id);
    }
  }
}

// read_row of float32, float16 and bfloat16, where only the few groups that can hold one of the k
// best are looked at again. Returns 0 where the row is not one for the sweep.
double sweep_row(const Logits& logits, int64_t b, int64_t p, TopK<float>& top) {
  const SweepKernel& kernel = sweep_kernel();
  const int64_t vocab = logits.size[2], stride = logits.stride[2], width = kernel.groups;
  // Read in place as far as whole groups go; what is left at the end is a part by itself.
  const int64_t whole = vocab - vocab % width;
  const int64_t whole_parts = (whole + kernel.part - 1) / kernel.part;
  const int64_t parts = whole_parts + (whole < vocab);
  const auto start = [&](int64_t part) { return std::min(part * kernel.part, whole); };
  const auto end = [&](int64_t part) { return part < whole_parts ? start(part + 1) : vocab; };
  thread_local std::vector<float> ranks, copy(kernel.chunk);
  ranks.resize(static_cast<size_t>(parts * width));
  const bool in_place = stride == 1 && logits.type != ScalarType::Half;
  const bool bfloat16 = in_place && logits.type == ScalarType::BFloat16;

  SweepState state;
  for (int64_t part = 0; part < parts;) {
    const int64_t next =
        part < whole_parts ? std::min(part + kernel.chunk / kernel.part, whole_parts) : parts;
    const int64_t first = start(part), count = end(next - 1) - first;
    float* const out = ranks.data() + part * width;
    const void* const x = logits.at(b, p, first);
    bool taken;
    if (in_place && part < whole_parts) {
      taken = bfloat16 ? kernel.bfloat16s(static_cast<const uint16_t*>(x), count, &state, out)
                       : kernel.floats(static_cast<const float*>(x), count, &state, out);
    } else {
      const int64_t padded = (count + width - 1) / width * width;
      read_logits(logits, b, p, first, count, copy.data());
      std::fill(copy.begin() + count, copy.begin() + padded, -INFINITY);
      taken = kernel.floats(copy.data(), padded, &state, out);
    }
    if (!taken) return 0;
    part = next;
  }
  if (!kernel.complete(state)) return 0;

  const float bound = kernel.bound(ranks.data(), parts * width, state, top.k());
  if (bound == 0) return 0;
  const float least = kernel.least(bound);
  const void* const row = logits.at(b, p, 0);
  int32_t places[kMostSweepGroups];
  for (int64_t part = 0, mixed_parts = bfloat16 ? whole_parts : 0; part < parts; ++part) {
    const int64_t count = kernel.reached(ranks.data(), parts, mixed_parts, bound, &part, places);
    if (count == 0) break;
    const auto offer = [&](const auto* x) {
      offer_groups(x, stride, start(part), end(part), width, places, count, least, top);
    };
    switch (logits.type) {
      case ScalarType::Float:
        offer(static_cast<const float*>(row));
        break;
      case ScalarType::BFloat16:
        offer(static_cast<const c10::BFloat16*>(row));
        break;
      default:
        offer(static_cast<const c10::Half*>(row));
    }
  }
  return state.total / static_cast<double>(kernel.term(top.best(), state));
}

// The candidates of parent p of request b.
template <typename T>
void expand_row(const ExpandArgs& args, int64_t b, int64_t p) {
  const float beam_score = args.beam_scores.row(b)[p];
  const int64_t at = (b * args.parents + p) * args.top_k;
  int64_t* tokens = args.candidate_tokens + at;
  float* scores = args.candidate_scores + at;
  std::fill_n(tokens, args.top_k, int64_t{0});
  std::fill_n(scores, args.top_k, -INFINITY);
  if (!(beam_score > -INFINITY)) return;  // a dead parent: its logits are not read

  thread_local TopK<T> top;
  top.start(std::min(args.top_k, args.vocab));
  double total = 0;
  if constexpr (std::is_same_v<T, float>) total = sweep_row(args.logits, b, p, top);
  if (total == 0) total = read_row(args.logits, b, p, top);
  const std::vector<Ranked<T>>& ranked = top.finish();
  if (ranked.empty()) return;
  const T peak = ranked[0].value, log_total = static_cast<T>(std::log(total));
  for (const Ranked<T>& candidate : ranked) {
    const float score = static_cast<float>(((candidate.value - peak) - log_total) + beam_score);
    if (score > -INFINITY) {
      *scores = score;
      *tokens = args.draft_to_target ? args.draft_to_target->row(0)[candidate.id] : candidate.id;
    }
    ++scores;
    ++tokens;
  }
}

// The best top_k of one request's candidates by (score, index). Each parent's `top_k` are in that
// order already, so their lists are merged.
void select_beam(const float* scores, int64_t parents, int64_t top_k, int64_t* beam) {
  thread_local std::vector<int64_t> heads;
  heads.assign(static_cast<size_t>(parents), 0);
  for (int64_t j = 0; j < top_k; ++j) {
    int64_t best = -1;
    float best_score = -INFINITY;
    for (int64_t p = 0; p < parents; ++p) {
      const int64_t at = p * top_k + heads[p];
      if (heads[p] < top_k && (best < 0 || scores[at] > best_score)) {
        best = p;
        best_score = scores[at];
      }
    }
    beam[j] = best * top_k + heads[best]++;
  }
}

struct ExpandOut {
  int64_t* candidate_tokens;  // [B, P * K], as the next
  float* candidate_scores;
  int64_t *beam, *beam_tokens;  // [B, K], as the next
  float* beam_scores;
  int32_t* beam_rows;
};

// `outputs(batch, candidates)` gives the places to write to, once the inputs are checked.
template <typename Outputs>
void expand(const Tensor& logits, const Tensor& beam_scores, int64_t top_k,
            const std::optional<Tensor>& draft_to_target, const Outputs& outputs) {
  const Logits x = logits_view(logits, "logits");
  const int64_t batch = x.size[0], parents = x.size[1], vocab = x.size[2];
  if (parents < 1) fail("logits: expected at least one parent row, got 0");
  if (top_k < 1) fail("top_k: expected at least 1, got ", top_k);
  const Packed<float, 2> parent_scores(beam_scores, "beam_scores", {batch, parents});
  const auto map = packed<int64_t, 1>(draft_to_target, "draft_to_target", {vocab});
  const int64_t count = parents * top_k;
  const ExpandOut out = outputs(batch, count);
  const ExpandArgs args{x,
                        batch,
                        parents,
                        vocab,
                        top_k,
                        parent_scores,
                        map,
                        out.candidate_tokens,
                        out.candidate_scores};

  const int64_t grain = std::max<int64_t>(1, 16384 / vocab);
  parallel_for(batch * parents, grain, [&args](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / args.parents, p = row % args.parents;
      if (args.logits.type == ScalarType::Double) {
        expand_row<double>(args, b, p);
      } else {
        expand_row<float>(args, b, p);
      }
    }
  });
  for (int64_t b = 0; b < batch; ++b) {
    const float* scores = out.candidate_scores + b * count;
    select_beam(scores, parents, top_k, out.beam + b * top_k);
    for (int64_t j = b * top_k; j < (b + 1) * top_k; ++j) {
      out.beam_tokens[j] = out.candidate_tokens[b * count + out.beam[j]];
      out.beam_scores[j] = scores[out.beam[j]];
      out.beam_rows[j] = static_cast<int32_t>(out.beam[j] / top_k);
    }
  }
}

void expand_topk_out(const Tensor& logits, const Tensor& beam_scores, int64_t top_k,
                     const std::optional<Tensor>& draft_to_target, const Tensor& candidate_tokens,
                     const Tensor& candidate_scores, const Tensor& beam, const Tensor& beam_tokens,
                     const Tensor& next_beam_scores, const Tensor& beam_rows) {
  expand(logits, beam_scores, top_k, draft_to_target, [&](int64_t batch, int64_t count) {
    return ExpandOut{output<int64_t, 2>(candidate_tokens, "candidate_tokens", {batch, count}),
                     output<float, 2>(candidate_scores, "candidate_scores", {batch, count}),
                     output<int64_t, 2>(beam, "beam", {batch, top_k}),
                     output<int64_t, 2>(beam_tokens, "beam_tokens", {batch, top_k}),
                     output<float, 2>(next_beam_scores, "next_beam_scores", {batch, top_k}),
                     output<int32_t, 2>(beam_rows, "beam_rows", {batch, top_k})};
  });
}

using Expanded = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Expanded expand_topk(const Tensor& logits, const Tensor& beam_scores, int64_t top_k,
                     const std::optional<Tensor>& draft_to_target) {
  std::optional<Expanded> results;
  expand(logits, beam_scores, top_k, draft_to_target, [&](int64_t batch, int64_t count) {
    results.emplace(allocate<int64_t>({batch, count}), allocate<float>({batch, count}),
                    allocate<int64_t>({batch, top_k}), allocate<int64_t>({batch, top_k}),
                    allocate<float>({batch, top_k}), allocate<int32_t>({batch, top_k}));
    const auto& [tokens, scores, beam, beam_tokens, next_scores, beam_rows] = *results;
    return ExpandOut{
        static_cast<int64_t*>(tokens.data_ptr()),    static_cast<float*>(scores.data_ptr()),
        static_cast<int64_t*>(beam.data_ptr()),      static_cast<int64_t*>(beam_tokens.data_ptr()),
        static_cast<float*>(next_scores.data_ptr()), static_cast<int32_t*>(beam_rows.data_ptr())};
  });
  return *std::move(results);
}

void extend_draft_tree_out(const Tensor& candidate_parents, const Tensor& draft_mask,
                           const Tensor& beam, int64_t level, const Tensor& next_draft_mask) {
  const Packed<int64_t, 3> mask(draft_mask, "draft_mask", {-1, -1, -1});
  const int64_t batch = mask.size(0), top_k = mask.size(1), words = mask.size(2);
  const Packed<int64_t, 2> frontier(beam, "beam", {batch, top_k});
  if (!candidate_parents.is_cpu()) fail("candidate_parents: expected a CPU tensor");
  const auto parents = mutable_view<int32_t, 2>(candidate_parents, "candidate_parents");
  check_shape(parents, "candidate_parents", {batch, -1});
  if (parents.stride[1] != 1 && parents.size[1] > 1) {
    fail("candidate_parents: expected a contiguous last dimension, got stride ", parents.stride[1]);
  }
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
  int64_t* next = output<int64_t, 3>(next_draft_mask, "next_draft_mask", {batch, top_k, words});
  if (next == mask.row(0) && batch > 0) fail("next_draft_mask: expected memory of its own");
  for (int64_t b = 0; b < batch; ++b) {
    extend_level(SoloTeam{}, level, top_k, words, frontier.row(b),
                 reinterpret_cast<const uint64_t*>(mask.row(b)), &parents(b),
                 reinterpret_cast<uint64_t*>(next + b * top_k * words));
  }
}

Tensor extend_draft_tree(const Tensor& candidate_parents, const Tensor& draft_mask,
                         const Tensor& beam, int64_t level) {
  if (draft_mask.dim() != 3) fail("draft_mask: expected 3 dimensions, got ", draft_mask.dim());
  Tensor next = allocate<int64_t>({draft_mask.size(0), draft_mask.size(1), draft_mask.size(2)});
  extend_draft_tree_out(candidate_parents, draft_mask, beam, level, next);
  return next;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("expand_topk", TORCH_BOX(&expand_topk));
  m.impl("expand_topk_out", TORCH_BOX(&expand_topk_out));
  m.impl("extend_draft_tree", TORCH_BOX(&extend_draft_tree));
  m.impl("extend_draft_tree_out", TORCH_BOX(&extend_draft_tree_out));
}

}  // namespace eagle2
