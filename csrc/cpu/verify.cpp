// sample_tokens, verify_tree, their fusion, and verification by the caller's coins.
//
// Sampling reads a row once; greedy rows stop there. Without top-k or top-p the noise of the whole
// vocabulary is added in one vectorised pass; otherwise the survivors are found by threshold and
// only they are looked at. No row is ever sorted whole. Coins look at the probabilities of the
// children, and at a whole row only where the walk ends.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "../tree.h"
#include "args.h"
#include "rows.h"

namespace eagle2 {
namespace {

struct Filters {
  double temperature;
  int64_t top_k;
  double top_p;
  double min_p;
};

// Everything the draw at one node depends on, for all requests.
class Sampler {
 public:
  Sampler(const Tensor& logits, const Tensor& position_ids, const Tensor& seeds,
          const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
          const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
          const std::optional<Tensor>& allowed_mask)
      : logits_(logits_view(logits, "logits")),
        positions_(position_ids, "position_ids", {logits_.size[0], logits_.size[1]}),
        seeds_(seeds, "seeds", {logits_.size[0]}),
        temperature_(packed<float, 1>(temperature, "temperature", {logits_.size[0]})),
        top_p_(packed<float, 1>(top_p, "top_p", {logits_.size[0]})),
        min_p_(packed<float, 1>(min_p, "min_p", {logits_.size[0]})),
        allowed_(
            packed<int32_t, 3>(allowed_mask, "allowed_mask",
                               {logits_.size[0], logits_.size[1], (logits_.size[2] + 31) / 32})) {
    if (top_k.has_value() && top_k->scalar_type() == ScalarType::Long) {
      top_k64_ = packed<int64_t, 1>(top_k, "top_k", {logits_.size[0]});
    } else {
      top_k32_ = packed<int32_t, 1>(top_k, "top_k", {logits_.size[0]});
    }
  }

  int64_t batch() const { return logits_.size[0]; }
  int64_t nodes() const { return logits_.size[1]; }
  int64_t vocab() const { return logits_.size[2]; }

  // The token drawn (or the best one) at node n of request b.
  int64_t draw(int64_t b, int64_t n) const {
    return logits_.type == ScalarType::Double ? draw_as<double>(b, n) : draw_as<float>(b, n);
  }

 private:
  Filters filters(int64_t b) const {
    Filters f{0.0, 0, 1.0, 0.0};
    if (temperature_) f.temperature = (*temperature_)[b];
    if (top_k64_) f.top_k = (*top_k64_)[b];
    if (top_k32_) f.top_k = (*top_k32_)[b];
    if (top_p_) f.top_p = (*top_p_)[b];
    if (min_p_) f.min_p = (*min_p_)[b];
    return f;
  }

  int64_t lowest_allowed(int64_t b, int64_t n) const {
    if (!allowed_) return 0;
    const int32_t* mask = allowed_row(b, n);
    for (int64_t v = 0; v < vocab(); ++v) {
      if (static_cast<uint32_t>(mask[v / 32]) >> (v % 32) & 1) return v;
    }
    return 0;
  }

  const int32_t* allowed_row(int64_t b, int64_t n) const {
    return allowed_->row(b) + n * allowed_->size(2);
  }

  template <typename T>
  int64_t draw_as(int64_t b, int64_t n) const {
    thread_local std::vector<T> row;
    row.resize(static_cast<size_t>(vocab()));
    Ranked<T> best{-INFINITY, -1};
    for (int64_t first = 0; first < vocab(); first += kChunk) {
      const int64_t count = std::min(kChunk, vocab() - first);
      T* chunk = row.data() + first;
      read_logits(logits_, b, n, first, count, chunk);
      if (allowed_) clear_banned(allowed_row(b, n), first, count, chunk);
      const int64_t at = find_above(chunk, count, best.value);
      if (at == count) continue;
      best.value = largest(chunk, count);
      best.id = first + std::find(chunk + at, chunk + count, best.value) - chunk;
    }
    if (best.id < 0) return lowest_allowed(b, n);
    const Filters f = filters(b);
    if (!(f.temperature > 0)) return best.id;
    const Noise noise{static_cast<uint64_t>(seeds_[b]),
                      static_cast<uint64_t>(positions_.row(b)[n])};
    return sample_row(row, best, f, noise);
  }

  struct Noise {
    uint64_t seed;
    uint64_t position;
  };

  // Draws from a row whose best logit is known and finite. Banned and dropped tokens are -inf.
  template <typename T>
  static int64_t sample_row(std::vector<T>& row, const Ranked<T>& best, const Filters& f,
                            const Noise& noise) {
    const int64_t vocab = static_cast<int64_t>(row.size());
    const T temperature = static_cast<T>(f.temperature);
    if (f.top_k > 0 && f.top_k < vocab) {
      thread_local TopK<T> top;
      top.start(f.top_k);
      top.feed(row.data(), vocab, 0);
      std::vector<Ranked<T>>& kept = top.finish();
      if (f.top_p < 1) cut_top_p(kept, best.value, temperature, f.top_p);
      return draw_from(row, kept, best, temperature, f.min_p, noise);
    }
    if (f.top_p < 1) {
      const std::vector<Ranked<T>>& kept = keep_top_p(row, best, temperature, f.top_p);
      return draw_from(row, kept, best, temperature, f.min_p, noise);
    }
    return draw_from_all(row, best, temperature, f.min_p, noise);
  }

  template <typename T>
  static T mass_of(T value, T peak, T temperature) {
    T scaled, mass;
    scale_logits(&value, 1, peak, temperature, &scaled);
    exp_masses(&scaled, 1, &mass);
    return mass;
  }

  // Keeps a ranked candidate while the mass strictly before it stays below top_p of the total; the
  // first always stays.
  template <typename T>
  static void cut_top_p(std::vector<Ranked<T>>& ranked, T peak, T temperature, double top_p) {
    double total = 0;
    for (const Ranked<T>& r : ranked) total += mass_of(r.value, peak, temperature);
    double sum = 0;
    size_t kept = 0;
    while (kept < ranked.size() && (kept == 0 || sum < top_p * total)) {
      sum += mass_of(ranked[kept++].value, peak, temperature);
    }
    ranked.resize(kept);
  }

  // The same cut for a whole row: masses are summed in bins by scaled logit, whole bins above the
  // cut are taken as they are, and only the bin that holds the cut is sorted. The result is the
  // thread's, until the next call.
  template <typename T>
  static const std::vector<Ranked<T>>& keep_top_p(const std::vector<T>& row, const Ranked<T>& best,
                                                  T temperature, double top_p) {
    constexpr int kBins = 4096;
    constexpr T kBinsPerUnit = 128;  // e^-32 of the largest mass falls into the last bin
    const int64_t vocab = static_cast<int64_t>(row.size());
    thread_local std::vector<T> scaled, mass;
    scaled.resize(row.size());
    mass.resize(row.size());
    scale_logits(row.data(), vocab, best.value, temperature, scaled.data());
    exp_masses(scaled.data(), vocab, mass.data());
    thread_local std::vector<double> bins;
    bins.assign(kBins, 0.0);
    const auto bin_of = [](T x) {
      const T position = -x * kBinsPerUnit;
      return position < kBins - 1 ? static_cast<int>(position) : kBins - 1;
    };
    const double total = sum_of(mass.data(), vocab);
    const double limit = top_p * total;
    // All masses below this one together stay below (1 - top_p) of the total: they are dropped.
    const T tiny = static_cast<T>((1 - top_p) * total / static_cast<double>(vocab) * (1 - 1e-6));
    for (int64_t v = 0; v < vocab; ++v) {
      if (mass[v] >= tiny) bins[bin_of(scaled[v])] += mass[v];
    }
    double sum = 0;
    int cut = 0;
    while (cut < kBins - 1 && sum + bins[cut] < limit) sum += bins[cut++];

    thread_local std::vector<Ranked<T>> kept, edge;
    kept.clear();
    edge.clear();
    for (int64_t v = 0; v < vocab; ++v) {
      if (mass[v] < tiny) continue;
      const int bin = bin_of(scaled[v]);
      if (bin < cut) kept.push_back({row[v], v});
      if (bin == cut) edge.push_back({row[v], v});
    }
    std::sort(edge.begin(), edge.end(), better<T>);
    for (const Ranked<T>& candidate : edge) {
      if (!kept.empty() && !(sum < limit)) break;
      sum += mass[candidate.id];
      kept.push_back(candidate);
    }
    return kept;
  }

  // The best of the kept candidates after noise.
  template <typename T>
  static int64_t draw_from(std::vector<T>& row, const std::vector<Ranked<T>>& kept,
                           const Ranked<T>& best, T temperature, double min_p, const Noise& noise) {
    constexpr size_t kFew = 512;  // from here on, noise for the whole row is cheaper
    if (kept.size() > kFew) {
      std::fill(row.begin(), row.end(), -INFINITY);
      for (const Ranked<T>& r : kept) row[r.id] = r.value;
      return draw_from_all(row, best, temperature, min_p, noise);
    }
    Ranked<T> winner{-INFINITY, best.id};
    for (const Ranked<T>& r : kept) {
      T scaled;
      scale_logits(&r.value, 1, best.value, temperature, &scaled);
      if (min_p > 0 && r.id != best.id && !passes_min_p(scaled, min_p)) continue;
      const float g = gumbel_noise(noise.seed, noise.position, static_cast<uint32_t>(r.id));
      const Ranked<T> perturbed{scaled + static_cast<T>(g), r.id};
      if (better(perturbed, winner)) winner = perturbed;
    }
    return winner.id;
  }

  template <typename T>
  static bool passes_min_p(T scaled, double min_p) {
    T mass;
    exp_logits(&scaled, 1, &mass);
    return mass >= static_cast<T>(min_p);
  }

  template <typename T>
  static int64_t draw_from_all(const std::vector<T>& row, const Ranked<T>& best, T temperature,
                               double min_p, const Noise& noise) {
    const int64_t vocab = static_cast<int64_t>(row.size());
    Ranked<T> winner{-INFINITY, best.id};
    T perturbed[kChunk], mass[kChunk];
    float g[kChunk];
    for (int64_t first = 0; first < vocab; first += kChunk) {
      const int64_t count = std::min(kChunk, vocab - first);
      scale_logits(row.data() + first, count, best.value, temperature, perturbed);
      if (min_p > 0) {
        exp_logits(perturbed, count, mass);
        for (int64_t i = 0; i < count; ++i) {
          if (mass[i] < static_cast<T>(min_p) && first + i != best.id) perturbed[i] = -INFINITY;
        }
      }
      noise_of(noise.seed, noise.position, first, count, g);
      for (int64_t i = 0; i < count; ++i) perturbed[i] += static_cast<T>(g[i]);
      int64_t at = find_above(perturbed, count, winner.value);
      if (at == count) continue;
      winner.value = largest(perturbed, count);
      while (perturbed[at] != winner.value) ++at;
      winner.id = first + at;
    }
    return winner.id;
  }

  Logits logits_;
  Packed<int64_t, 2> positions_;
  Packed<int64_t, 1> seeds_;
  std::optional<Packed<float, 1>> temperature_;
  std::optional<Packed<int32_t, 1>> top_k32_;
  std::optional<Packed<int64_t, 1>> top_k64_;
  std::optional<Packed<float, 1>> top_p_, min_p_;
  std::optional<Packed<int32_t, 3>> allowed_;
};

// The tree's links, and which requests are active.
struct Links {
  Links(const Tensor& draft_tokens, const Tensor& first_child, const Tensor& next_sibling,
        const std::optional<Tensor>& num_nodes, int64_t batch, int64_t slots)
      : tokens(draft_tokens, "draft_tokens", {batch, slots}),
        child(first_child, "first_child", {batch, slots}),
        sibling(next_sibling, "next_sibling", {batch, slots}),
        counts(packed<int32_t, 1>(num_nodes, "num_nodes", {batch})) {}

  bool active(int64_t b) const { return tokens.size(1) > 0 && (!counts || (*counts)[b] > 0); }

  Packed<int64_t, 2> tokens;
  Packed<int32_t, 2> child, sibling;
  std::optional<Packed<int32_t, 1>> counts;
};

// Outputs of a walk, all of them marked empty to begin with.
struct Accepted {
  Accepted(const Tensor& accept_index, const Tensor& accept_length, const Tensor& bonus_token,
           int64_t batch, int64_t max_depth)
      : width(max_depth + 1) {
    if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
    index = output<int32_t, 2>(accept_index, "accept_index", {batch, width});
    length = output<int32_t, 1>(accept_length, "accept_length", {batch});
    bonus = output<int64_t, 1>(bonus_token, "bonus_token", {batch});
    std::fill_n(index, batch * width, -1);
    std::fill_n(length, batch, -1);
    std::fill_n(bonus, batch, int64_t{-1});
  }

  // Walks request b; `emitted` [width] takes the target's tokens.
  template <typename Target>
  void walk(int64_t b, const Links& links, const Target& target, int64_t* emitted) const {
    length[b] = walk_tree(target, links.tokens.row(b), links.child.row(b), links.sibling.row(b),
                          links.tokens.size(1), width - 1, index + b * width, emitted);
    bonus[b] = emitted[length[b]];
  }

  int64_t width;
  int32_t* index;
  int32_t* length;
  int64_t* bonus;
};

// accept_index, accept_length and bonus_token.
std::tuple<Tensor, Tensor, Tensor> allocate_accepted(int64_t batch, int64_t max_depth) {
  if (max_depth < 0) fail("max_depth: expected at least 0, got ", max_depth);
  return std::make_tuple(allocate<int32_t>({batch, max_depth + 1}), allocate<int32_t>({batch}),
                         allocate<int64_t>({batch}));
}

// The target's probabilities [B, N, V]. NaN and negative numbers count as 0.
class Probabilities {
 public:
  explicit Probabilities(const Tensor& probabilities)
      : rows_(logits_view(probabilities, "target_probs")) {}

  int64_t batch() const { return rows_.size[0]; }
  int64_t nodes() const { return rows_.size[1]; }
  int64_t vocab() const { return rows_.size[2]; }

  double at(int64_t b, int64_t n, int64_t token) const {
    if (token < 0 || token >= vocab()) return 0;
    return rows_.type == ScalarType::Double ? at_as<double>(b, n, token)
                                            : at_as<float>(b, n, token);
  }

  // The lowest token whose cumulative probability exceeds `coin` times that of the whole row,
  // after the tokens which `for_each_excluded(exclude)` hands to exclude(token) are taken out; -1
  // when nothing is left. What it returns has a positive probability, whatever the coin is.
  template <typename ForEach>
  int64_t draw(int64_t b, int64_t n, double coin, const ForEach& for_each_excluded) const {
    return rows_.type == ScalarType::Double ? draw_as<double>(b, n, coin, for_each_excluded)
                                            : draw_as<float>(b, n, coin, for_each_excluded);
  }

 private:
  template <typename T>
  double at_as(int64_t b, int64_t n, int64_t token) const {
    T p;
    read_logits(rows_, b, n, token, 1, &p);
    return p > 0 ? p : 0;
  }

  template <typename T, typename ForEach>
  int64_t draw_as(int64_t b, int64_t n, double coin, const ForEach& for_each_excluded) const {
    thread_local std::vector<T> row;
    row.resize(static_cast<size_t>(vocab()));
    for (int64_t first = 0; first < vocab(); first += kChunk) {
      read_logits(rows_, b, n, first, std::min(kChunk, vocab() - first), row.data() + first);
    }
    for_each_excluded([&](int64_t token) {
      if (token >= 0 && token < vocab()) row[token] = 0;
    });
    thread_local std::vector<double> sums;
    sums.resize(static_cast<size_t>(draw_chunks(vocab()) * kDrawLanes));
    double shared[2];
    int64_t found[2];
    const T* masses = row.data();
    return draw_token(
        SoloTeam{}, [masses](int64_t id) { return masses[id] > 0 ? double{masses[id]} : 0.0; },
        vocab(), coin, DrawScratch{sums.data(), shared, found});
  }

  Logits rows_;
};

// Uniform numbers [B] or [B, N], float32 or float64.
template <int Rank>
class Coins {
 public:
  Coins(const Tensor& coins, const char* name, std::initializer_list<int64_t> shape) {
    if (coins.scalar_type() == ScalarType::Double) {
      wide_.emplace(coins, name, shape);
    } else {
      narrow_.emplace(coins, name, shape);
    }
  }

  double at(int64_t b, int64_t n = 0) const {
    return wide_ ? wide_->row(b)[n] : narrow_->row(b)[n];
  }

 private:
  std::optional<Packed<float, Rank>> narrow_;
  std::optional<Packed<double, Rank>> wide_;
};

void sample_tokens_out(const Tensor& logits, const Tensor& position_ids, const Tensor& seeds,
                       const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
                       const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                       const std::optional<Tensor>& allowed_mask, const Tensor& tokens) {
  const Sampler sampler(logits, position_ids, seeds, temperature, top_k, top_p, min_p,
                        allowed_mask);
  const int64_t nodes = sampler.nodes();
  int64_t* out = output<int64_t, 2>(tokens, "tokens", {sampler.batch(), nodes});
  const int64_t grain = std::max<int64_t>(1, 8192 / sampler.vocab());
  parallel_for(sampler.batch() * nodes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) out[row] = sampler.draw(row / nodes, row % nodes);
  });
}

Tensor sample_tokens(const Tensor& logits, const Tensor& position_ids, const Tensor& seeds,
                     const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
                     const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                     const std::optional<Tensor>& allowed_mask) {
  const Logits x = logits_view(logits, "logits");
  Tensor tokens = allocate<int64_t>({x.size[0], x.size[1]});
  sample_tokens_out(logits, position_ids, seeds, temperature, top_k, top_p, min_p, allowed_mask,
                    tokens);
  return tokens;
}

void verify_tree_out(const Tensor& target_tokens, const Tensor& draft_tokens,
                     const Tensor& first_child, const Tensor& next_sibling, int64_t max_depth,
                     const std::optional<Tensor>& num_nodes, const Tensor& accept_index,
                     const Tensor& accept_length, const Tensor& bonus_token) {
  const Packed<int64_t, 2> targets(target_tokens, "target_tokens", {-1, -1});
  const int64_t batch = targets.size(0);
  const Links links(draft_tokens, first_child, next_sibling, num_nodes, batch, targets.size(1));
  const Accepted accepted(accept_index, accept_length, bonus_token, batch, max_depth);
  thread_local std::vector<int64_t> emitted;
  emitted.resize(static_cast<size_t>(accepted.width));
  for (int64_t b = 0; b < batch; ++b) {
    if (!links.active(b)) continue;
    const int64_t* row = targets.row(b);
    accepted.walk(b, links, [row](int64_t slot) { return row[slot]; }, emitted.data());
  }
}

std::tuple<Tensor, Tensor, Tensor> verify_tree(const Tensor& target_tokens,
                                               const Tensor& draft_tokens,
                                               const Tensor& first_child,
                                               const Tensor& next_sibling, int64_t max_depth,
                                               const std::optional<Tensor>& num_nodes) {
  if (target_tokens.dim() != 2) {
    fail("target_tokens: expected 2 dimensions, got ", target_tokens.dim());
  }
  auto results = allocate_accepted(target_tokens.size(0), max_depth);
  std::apply(
      [&](const auto&... outs) {
        verify_tree_out(target_tokens, draft_tokens, first_child, next_sibling, max_depth,
                        num_nodes, outs...);
      },
      results);
  return results;
}

void sample_and_verify_out(const Tensor& logits, const Tensor& position_ids, const Tensor& seeds,
                           const Tensor& draft_tokens, const Tensor& first_child,
                           const Tensor& next_sibling, int64_t max_depth,
                           const std::optional<Tensor>& num_nodes,
                           const std::optional<Tensor>& temperature,
                           const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                           const std::optional<Tensor>& min_p,
                           const std::optional<Tensor>& allowed_mask, const Tensor& emitted_tokens,
                           const Tensor& accept_index, const Tensor& accept_length,
                           const Tensor& bonus_token) {
  const Sampler sampler(logits, position_ids, seeds, temperature, top_k, top_p, min_p,
                        allowed_mask);
  const int64_t batch = sampler.batch();
  const Links links(draft_tokens, first_child, next_sibling, num_nodes, batch, sampler.nodes());
  const Accepted accepted(accept_index, accept_length, bonus_token, batch, max_depth);
  int64_t* emitted = output<int64_t, 2>(emitted_tokens, "emitted_tokens", {batch, accepted.width});
  std::fill_n(emitted, batch * accepted.width, int64_t{-1});
  parallel_for(batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (!links.active(b)) continue;
      accepted.walk(
          b, links, [&](int64_t slot) { return sampler.draw(b, slot); },
          emitted + b * accepted.width);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_and_verify(
    const Tensor& logits, const Tensor& position_ids, const Tensor& seeds,
    const Tensor& draft_tokens, const Tensor& first_child, const Tensor& next_sibling,
    int64_t max_depth, const std::optional<Tensor>& num_nodes,
    const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
    const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
    const std::optional<Tensor>& allowed_mask) {
  const int64_t batch = logits_view(logits, "logits").size[0];
  auto accepted = allocate_accepted(batch, max_depth);
  auto results =
      std::tuple_cat(std::make_tuple(allocate<int64_t>({batch, max_depth + 1})), accepted);
  std::apply(
      [&](const auto&... outs) {
        sample_and_verify_out(logits, position_ids, seeds, draft_tokens, first_child, next_sibling,
                              max_depth, num_nodes, temperature, top_k, top_p, min_p, allowed_mask,
                              outs...);
      },
      results);
  return results;
}

void verify_tree_coins_out(const Tensor& target_probs, const Tensor& draft_tokens,
                           const Tensor& first_child, const Tensor& next_sibling,
                           const Tensor& coins, const Tensor& final_coins, int64_t max_depth,
                           const std::optional<Tensor>& num_nodes, const Tensor& accept_index,
                           const Tensor& accept_length, const Tensor& bonus_token) {
  const Probabilities probabilities(target_probs);
  const int64_t batch = probabilities.batch(), slots = probabilities.nodes();
  const Links links(draft_tokens, first_child, next_sibling, num_nodes, batch, slots);
  const Coins<2> node_coins(coins, "coins", {batch, slots});
  const Coins<1> last_coins(final_coins, "final_coins", {batch});
  const Accepted accepted(accept_index, accept_length, bonus_token, batch, max_depth);
  parallel_for(batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (!links.active(b)) continue;
      const int64_t* tokens = links.tokens.row(b);
      const int32_t* siblings = links.sibling.row(b);
      const auto draw = [&](int64_t slot, int32_t first) {
        return probabilities.draw(b, slot, last_coins.at(b), [&](const auto& exclude) {
          find_sibling(first, siblings, slots, [&](int32_t child, int64_t) {
            exclude(tokens[child]);
            return false;
          });
        });
      };
      accepted.length[b] = walk_tree_coins(
          [&](int64_t slot, int64_t token) { return probabilities.at(b, slot, token); },
          [&](int64_t slot) { return node_coins.at(b, slot); }, draw, tokens, links.child.row(b),
          siblings, slots, max_depth, accepted.index + b * accepted.width, accepted.bonus + b);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> verify_tree_coins(
    const Tensor& target_probs, const Tensor& draft_tokens, const Tensor& first_child,
    const Tensor& next_sibling, const Tensor& coins, const Tensor& final_coins, int64_t max_depth,
    const std::optional<Tensor>& num_nodes) {
  const int64_t batch = logits_view(target_probs, "target_probs").size[0];
  auto results = allocate_accepted(batch, max_depth);
  std::apply(
      [&](const auto&... outs) {
        verify_tree_coins_out(target_probs, draft_tokens, first_child, next_sibling, coins,
                              final_coins, max_depth, num_nodes, outs...);
      },
      results);
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CPU, m) {
  m.impl("sample_tokens", TORCH_BOX(&sample_tokens));
  m.impl("sample_tokens_out", TORCH_BOX(&sample_tokens_out));
  m.impl("verify_tree", TORCH_BOX(&verify_tree));
  m.impl("verify_tree_out", TORCH_BOX(&verify_tree_out));
  m.impl("sample_and_verify", TORCH_BOX(&sample_and_verify));
  m.impl("sample_and_verify_out", TORCH_BOX(&sample_and_verify_out));
  m.impl("verify_tree_coins", TORCH_BOX(&verify_tree_coins));
  m.impl("verify_tree_coins_out", TORCH_BOX(&verify_tree_coins_out));
}

}  // namespace eagle2
