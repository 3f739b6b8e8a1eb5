// csrc/tree.h and csrc/address.h for Python, without torch in the way. Outputs are handed in, so
// that a test can put guards around them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "address.h"
#include "fiber_team.h"
#include "thread_team.h"
#include "tree.h"

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

namespace {

// With one member the team of one that the CPU ops use, with a few threads, with many fibers.
template <typename Body>
void with_team(int size, const Body& body) {
  if (size == 1) {
    body(eagle2::SoloTeam{});
  } else if (size < 8) {
    run_team(size, body);
  } else {
    run_fibers(size, body);
  }
}

// Scratch is never clean on a GPU.
constexpr int32_t kGarbage = 0x5a5a5a5a;

void flatten(const Array<int32_t>& parents, int32_t capacity, int32_t num_nodes, int64_t prefix_len,
             Array<int32_t> depths, Array<int64_t> position_ids, Array<int32_t> first_child,
             Array<int32_t> next_sibling, Array<uint64_t> tree_mask, int team_size) {
  const int32_t* up = parents.data();
  int32_t* depth = depths.mutable_data();
  int64_t* position = position_ids.mutable_data();
  int32_t *child = first_child.mutable_data(), *sibling = next_sibling.mutable_data();
  uint64_t* mask = tree_mask.mutable_data();
  with_team(team_size, [&](const auto& team) {
    eagle2::flatten_tree(team, up, capacity, num_nodes, prefix_len, depth, position, child, sibling,
                         mask);
  });
}

void build(const Array<int64_t>& tokens, const Array<float>& scores, const Array<int32_t>& parents,
           int64_t root_token, int64_t prefix_len, int32_t max_nodes, int64_t slot_limit,
           int64_t depth_limit, Array<int64_t> draft_tokens, Array<int32_t> out_parents,
           Array<int32_t> depths, Array<int64_t> position_ids, Array<float> out_scores,
           Array<int32_t> first_child, Array<int32_t> next_sibling, Array<uint64_t> tree_mask,
           Array<int32_t> num_nodes, int team_size) {
  const int32_t m = static_cast<int32_t>(tokens.size());
  std::vector<float> f(2 * m);
  std::vector<int32_t> i(4 * m), histogram(256), shared(4);
  std::vector<uint64_t> keys(eagle2::sort_capacity(max_nodes));
  const eagle2::BuildScratch scratch{{f.data(), f.data() + m},
                                     {i.data(), i.data() + m},
                                     {i.data() + 2 * m, i.data() + 3 * m},
                                     keys.data(),
                                     histogram.data(),
                                     shared.data()};
  const eagle2::Candidates candidates{tokens.data(), scores.data(), parents.data(), m};
  const eagle2::TreeOut out{
      draft_tokens.mutable_data(), out_parents.mutable_data(), depths.mutable_data(),
      position_ids.mutable_data(), out_scores.mutable_data(),  first_child.mutable_data(),
      next_sibling.mutable_data(), tree_mask.mutable_data(),   num_nodes.mutable_data()};
  with_team(team_size, [&](const auto& team) {
    eagle2::build_tree(team, candidates, root_token, prefix_len, max_nodes, slot_limit, depth_limit,
                       scratch, out);
  });
}

void build_from_marginals(const Array<int64_t>& tokens, const Array<float>& log_probs,
                          int32_t depth, int32_t top_k, int64_t root_token, int64_t prefix_len,
                          int32_t max_nodes, int64_t slot_limit, int64_t depth_limit,
                          Array<int64_t> draft_tokens, Array<int32_t> out_parents,
                          Array<int32_t> depths, Array<int64_t> position_ids,
                          Array<float> out_scores, Array<int32_t> first_child,
                          Array<int32_t> next_sibling, Array<uint64_t> tree_mask,
                          Array<int32_t> num_nodes, int team_size) {
  const size_t n = static_cast<size_t>(max_nodes);
  std::vector<eagle2::OpenPrefix> open(n);
  std::vector<int64_t> taken(n);
  std::vector<float> scores(n);
  std::vector<int32_t> parents(n), levels(n), shared(1);
  std::vector<uint64_t> keys(eagle2::sort_capacity(max_nodes));
  const eagle2::MarginalsScratch scratch{open.data(),   taken.data(), scores.data(), parents.data(),
                                         levels.data(), keys.data(),  shared.data()};
  const eagle2::Marginals marginals{tokens.data(), log_probs.data(), depth, top_k};
  const eagle2::TreeOut out{
      draft_tokens.mutable_data(), out_parents.mutable_data(), depths.mutable_data(),
      position_ids.mutable_data(), out_scores.mutable_data(),  first_child.mutable_data(),
      next_sibling.mutable_data(), tree_mask.mutable_data(),   num_nodes.mutable_data()};
  with_team(team_size, [&](const auto& team) {
    eagle2::build_tree_from_marginals(team, marginals, root_token, prefix_len, max_nodes,
                                      slot_limit, depth_limit, scratch, out);
  });
}

int32_t leaf_paths(const Array<int32_t>& parents, int32_t num_nodes, int64_t width,
                   Array<int64_t> rows, int team_size) {
  const int32_t n = static_cast<int32_t>(parents.size());
  const int32_t* up = parents.data();
  int64_t* out = rows.mutable_data();
  std::vector<int32_t> children(n, kGarbage), sums(2 * team_size, kGarbage), found(team_size);
  with_team(team_size, [&](const auto& team) {
    found[team.rank()] =
        eagle2::leaf_paths(team, up, n, num_nodes, width, children.data(), sums.data(), out);
  });
  for (const int32_t f : found) {
    if (f != found[0]) throw std::runtime_error("members count different leaves");
  }
  return found[0];
}

void extend(int64_t level, int64_t top_k, const Array<int64_t>& beam, const Array<uint64_t>& mask,
            Array<int32_t> candidate_parents, Array<uint64_t> next_mask, int team_size) {
  const int64_t words = mask.size() / top_k;
  const int64_t* entries = beam.data();
  const uint64_t* bits = mask.data();
  int32_t* parents = candidate_parents.mutable_data();
  uint64_t* next = next_mask.mutable_data();
  with_team(team_size, [&](const auto& team) {
    eagle2::extend_level(team, level, top_k, words, entries, bits, parents, next);
  });
}

void pack(const Array<uint8_t>& bytes, int64_t step, int64_t width, Array<uint64_t> words,
          int team_size) {
  const uint8_t* row = bytes.data();
  uint64_t* out = words.mutable_data();
  with_team(team_size, [&](const auto& team) { eagle2::pack_row(team, row, step, width, out); });
}

void unpack(const Array<uint64_t>& words, int64_t step, int64_t num_keys, Array<bool> row,
            int team_size) {
  const uint64_t* bits = words.data();
  bool* out = row.mutable_data();
  with_team(team_size,
            [&](const auto& team) { eagle2::unpack_row(team, bits, step, num_keys, out); });
}

// compact_kv of one request. Row p of `cache` [rows, heads, per_head * unit_bytes] lies at position
// rows[p]; other positions have no place.
void move_path(Array<uint8_t> cache, const std::vector<int64_t>& rows, int32_t heads,
               int32_t per_head, int32_t unit_bytes, const Array<int32_t>& index, int64_t length,
               int64_t start, int32_t first, int32_t count, int team_size) {
  char* data = reinterpret_cast<char*>(cache.mutable_data());
  const int64_t head_stride = int64_t{per_head} * unit_bytes;
  const auto row_at = [&](int64_t position) -> char* {
    for (size_t p = 0; p < rows.size(); ++p) {
      if (rows[p] == position) return data + static_cast<int64_t>(p) * heads * head_stride;
    }
    return nullptr;
  };
  const auto copy = [unit_bytes](const char* from, char* to) { memcpy(to, from, unit_bytes); };
  const size_t most = std::max<int64_t>(length, 0);
  std::vector<char*> from(most), to(most);
  std::vector<char> staged(most * count * unit_bytes);
  int32_t shared = kGarbage;
  const eagle2::AcceptedPath path{index.data(), 1, length, start};
  const eagle2::RowUnits units{first, count, per_head, unit_bytes, head_stride};
  with_team(team_size, [&](const auto& team) {
    eagle2::move_path(team, path, units, row_at, copy,
                      eagle2::MoveScratch{from.data(), to.data(), &shared, staged.data()});
  });
}

// The visited slots in the order they were asked for, then what walk_tree says.
py::tuple walk(const Array<int64_t>& target, const Array<int64_t>& draft,
               const Array<int32_t>& child, const Array<int32_t>& sibling, int64_t max_depth) {
  std::vector<int64_t> asked, emitted(max_depth + 1, -1);
  std::vector<int32_t> index(max_depth + 1, -1);
  const int64_t* tokens = target.data();
  const int32_t accepted = eagle2::walk_tree(
      [&](int64_t slot) {
        asked.push_back(slot);
        return tokens[slot];
      },
      draft.data(), child.data(), sibling.data(), target.size(), max_depth, index.data(),
      emitted.data());
  return py::make_tuple(asked, accepted, index, emitted);
}

// The slots whose coin was asked for, in order, then what walk_tree_coins says. Rows are
// [slots, vocab]; the last draw takes the lowest token with a probability that no child carries.
py::tuple walk_coins(const Array<double>& rows, const Array<double>& coins,
                     const Array<int64_t>& draft, const Array<int32_t>& child,
                     const Array<int32_t>& sibling, int64_t max_depth) {
  const int64_t slots = draft.size(), vocab = rows.size() / slots;
  std::vector<int64_t> asked;
  std::vector<int32_t> index(max_depth + 1, -1);
  int64_t bonus = -2;
  const auto probability = [&](int64_t slot, int64_t token) {
    return token < 0 || token >= vocab ? 0.0 : rows.data()[slot * vocab + token];
  };
  const auto coin = [&](int64_t slot) {
    asked.push_back(slot);
    return coins.data()[slot];
  };
  const auto draw = [&](int64_t slot, int32_t first) -> int64_t {
    for (int64_t token = 0; token < vocab; ++token) {
      const auto carries = [&](int32_t c, int64_t) { return draft.data()[c] == token; };
      if (!(probability(slot, token) > 0)) continue;
      if (eagle2::find_sibling(first, sibling.data(), slots, carries) < 0) return token;
    }
    return -1;
  };
  const int32_t accepted =
      eagle2::walk_tree_coins(probability, coin, draw, draft.data(), child.data(), sibling.data(),
                              slots, max_depth, index.data(), &bonus);
  return py::make_tuple(asked, accepted, index, bonus);
}

// What verify_tree gives: drafts accepted, slots, last token.
py::tuple accept(const Array<int64_t>& target, const Array<int64_t>& draft,
                 const Array<int32_t>& child, const Array<int32_t>& sibling, int64_t max_depth,
                 int team_size) {
  const int64_t slots = target.size();
  std::vector<int32_t> steps(slots, kGarbage), index(max_depth + 1, kGarbage);
  int32_t accepted = kGarbage;
  int64_t bonus = kGarbage;
  with_team(team_size, [&](const auto& team) {
    if (slots > 0) {
      eagle2::accept_path(team, target.data(), draft.data(), child.data(), sibling.data(), slots,
                          max_depth, steps.data(), index.data(), &accepted, &bonus);
    } else {
      eagle2::accept_nothing(team, max_depth, index.data(), &accepted, &bonus);
    }
  });
  return py::make_tuple(accepted, index, bonus);
}

// What verify_tree_coins gives, drawing from rows [slots, vocab].
py::tuple accept_coins(const Array<double>& rows, const Array<double>& coins, double final_coin,
                       const Array<int64_t>& draft, const Array<int32_t>& child,
                       const Array<int32_t>& sibling, int64_t max_depth, int team_size) {
  const int64_t slots = draft.size(), vocab = rows.size() / slots;
  const double *masses = rows.data(), *uniform = coins.data();
  const int64_t* tokens = draft.data();
  std::vector<eagle2::CoinStep> steps(slots, eagle2::CoinStep{kGarbage, kGarbage});
  std::vector<int32_t> index(max_depth + 1, kGarbage);
  std::vector<double> sums(eagle2::draw_chunks(vocab) * eagle2::kDrawLanes, NAN), shared(2, NAN);
  std::vector<int64_t> found(2, kGarbage);
  std::vector<uint32_t> excluded(eagle2::mask_words(vocab) * 2, kGarbage);
  int32_t accepted = kGarbage;
  int64_t bonus = kGarbage;
  const auto probability = [&](int64_t slot, int64_t token) {
    return token < 0 || token >= vocab ? 0.0 : eagle2::mass_of(masses[slot * vocab + token]);
  };
  with_team(team_size, [&](const auto& team) {
    const auto draw = [&](int64_t slot, int32_t first) {
      eagle2::exclude_children(team, first, sibling.data(), tokens, slots, vocab, excluded.data());
      const auto mass = [&](int64_t token) {
        const double p = eagle2::mass_of(masses[slot * vocab + token]);
        return eagle2::is_excluded(excluded.data(), token) ? 0.0 : p;
      };
      return eagle2::draw_token(team, mass, vocab, final_coin,
                                eagle2::DrawScratch{sums.data(), shared.data(), found.data()});
    };
    eagle2::accept_by_coins(
        team, probability, [&](int64_t slot) { return uniform[slot]; }, draw, tokens, child.data(),
        sibling.data(), slots, max_depth, steps.data(), index.data(), &accepted, &bonus);
  });
  return py::make_tuple(accepted, index, bonus);
}

std::vector<uint32_t> philox(uint64_t seed, uint64_t position, uint32_t block) {
  std::vector<uint32_t> words(4);
  eagle2::philox4x32(seed, position, block, words.data());
  return words;
}

Array<float> map_floats(const Array<float>& in, float (*f)(float)) {
  Array<float> out(in.size());
  for (py::ssize_t i = 0; i < in.size(); ++i) out.mutable_data()[i] = f(in.data()[i]);
  return out;
}

Array<float> gumbel(const Array<uint32_t>& words) {
  Array<float> out(words.size());
  for (py::ssize_t i = 0; i < words.size(); ++i) {
    out.mutable_data()[i] = eagle2::gumbel(words.data()[i]);
  }
  return out;
}

std::vector<int64_t> cache_slot(int64_t position, int64_t request,
                                const std::optional<Array<int32_t>>& table, int64_t page_size,
                                int64_t num_blocks) {
  const auto slot = eagle2::cache_slot(position, request, table ? table->data() : nullptr, 1,
                                       table ? table->size() : 0, page_size, num_blocks);
  return {slot.block, slot.slot};
}

}  // namespace

PYBIND11_MODULE(tree_core, m) {
  m.def("flatten", &flatten);
  m.def("build", &build);
  m.def("build_from_marginals", &build_from_marginals);
  m.def("depth_of", [](const Array<int32_t>& parents, int32_t n, int32_t slot) {
    return eagle2::depth_of(parents.data(), n, slot);
  });
  m.def("leaf_paths", &leaf_paths);
  m.def("extend", &extend);
  m.def("pack", &pack);
  m.def("unpack", &unpack);
  m.def("move_path", &move_path);
  m.def("accept", &accept);
  m.def("accept_coins", &accept_coins);
  m.def("mass_of", [](float p) { return eagle2::mass_of(p); });
  m.def("walk", &walk);
  m.def("walk_coins", &walk_coins);
  m.def("philox", &philox);
  m.def("gumbel", &gumbel);
  m.def("gumbel_noise", [](uint64_t seed, uint64_t position, uint32_t token) {
    return eagle2::gumbel_noise(seed, position, token);
  });
  m.def("log_poly", [](const Array<float>& x) {
    return map_floats(x, [](float v) { return eagle2::log_poly(v); });
  });
  m.def("exp_poly", [](const Array<float>& x) {
    return map_floats(x, [](float v) { return eagle2::exp_poly(v); });
  });
  m.def("rank_key",
        [](float score, int32_t candidate) { return eagle2::rank_key(score, candidate); });
  m.def("mask_words", [](int64_t slots) { return eagle2::mask_words(slots); });
  m.def("cache_offset", &eagle2::cache_offset);
  m.def("cache_slot", &cache_slot);
}
