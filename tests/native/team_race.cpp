// Built with -fsanitize=thread by test_tree_core.py: a phase of tree.h that lacks a sync() is a
// data race, reported here whatever the timing. Prints the number of trees that differ from a team
// of one's.
#include <cstdio>
#include <random>
#include <vector>

#include "thread_team.h"
#include "tree.h"

namespace {

struct Tree {
  explicit Tree(int n)
      : tokens(n),
        parents(n),
        depths(n),
        positions(n),
        scores(n),
        child(n),
        sibling(n),
        mask(n * eagle2::mask_words(n)),
        count(1) {}
  eagle2::TreeOut out() {
    return {tokens.data(), parents.data(), depths.data(), positions.data(), scores.data(),
            child.data(),  sibling.data(), mask.data(),   count.data()};
  }
  bool operator==(const Tree&) const = default;
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents, depths;
  std::vector<int64_t> positions;
  std::vector<float> scores;
  std::vector<int32_t> child, sibling;
  std::vector<uint64_t> mask;
  std::vector<int32_t> count;
};

// Whether `build(team, tree)` gives a team of three the tree it gives a team of one.
template <typename Build>
bool same_by_team(int n, const Build& build) {
  Tree alone(n), shared(n);
  build(eagle2::SoloTeam{}, alone);
  run_team(3, [&](const auto& team) { build(team, shared); });
  return alone == shared;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int different = 0;
  for (int round = 0; round < 40; ++round) {
    const int m = 1 + random() % 120, n = 1 + random() % 70;
    std::vector<int64_t> tokens(m);
    std::vector<float> scores(m);
    std::vector<int32_t> parents(m);
    for (int c = 0; c < m; ++c) {
      tokens[c] = c;
      scores[c] = -static_cast<float>(random() % 8);
      parents[c] = static_cast<int32_t>(random() % (c + 1)) - 1;
    }
    std::vector<float> f(2 * m);
    std::vector<int32_t> i(4 * m), histogram(256), shared(4);
    std::vector<uint64_t> keys(eagle2::sort_capacity(n));
    const eagle2::BuildScratch scratch{{f.data(), f.data() + m},
                                       {i.data(), i.data() + m},
                                       {i.data() + 2 * m, i.data() + 3 * m},
                                       keys.data(),
                                       histogram.data(),
                                       shared.data()};
    const eagle2::Candidates candidates{tokens.data(), scores.data(), parents.data(), m};
    different += !same_by_team(n, [&](const auto& team, Tree& tree) {
      eagle2::build_tree(team, candidates, 5, 9, n, n, m, scratch, tree.out());
      team.sync();
      eagle2::flatten_tree(team, tree.parents.data(), n, tree.count[0], 9, tree.depths.data(),
                           tree.positions.data(), tree.child.data(), tree.sibling.data(),
                           tree.mask.data());
    });

    const int depth = 1 + m % 4;
    const eagle2::Marginals marginals{tokens.data(), scores.data(), depth, m / depth};
    std::vector<eagle2::OpenPrefix> open(n);
    std::vector<int64_t> taken(n);
    std::vector<float> sums(n);
    std::vector<int32_t> above(n), levels(n);
    const eagle2::MarginalsScratch search{open.data(),   taken.data(), sums.data(),  above.data(),
                                          levels.data(), keys.data(),  shared.data()};
    different += !same_by_team(n, [&](const auto& team, Tree& tree) {
      eagle2::build_tree_from_marginals(team, marginals, 5, 9, n, n, depth, search, tree.out());
    });
  }
  std::printf("%d\n", different);
  return different != 0;
}
