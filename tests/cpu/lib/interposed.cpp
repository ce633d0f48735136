// Loaded before torch: counts what its CPU allocator asks for, without knowing anything of it.
#include <dlfcn.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>

static std::mutex& guard = *new std::mutex;
static std::unordered_map<void*, size_t>& sizes = *new std::unordered_map<void*, size_t>;
static long live = 0, peak = 0;

// torch is loaded later, and into a scope of its own
static void* original(const char* name) { return dlsym(dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD), name); }

namespace c10 {
__attribute__((visibility("default"))) void* alloc_cpu(size_t nbytes) {
  static auto* const next = reinterpret_cast<void* (*)(size_t)>(original("_ZN3c109alloc_cpuEm"));
  void* const made = next(nbytes);
  const std::lock_guard<std::mutex> locked(guard);
  if (made != nullptr) {
    sizes[made] = nbytes;
    live += nbytes;
    if (live > peak) peak = live;
  }
  return made;
}
__attribute__((visibility("default"))) void free_cpu(void* data) {
  static auto* const next = reinterpret_cast<void (*)(void*)>(original("_ZN3c108free_cpuEPv"));
  {
    const std::lock_guard<std::mutex> locked(guard);
    const auto found = sizes.find(data);
    if (found != sizes.end()) {
      live -= found->second;
      sizes.erase(found);
    }
  }
  next(data);
}
}  // namespace c10

extern "C" {
long interposed_live() { return live; }
long interposed_peak() { return peak; }
void interposed_reset() { peak = live; }
}
