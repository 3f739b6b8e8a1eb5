// A team of threads for csrc/tree.h: what a CUDA block does, on the CPU, so that the cooperative
// path is tested where there is no GPU.
#pragma once

#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

class ThreadTeam {
 public:
  struct Shared {
    explicit Shared(int size) : barrier(size), flags(size) {}
    std::barrier<> barrier;
    std::vector<int> flags;
  };

  ThreadTeam(Shared& shared, int rank) : shared_(&shared), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(shared_->flags.size()); }
  void sync() const { shared_->barrier.arrive_and_wait(); }
  bool any(bool flag) const {
    shared_->flags[rank_] = flag;
    sync();
    int found = 0;
    for (const int f : shared_->flags) found |= f;
    sync();
    return found != 0;
  }
  int32_t add(int32_t* counter, int32_t value) const {
    return __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
  }

 private:
  Shared* shared_;
  int rank_;
};

// Runs body(team) on `size` threads in step.
template <typename Body>
void run_team(int size, const Body& body) {
  ThreadTeam::Shared shared(size);
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size; ++rank) {
    threads.emplace_back([&shared, &body, rank] { body(ThreadTeam(shared, rank)); });
  }
  body(ThreadTeam(shared, 0));
  for (std::thread& thread : threads) thread.join();
}
