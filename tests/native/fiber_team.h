// A team of any size for csrc/tree.h on one thread: members run one after another from sync to
// sync, in another order in each phase. A phase whose result depends on the order in which its
// members run gives itself away, and so does a sync that not every member reaches.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

class FiberTeam {
 public:
  // What the members of one team share.
  class Crew {
   public:
    Crew(int size, uint32_t seed, std::function<void(const FiberTeam&)> body)
        : body_(std::move(body)), random_(seed), members_(size), flags(size) {}

    void run() {
      for (size_t rank = 0; rank < members_.size(); ++rank) start(static_cast<int>(rank));
      std::vector<int> order(members_.size());
      std::iota(order.begin(), order.end(), 0);
      size_t done = 0;
      while (done == 0) {
        std::shuffle(order.begin(), order.end(), random_);
        for (const int rank : order) {
          running_ = rank;
          swapcontext(&main_, &members_[rank].context);
          done += members_[rank].done;
        }
        if (done != 0 && done != members_.size()) {
          throw std::runtime_error("a member ended while others wait for it");
        }
      }
    }

    void wait() { swapcontext(&members_[running_].context, &main_); }

    int size() const { return static_cast<int>(members_.size()); }

   private:
    static constexpr size_t kStackBytes = 64 << 10;

    struct Member {
      ucontext_t context;
      std::unique_ptr<char[]> stack;
      bool done = false;
    };

    void start(int rank) {
      Member& member = members_[rank];
      member.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
      getcontext(&member.context);
      member.context.uc_stack.ss_sp = member.stack.get();
      member.context.uc_stack.ss_size = kStackBytes;
      member.context.uc_link = &main_;
      const auto crew = reinterpret_cast<uintptr_t>(this);
      makecontext(&member.context, reinterpret_cast<void (*)()>(&Crew::enter), 2,
                  static_cast<unsigned>(crew), static_cast<unsigned>(crew >> 32));
    }

    static void enter(unsigned low, unsigned high) {
      Crew* const crew = reinterpret_cast<Crew*>(uintptr_t{high} << 32 | low);
      const int rank = crew->running_;
      crew->body_(FiberTeam(*crew, rank));
      crew->members_[rank].done = true;
    }

    std::function<void(const FiberTeam&)> body_;
    std::mt19937 random_;
    std::vector<Member> members_;
    ucontext_t main_;
    int running_ = 0;

   public:
    std::vector<int> flags;
  };

  int rank() const { return rank_; }
  int size() const { return crew_->size(); }
  void sync() const { crew_->wait(); }
  bool any(bool flag) const {
    crew_->flags[rank_] = flag;
    sync();
    const bool found = std::ranges::any_of(crew_->flags, [](int f) { return f != 0; });
    sync();
    return found;
  }
  int32_t add(int32_t* counter, int32_t value) const {
    const int32_t old = *counter;
    *counter += value;
    return old;
  }

 private:
  FiberTeam(Crew& crew, int rank) : crew_(&crew), rank_(rank) {}

  Crew* crew_;
  int rank_;
};

// Runs body(team) for `size` members.
template <typename Body>
void run_fibers(int size, const Body& body) {
  static uint32_t seed = 0;
  FiberTeam::Crew(size, ++seed, [&](const FiberTeam& team) { body(team); }).run();
}
