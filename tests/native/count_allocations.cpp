// Preloaded: counts what one library asks of the heap between count_start and count_stop.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" void* __libc_malloc(size_t bytes);
extern "C" void* __libc_memalign(size_t alignment, size_t bytes);

namespace {

std::atomic<const char*> library;  // a part of its file name
std::atomic<size_t> smallest;
std::atomic<long> count;

void see(size_t bytes, const void* caller) {
  const char* const name = library;
  Dl_info info;
  if (name == nullptr || bytes < smallest || dladdr(caller, &info) == 0) return;
  if (std::strstr(info.dli_fname, name) != nullptr) ++count;
}

void* aligned(size_t bytes, std::align_val_t alignment) {
  return __libc_memalign(static_cast<size_t>(alignment), bytes);
}

}  // namespace

extern "C" void count_start(const char* name, size_t bytes) {
  smallest = bytes;
  count = 0;
  library = name;
}

extern "C" long count_stop() {
  library = nullptr;
  return count;
}

#define SEE(bytes) see(bytes, __builtin_return_address(0))

extern "C" void* malloc(size_t bytes) {
  SEE(bytes);
  return __libc_malloc(bytes);
}

extern "C" int posix_memalign(void** place, size_t alignment, size_t bytes) {
  SEE(bytes);
  *place = __libc_memalign(alignment, bytes);
  return *place == nullptr ? ENOMEM : 0;
}

void* operator new(size_t bytes) {
  SEE(bytes);
  return __libc_malloc(bytes);
}
void* operator new[](size_t bytes) {
  SEE(bytes);
  return __libc_malloc(bytes);
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  SEE(bytes);
  return __libc_malloc(bytes);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  SEE(bytes);
  return __libc_malloc(bytes);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  SEE(bytes);
  return aligned(bytes, alignment);
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  SEE(bytes);
  return aligned(bytes, alignment);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }
