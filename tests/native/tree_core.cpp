// csrc/tree.h and csrc/address.h for Python, without torch in the way. Outputs are handed in, so
// that a test can put guards around them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "address.h"
#include "thread_team.h"
#include "tree.h"

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

namespace {

// With one member the team of one that the CPU ops use, else threads.
template <typename Body>
void with_team(int size, const Body& body) {
  if (size == 1) {
    body(eagle2::SoloTeam{});
  } else {
    run_team(size, body);
  }
}

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
                   Array<int64_t> rows) {
  const int32_t n = static_cast<int32_t>(parents.size());
  std::vector<uint8_t> is_inner(n);
  return eagle2::leaf_paths(parents.data(), n, num_nodes, width, is_inner.data(),
                            rows.mutable_data());
}

void extend(int64_t level, int64_t top_k, const Array<int64_t>& beam, const Array<uint64_t>& mask,
            Array<int32_t> candidate_parents, Array<uint64_t> next_mask) {
  eagle2::extend_level(level, top_k, mask.size() / top_k, beam.data(), mask.data(),
                       candidate_parents.mutable_data(), next_mask.mutable_data());
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
