// Copies and fills. In bytes mode a device's memory has no values: what is copied from it is zero.
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "emulated.h"

using namespace emulated;

namespace {
constexpr double kLatency = 2e-6, kOnDevice = 1.5e12, kLink = 50e9;  // seconds; bytes a second (the clock's, nobody waits for it)

// Whole pages are given back to the system, which gives zeros when somebody reads them: models are larger than this machine.
void clear(void* to, size_t nbytes) {
  constexpr size_t kPage = 4096;
  char* const begin = static_cast<char*>(to);
  char* const first = begin + (kPage - reinterpret_cast<uintptr_t>(begin) % kPage) % kPage;
  const size_t whole = is_pinned(to) && first < begin + nbytes ? size_t(begin + nbytes - first) / kPage * kPage : 0;
  if (whole == 0 || madvise(first, whole, MADV_DONTNEED) != 0) return (void)memset(to, 0, nbytes);
  memset(begin, 0, first - begin);
  memset(first + whole, 0, begin + nbytes - first - whole);
}
// What a copy does to memory when the device comes to it. `staged`: the bytes were taken from the host when it was asked for.
std::function<void()> copying(void* to, const void* from, size_t nbytes, bool staged) {
  if (!settings().bits) {
    if (is_device(to)) return {};
    return [=] { is_device(from) ? clear(to, nbytes) : (void)memmove(to, from, nbytes); };
  }
  if (!staged) return [=] { memmove(to, from, nbytes); };
  const char* bytes = static_cast<const char*>(from);
  auto taken = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
  return [=] { memcpy(to, taken->data(), nbytes); };
}
// A link as slow as EMULATED_LINK says, for whoever waits for the copy.
std::function<void()> slowly(std::function<void()> copy, size_t nbytes) {
  if (settings().link == 0) return copy;
  return [=] {
    std::this_thread::sleep_for(std::chrono::duration<double>(double(nbytes) / settings().link));
    if (copy) copy();
  };
}
bool is_pageable(const void* p) { return !is_device(p) && !is_pinned(p); }
}  // namespace

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t handle) {
  LOCK;
  if (nbytes == 0) return cudaSuccess;
  Stream* s = stream_of(handle);
  const bool pageable = is_pageable(to) || is_pageable(from), on_device = is_device(to) && is_device(from);
  const std::string what = std::string("copy ") + (on_device ? "on the device" : is_device(to) ? "in" : "out") +
                           (pageable ? ", pageable" : "");
  count(what);
  std::vector<Range> ranges;  // a host's pageable memory is the host's alone: it waits
  if (!is_pageable(from)) ranges.push_back(range(from, nbytes, false));
  if (!is_pageable(to)) ranges.push_back(range(to, nbytes, true));
  Op op;
  op.run = copying(to, from, nbytes, is_pageable(from));
  if (!on_device) op.run = slowly(std::move(op.run), nbytes);
  enqueue(s, std::move(op), kLatency + double(nbytes) / (on_device ? kOnDevice : kLink), ranges, what);
  if (is_pageable(to) && !s->capture) synchronize(s);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
  LOCK;
  cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
  return synchronize(stream_of(nullptr)), cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                  cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; ++i)
    cudaMemcpyAsync(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width, kind, stream);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t nbytes, cudaStream_t handle) {
  LOCK;
  count("memset");
  Op op;
  if (settings().bits || !is_device(p)) op.run = [=] { memset(p, value, nbytes); };
  enqueue(stream_of(handle), std::move(op), kLatency + double(nbytes) / kOnDevice, {range(p, nbytes, true)}, "memset");
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* p, int value, size_t nbytes) { return cudaMemsetAsync(p, value, nbytes, nullptr); }
