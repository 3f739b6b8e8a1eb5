// Scratch memory of the CPU kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace eagle2 {

// Scratch memory that ends with its holder. The thread keeps it for the next one: memory fresh from
// the system costs more page faults than a short call takes. A thread holds one of a kind at a
// time.
template <typename Holder>
class ArenaOf {
 public:
  ~ArenaOf() {
    Memory& memory = thread_memory();
    if (memory.blocks.size() > 1 || memory.size > kKept) {
      memory.blocks.clear();
      memory.wish = std::min(taken_, kKept);
    }
  }

  template <typename T>
  T* take(int64_t count) {
    Memory& memory = thread_memory();
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    if (memory.blocks.empty() || used_ + bytes > memory.size) {
      memory.size = std::max(bytes, memory.wish);
      memory.blocks.push_back(allocate(memory.size));
      used_ = 0;
    }
    char* at = memory.blocks.back().get() + used_;
    used_ += bytes;
    taken_ += bytes;
    return reinterpret_cast<T*>(at);
  }

 private:
  static constexpr size_t kAlign = 64;
  static constexpr size_t kKept = 16 << 20;  // bytes a thread holds on to
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  using Block = std::unique_ptr<char, Free>;
  struct Memory {
    std::vector<Block> blocks;
    size_t size = 0;          // of the last block
    size_t wish = 256 << 10;  // of the next one
  };
  static Memory& thread_memory() {
    static thread_local Memory memory;
    return memory;
  }
  static Block allocate(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, kAlign, bytes) != 0) throw std::bad_alloc();
    return Block(static_cast<char*>(p));
  }
  size_t used_ = 0, taken_ = 0;
};

// Of one task, and of a call whose tasks take their own.
using Arena = ArenaOf<struct Task>;
using CallArena = ArenaOf<struct Call>;

}  // namespace eagle2
