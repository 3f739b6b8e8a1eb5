// process_logits, count_tokens, mark_tokens and token_logprobs. Bias and penalties touch only the
// tokens they concern: a request's are collected once, from its bias list, prompt mask and counts,
// and each of its rows merges them with the tokens of its own path. Other logits are not read.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../tree.h"
#include "args.h"
#include "rows.h"

namespace eagle2 {
namespace {

// A token whose logit changes whatever the path: what is added, and where it occurred.
template <typename A>
struct Touched {
  int64_t token;
  A bias;
  bool in_prompt;
  int64_t count;  // in the output
};

// The penalties of one request, in the precision of the arithmetic.
template <typename A>
struct Penalties {
  A repetition, frequency, presence;

  bool any() const { return repetition != 1 || frequency != 0 || presence != 0; }

  // A banned token stays banned, whatever NaN or infinity it meets.
  A apply(A x, const Touched<A>& t) const {
    if (x == -INFINITY || t.bias == -INFINITY) return -INFINITY;
    A y = x + t.bias;
    if (t.in_prompt || t.count > 0) y = y > 0 ? y / repetition : y * repetition;
    if (t.count > 0) {
      const A frequent = frequency * static_cast<A>(t.count);
      y = y - frequent - presence;
    }
    return y;
  }
};

// The arguments of process_logits but the logits.
struct Processors {
  std::optional<Packed<int64_t, 2>> draft_tokens;
  std::optional<Packed<int32_t, 2>> parents;
  std::optional<Packed<int32_t, 1>> num_nodes;
  std::optional<Packed<int32_t, 2>> prompt_mask, output_counts;
  std::optional<Packed<float, 1>> repetition, frequency, presence;
  std::optional<Packed<int64_t, 2>> bias_tokens;
  std::optional<Packed<float, 2>> bias_values;

  template <typename A>
  Penalties<A> penalties(int64_t b) const {
    return {repetition ? static_cast<A>((*repetition)[b]) : 1,
            frequency ? static_cast<A>((*frequency)[b]) : 0,
            presence ? static_cast<A>((*presence)[b]) : 0};
  }
};

// Tokens of the history, ascending. Blocks of 32 without any are passed over at once.
template <typename A>
void collect_history(const Processors& p, int64_t b, int64_t vocab,
                     std::vector<Touched<A>>& touched) {
  constexpr int64_t kBlock = 32;
  const int32_t* mask = p.prompt_mask ? p.prompt_mask->row(b) : nullptr;
  const int32_t* counts = p.output_counts ? p.output_counts->row(b) : nullptr;
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int64_t width = std::min(kBlock, vocab - first);
    const uint32_t word = mask ? static_cast<uint32_t>(mask[first / kBlock]) : 0;
    int32_t any = 0;
    if (counts) {
      for (int64_t i = 0; i < width; ++i) any |= counts[first + i];
    }
    if (word == 0 && any == 0) continue;
    for (int64_t i = 0; i < width; ++i) {
      const bool in_prompt = word >> i & 1;
      const int64_t count = counts ? std::max(counts[first + i], 0) : 0;
      if (in_prompt || count > 0) touched.push_back({first + i, 0, in_prompt, count});
    }
  }
}

// Adds the request's biases; the list stays ascending, one entry per token.
template <typename A>
void merge_bias(const Processors& p, int64_t b, int64_t vocab, std::vector<Touched<A>>& touched) {
  if (!p.bias_tokens) return;
  const int64_t* tokens = p.bias_tokens->row(b);
  const float* values = p.bias_values->row(b);
  for (int64_t i = 0; i < p.bias_tokens->size(1); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab) continue;
    touched.push_back({tokens[i], static_cast<A>(values[i]), false, 0});
  }
  std::stable_sort(touched.begin(), touched.end(),
                   [](const auto& x, const auto& y) { return x.token < y.token; });
  size_t kept = 0;
  for (size_t i = 0; i < touched.size(); ++i) {
    if (kept > 0 && touched[kept - 1].token == touched[i].token) {
      touched[kept - 1].bias += touched[i].bias;
    } else {
      touched[kept++] = touched[i];
    }
  }
  touched.resize(kept);
}

// Draft tokens of the path from the root's child down to `slot`, ascending; false when there is no
// such path.
bool collect_path(const Processors& p, int64_t b, int64_t slots, int64_t slot, int64_t vocab,
                  std::vector<int64_t>& path) {
  path.clear();
  const int32_t count =
      static_cast<int32_t>(p.num_nodes ? clamp_index((*p.num_nodes)[b], 0, slots) : slots);
  if (slot >= count) return false;
  if (!p.parents) return true;
  const int32_t* parents = p.parents->row(b);
  const int64_t* tokens = p.draft_tokens->row(b);
  const int32_t depth = depth_of(parents, count, static_cast<int32_t>(slot));
  if (depth < 0) return false;
  int64_t at = slot;
  for (int32_t step = 0; step < depth; ++step) {
    if (tokens[at] >= 0 && tokens[at] < vocab) path.push_back(tokens[at]);
    at = parents[at];
  }
  std::sort(path.begin(), path.end());
  return true;
}

// One row of logits, edited in place.
template <typename T, typename A>
void process_row(T* row, int64_t stride, const Penalties<A>& penalties,
                 const std::vector<Touched<A>>& touched, const std::vector<int64_t>& path) {
  size_t next = 0;
  const auto edit = [&](const Touched<A>& t) {
    T& logit = row[t.token * stride];
    logit = static_cast<T>(penalties.apply(static_cast<A>(logit), t));
  };
  for (size_t i = 0; i < path.size();) {
    const int64_t token = path[i];
    while (next < touched.size() && touched[next].token < token) edit(touched[next++]);
    Touched<A> t{token, 0, false, 0};
    if (next < touched.size() && touched[next].token == token) t = touched[next++];
    for (; i < path.size() && path[i] == token; ++i) ++t.count;
    edit(t);
  }
  while (next < touched.size()) edit(touched[next++]);
}

template <typename T, typename A>
void process_typed(const Logits& logits, const Processors& p) {
  const int64_t batch = logits.size[0], slots = logits.size[1], vocab = logits.size[2];
  std::vector<std::vector<Touched<A>>> touched(static_cast<size_t>(batch));
  parallel_for(batch, std::max<int64_t>(1, (int64_t{1} << 16) / vocab),
               [&](int64_t begin, int64_t end) {
                 for (int64_t b = begin; b < end; ++b) {
                   if (p.penalties<A>(b).any()) collect_history(p, b, vocab, touched[b]);
                   merge_bias(p, b, vocab, touched[b]);
                 }
               });
  parallel_for(batch * slots, 8, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> path;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / slots, slot = r % slots;
      const Penalties<A> penalties = p.penalties<A>(b);
      if (!collect_path(p, b, slots, slot, vocab, path)) continue;
      if (!penalties.any()) path.clear();
      T* row = static_cast<T*>(const_cast<void*>(logits.at(b, slot, 0)));
      process_row<T, A>(row, logits.stride[2], penalties, touched[b], path);
    }
  });
}

void process_logits(const Tensor& logits, const std::optional<Tensor>& draft_tokens,
                    const std::optional<Tensor>& parents, const std::optional<Tensor>& num_nodes,
                    const std::optional<Tensor>& prompt_mask,
                    const std::optional<Tensor>& output_counts,
                    const std::optional<Tensor>& repetition_penalty,
                    const std::optional<Tensor>& frequency_penalty,
                    const std::optional<Tensor>& presence_penalty,
                    const std::optional<Tensor>& bias_tokens,
                    const std::optional<Tensor>& bias_values) {
  Logits x = logits_view(logits, "logits");
  check_written(logits, "logits");
  x.data = static_cast<const char*>(logits.mutable_data_ptr());
  const int64_t batch = x.size[0], slots = x.size[1], vocab = x.size[2];
  if (draft_tokens.has_value() != parents.has_value() || (!parents.has_value() && slots > 1)) {
    fail("draft_tokens, parents: expected both, or neither and one row per request");
  }
  if (bias_tokens.has_value() != bias_values.has_value()) {
    fail("bias_tokens, bias_values: expected both or neither");
  }
  if (!output_counts.has_value() &&
      (repetition_penalty.has_value() || frequency_penalty.has_value() ||
       presence_penalty.has_value())) {
    fail("output_counts: expected a tensor, because a penalty counts tokens");
  }
  const auto biased = packed<int64_t, 2>(bias_tokens, "bias_tokens", {batch, -1});
  const int64_t width = biased ? biased->size(1) : 0;
  const Processors p{packed<int64_t, 2>(draft_tokens, "draft_tokens", {batch, slots}),
                     packed<int32_t, 2>(parents, "parents", {batch, slots}),
                     packed<int32_t, 1>(num_nodes, "num_nodes", {batch}),
                     packed<int32_t, 2>(prompt_mask, "prompt_mask", {batch, (vocab + 31) / 32}),
                     packed<int32_t, 2>(output_counts, "output_counts", {batch, vocab}),
                     packed<float, 1>(repetition_penalty, "repetition_penalty", {batch}),
                     packed<float, 1>(frequency_penalty, "frequency_penalty", {batch}),
                     packed<float, 1>(presence_penalty, "presence_penalty", {batch}),
                     biased,
                     packed<float, 2>(bias_values, "bias_values", {batch, width})};
  switch (x.type) {
    case ScalarType::Double:
      return process_typed<double, double>(x, p);
    case ScalarType::Float:
      return process_typed<float, float>(x, p);
    case ScalarType::Half:
      return process_typed<c10::Half, float>(x, p);
    default:
      return process_typed<c10::BFloat16, float>(x, p);
  }
}

// Calls visit(request, token) for each token in [0, limit).
template <typename Visit>
void visit_tokens(const Tensor& tokens, int64_t batch, int64_t limit, const Visit& visit) {
  const Packed<int64_t, 2> ids(tokens, "tokens", {batch, -1});
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < ids.size(1); ++i) {
      const int64_t token = ids.row(b)[i];
      if (token >= 0 && token < limit) visit(b, token);
    }
  }
}

View<int32_t, 2> written_rows(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) fail(name, ": expected a CPU tensor");
  return mutable_view<int32_t, 2>(tensor, name);
}

void count_tokens(const Tensor& counts, const Tensor& tokens) {
  const auto rows = written_rows(counts, "counts");
  visit_tokens(tokens, rows.size[0], rows.size[1],
               [&](int64_t b, int64_t token) { ++rows(b, token); });
}

void mark_tokens(const Tensor& mask, const Tensor& tokens) {
  const auto rows = written_rows(mask, "mask");
  visit_tokens(tokens, rows.size[0], 32 * rows.size[1], [&](int64_t b, int64_t token) {
    int32_t& word = rows(b, token / 32);
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | uint32_t{1} << (token % 32));
  });
}

template <typename A>
float logprob_at(const Logits& logits, int64_t b, int64_t slot, int64_t token) {
  const int64_t vocab = logits.size[2];
  if (token < 0 || token >= vocab) return -INFINITY;
  thread_local std::vector<A> row;
  row.resize(static_cast<size_t>(vocab));
  read_logits(logits, b, slot, 0, vocab, row.data());
  if (row[token] == -INFINITY) return -INFINITY;
  const A peak = largest(row.data(), vocab);
  const double total = sum_exp(row.data(), vocab, peak);
  return static_cast<float>(static_cast<double>(row[token] - peak) - std::log(total));
}

void token_logprobs_out(const Tensor& logits, const Tensor& slots, const Tensor& tokens,
                        const Tensor& logprobs) {
  const Logits x = logits_view(logits, "logits");
  const Packed<int32_t, 2> at(slots, "slots", {x.size[0], -1});
  const int64_t batch = x.size[0], width = at.size(1);
  const Packed<int64_t, 2> ids(tokens, "tokens", {batch, width});
  float* out = output<float, 2>(logprobs, "logprobs", {batch, width});
  const int64_t grain = std::max<int64_t>(1, 8192 / x.size[2]);
  parallel_for(batch * width, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / width, slot = at.row(b)[i % width], token = ids.row(b)[i % width];
      if (slot < 0 || slot >= x.size[1]) {
        out[i] = 0;
      } else if (x.type == ScalarType::Double) {
        out[i] = logprob_at<double>(x, b, slot, token);
      } else {
        out[i] = logprob_at<float>(x, b, slot, token);
      }
    }
  });
}

Tensor token_logprobs(const Tensor& logits, const Tensor& slots, const Tensor& tokens) {
  if (slots.dim() != 2) fail("slots: expected 2 dimensions, got ", slots.dim());
  Tensor logprobs = allocate<float>({slots.size(0), slots.size(1)});
  token_logprobs_out(logits, slots, tokens, logprobs);
  return logprobs;
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("process_logits", TORCH_BOX(&process_logits));
  m.impl("count_tokens", TORCH_BOX(&count_tokens));
  m.impl("mark_tokens", TORCH_BOX(&mark_tokens));
  m.impl("token_logprobs", TORCH_BOX(&token_logprobs));
  m.impl("token_logprobs_out", TORCH_BOX(&token_logprobs_out));
}

}  // namespace
}  // namespace eagle2
