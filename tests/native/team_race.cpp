// Built with -fsanitize=thread by test_tree_core.py: a phase of tree.h that lacks a sync() is a
// data race, reported here whatever the timing. Prints the number of results that differ from a
// team of one's.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "address.h"
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
  for (int round = 0; round < 40; ++round) {
    const int n = 1 + random() % 40, vocab = 1 + random() % 2000, depth = 1 + random() % 6;
    std::vector<int64_t> draft(n), target(n);
    std::vector<int32_t> parents(n, -1), child(n, -1), sibling(n, -1);
    std::vector<double> masses(vocab), coins(n);
    for (double& p : masses) p = random() % 4;
    for (int i = 0; i < n; ++i) {
      draft[i] = random() % 3;
      target[i] = random() % 3;
      coins[i] = random() % 2000;
      if (i > 0) parents[i] = static_cast<int32_t>(random() % i);
    }
    for (int i = n - 1; i > 0; --i) {
      sibling[i] = child[parents[i]];
      child[parents[i]] = i;
    }
    const auto results = [&](int size, auto&& with) {
      std::vector<int64_t> all(8 * n + 4 * depth + 40, -7);
      int64_t* at = all.data();
      std::vector<int32_t> paths(n), sums(2 * size), steps(n), index(depth + 1), shared(1);
      std::vector<eagle2::CoinStep> coin_steps(n);
      std::vector<double> parts(eagle2::draw_chunks(vocab) * eagle2::kDrawLanes), totals(2);
      std::vector<int64_t> found(2);
      std::vector<uint32_t> excluded((vocab + 31) / 32);
      std::vector<char> cache(16 * n), staged(16 * n);
      std::vector<char*> from(n), to(n);
      for (size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<char>(i % 101);
      std::vector<int32_t> order(n);
      for (int i = 0; i < n; ++i) order[i] = (i * 7 + 3) % n;
      int32_t length[2];
      int64_t bonus[2];
      with([&](const auto& team) {
        eagle2::leaf_paths(team, parents.data(), n, n, 3, paths.data(), sums.data(), at);
        eagle2::accept_path(team, target.data(), draft.data(), child.data(), sibling.data(), n,
                            depth, steps.data(), index.data(), &length[0], &bonus[0]);
        team.sync();
        const auto probability = [&](int64_t, int64_t token) {
          return token < 0 || token >= vocab ? 0.0 : masses[token];
        };
        const auto draw = [&](int64_t, int32_t first) {
          eagle2::exclude_children(team, first, sibling.data(), draft.data(), n, vocab,
                                   excluded.data());
          const auto mass = [&](int64_t token) {
            return eagle2::is_excluded(excluded.data(), token) ? 0.0 : masses[token];
          };
          return eagle2::draw_token(team, mass, vocab, 0.5,
                                    eagle2::DrawScratch{parts.data(), totals.data(), found.data()});
        };
        eagle2::accept_by_coins(
            team, probability, [&](int64_t slot) { return coins[slot]; }, draw, draft.data(),
            child.data(), sibling.data(), n, depth, coin_steps.data(), index.data(), &length[1],
            &bonus[1]);
        eagle2::move_path(
            team, eagle2::AcceptedPath{order.data(), 1, n, 0}, eagle2::RowUnits{0, 4, 2, 4, 8},
            [&](int64_t position) { return position < n ? cache.data() + 16 * position : nullptr; },
            [](const char* a, char* b) { std::memcpy(b, a, 4); },
            eagle2::MoveScratch{from.data(), to.data(), shared.data(), staged.data()});
      });
      all.insert(all.end(), index.begin(), index.end());
      all.insert(all.end(), cache.begin(), cache.end());
      all.insert(all.end(), {length[0], length[1], bonus[0], bonus[1]});
      return all;
    };
    const auto alone = results(1, [](const auto& body) { body(eagle2::SoloTeam{}); });
    different += alone != results(3, [](const auto& body) { run_team(3, body); });
  }
  std::printf("%d\n", different);
  return different != 0;
}
