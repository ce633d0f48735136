// An allocator around torch's caching allocator of CUDA memory. Requests that the planned pool of their stream (streams.cpp)
// has an address for get that address; everything else is the inner allocator's. An arena is one block of the inner allocator,
// so torch's statistics count it once.
//
// Memory of the inner allocator keeps its address and its context. All memory has one deleter, `release`, because torch
// compares the deleter of CUDA graphs' memory with `raw_deleter`. The allocator is never taken away, because memory that it
// returned may outlive every session.
//
// The functions of CUDAAllocator differ between versions of torch. None is declared `override`, so that one that a version
// lacks is simply never called. A new one without a default makes this file fail to compile, and then there is no pool.
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <string>
#include <utility>

#include "fences.h"
#include "streams.h"

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
namespace streams = memopt_streams;
using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;

caching::CUDAAllocator* inner = nullptr;

// Calls a template with the inner allocator, which can test for functions that a version of torch lacks.
template <class F>
auto call(F f) {
  return f(inner);
}

void release(void* context) {
  if (streams::give_back(context)) return;
  streams::freed(context);
  inner->raw_deleter()(context);
}

// Memory of the inner allocator, with our deleter.
DataPtr ours(DataPtr made) {
  (void)made.compare_exchange_deleter(inner->raw_deleter(), &release);
  return made;
}

// Finds the stream of a request of this thread: torch's current stream of its current device, which CUDA may not know yet.
// Returns whether the request is logged or planned. It is not while torch's CUDA sanitizer, which must see each, is on.
bool is_pooled(size_t nbytes, streams::StreamKey* place) {
  if (!streams::in_window() || nbytes == 0 || c10::impl::GPUTrace::haveState) return false;
  DeviceIndex device = 0;
  if (c10::cuda::GetDevice(&device) != cudaSuccess) return false;
  *place = {device, c10::cuda::getCurrentCUDAStream(device).stream()};
  return true;
}

// A pointer that the inner allocator knows: the arena's beginning for a pointer into an arena.
void* known(void* at) {
  void* const base = streams::arena_of(at);
  return base == nullptr ? at : base;
}

class Ordinary final : public streams::Ordinary {
 public:
  void* allocate(int device, cudaStream_t stream, size_t nbytes) override {
    try {
      const memopt::OnDevice here(device);
      return inner->raw_alloc_with_stream(nbytes, stream);
    } catch (const std::exception&) {  // out of memory
      return nullptr;
    }
  }
  void free(void* at) override { inner->raw_delete(at); }
  void trim() override { inner->emptyCache(); }
  int64_t live_nbytes(int device) override {
    return inner->getDeviceStats(static_cast<DeviceIndex>(device)).requested_bytes[0].current;
  }
};

class Planned final : public caching::CUDAAllocator {
 public:
  DataPtr allocate(size_t n) {
    streams::StreamKey place;
    if (!is_pooled(n, &place)) return ours(inner->allocate(n));
    if (void* const at = streams::take(place, n))
      return {at, at, &release, c10::Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(place.device))};
    DataPtr made = ours(inner->allocate(n));
    streams::served(place, made.get_context(), n);
    return made;
  }
  void* raw_alloc(size_t n) {
    streams::StreamKey place;
    if (!is_pooled(n, &place)) return inner->raw_alloc(n);
    return pooled(place, n, [&] { return inner->raw_alloc(n); });
  }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) {
    streams::StreamKey place;
    if (!is_pooled(n, &place)) return inner->raw_alloc_with_stream(n, stream);
    place.stream = stream;
    return pooled(place, n, [&] { return inner->raw_alloc_with_stream(n, stream); });
  }
  void raw_delete(void* at) {
    if (streams::give_back(at)) return;
    streams::freed(at);
    inner->raw_delete(at);
  }
  c10::DeleterFnPtr raw_deleter() const { return &release; }
  bool is_simple_data_ptr(const DataPtr& p) const { return inner->is_simple_data_ptr(p); }
  void copy_data(void* to, const void* from, size_t n) const { inner->copy_data(to, from, n); }

  void recordStream(const DataPtr& p, c10::cuda::CUDAStream stream) {
    if (streams::used_by(p.get(), {stream.device_index(), stream.stream()})) return;
    if (p.get_deleter() != &release) return inner->recordStream(p, stream);
    // the inner allocator ignores memory that does not have its own deleter
    DataPtr shown(p.get(), p.get_context(), inner->raw_deleter(), p.device());
    struct Kept {  // `shown` must never free, whatever is thrown
      DataPtr& shown;
      ~Kept() { (void)shown.release_context(); }
    } const kept{shown};
    inner->recordStream(shown, stream);
  }
  void* getBaseAllocation(void* at, size_t* size) { return inner->getBaseAllocation(known(at), size); }
  caching::ShareableHandle shareIpcHandle(void* at) {
    void* const base = known(at);
    caching::ShareableHandle handle = inner->shareIpcHandle(base);
    handle.offset += static_cast<char*>(at) - static_cast<char*>(base);
    return handle;
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* at) {
    return call([&](auto* a) {
      if constexpr (requires { a->getContextForPointer(at); }) return a->getContextForPointer(known(const_cast<void*>(at)));
      else return std::shared_ptr<c10::GatheredContext>();
    });
  }

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) {
    streams::capture_begins(device);
    inner->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) {
    inner->endAllocateToPool(device, pool);
    streams::capture_ends(device);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) {
    caching::CheckpointDelta delta = inner->setCheckpointPoolState(device, std::move(state));
    for (DataPtr& made : delta.dataptrs_allocd) made = ours(std::move(made));
    return delta;
  }
  DataPtr allocateWithAddress(size_t n, void* at) {
    return call([&](auto* a) {
      if constexpr (requires { a->allocateWithAddress(n, at); }) return ours(a->allocateWithAddress(n, at));
      else return DataPtr();
    });
  }

  // Everything below is the inner allocator's.
  void init(int count) { inner->init(count); }
  bool initialized() { return inner->initialized(); }
  double getMemoryFraction(DeviceIndex d) { return inner->getMemoryFraction(d); }
  void setMemoryFraction(double fraction, DeviceIndex d) { inner->setMemoryFraction(fraction, d); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex d) { return inner->getExpandableSegmentSizes(d); }
  void enable(bool value) { inner->enable(value); }
  bool isEnabled() const { return inner->isEnabled(); }
  void emptyCache(MempoolId_t pool = {0, 0}) { inner->emptyCache(pool); }
  void cacheInfo(DeviceIndex d, size_t* largest) { inner->cacheInfo(d, largest); }
  caching::DeviceStats getDeviceStats(DeviceIndex d) { return inner->getDeviceStats(d); }
  void resetAccumulatedStats(DeviceIndex d) { inner->resetAccumulatedStats(d); }
  void resetPeakStats(DeviceIndex d) { inner->resetPeakStats(d); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) { return inner->getMemoryInfo(d); }
  caching::SnapshotInfo snapshot(MempoolId_t pool) { return inner->snapshot(pool); }
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool traces) {
    return call([&](auto* a) {
      if constexpr (requires { a->snapshot(pool, traces); }) return a->snapshot(pool, traces);
      else return a->snapshot(pool);
    });
  }
  void markCaptureBegin(DeviceIndex d) {
    call([&](auto* a) { if constexpr (requires { a->markCaptureBegin(d); }) a->markCaptureBegin(d); });
  }
  void markCaptureEnd(DeviceIndex d) {
    call([&](auto* a) { if constexpr (requires { a->markCaptureEnd(d); }) a->markCaptureEnd(d); });
  }
  void releasePool(DeviceIndex d, MempoolId_t pool) { inner->releasePool(d, pool); }
  int getPoolUseCount(DeviceIndex d, MempoolId_t pool) { return inner->getPoolUseCount(d, pool); }
  void createOrIncrefPool(DeviceIndex d, MempoolId_t pool, std::shared_ptr<caching::CUDAAllocator> from) {
    inner->createOrIncrefPool(d, pool, std::move(from));
  }
  void setUseOnOOM(DeviceIndex d, MempoolId_t pool, bool use) { inner->setUseOnOOM(d, pool, use); }
  void setNoSplit(DeviceIndex d, MempoolId_t pool) { inner->setNoSplit(d, pool); }
  bool checkPoolLiveAllocations(DeviceIndex d, MempoolId_t pool, const std::unordered_set<void*>& expected) {
    return inner->checkPoolLiveAllocations(d, pool, expected);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) { return inner->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() { return inner->isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t entries, caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) {
    inner->recordHistory(enabled, recorder, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& of) { inner->recordAnnotation(of); }
  void pushCompileContext(std::string& of) { inner->pushCompileContext(of); }
  void popCompileContext() { inner->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) { inner->setUserMetadata(metadata); }
  std::string getUserMetadata() { return inner->getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) { inner->attachOutOfMemoryObserver(std::move(observer)); }
  void attachOomRejectionObserver(std::function<void(int64_t, size_t, size_t, size_t)> observer) {
    call([&](auto* a) {
      if constexpr (requires { a->attachOomRejectionObserver(observer); }) a->attachOomRejectionObserver(observer);
    });
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) {
    inner->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex d, DeviceIndex to) { inner->enablePeerAccess(d, to); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t stream, bool p2p) {
    return inner->memcpyAsync(to, to_device, from, from_device, n, stream, p2p);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex d, MempoolId_t pool) {
    return inner->getCheckpointState(d, pool);
  }
  std::string name() { return inner->name(); }

 private:
  template <class Otherwise>
  static void* pooled(streams::StreamKey place, size_t n, Otherwise otherwise) {
    if (void* const at = streams::take(place, n)) return at;
    void* const at = otherwise();
    streams::served(place, at, n);
    return at;
  }
};

Planned* planned = nullptr;

bool is_installed() {
  return planned != nullptr && caching::allocator.load() == planned && c10::GetAllocator(c10::kCUDA) == planned;
}

}  // namespace

extern "C" {

// Whether torch allocates CUDA memory through this allocator.
int memopt_cuda_installed() { return is_installed(); }

// Installs it around torch's own, with the lowest sufficient priority, so that others can still set theirs.
int memopt_cuda_install() {
  if (planned != nullptr) return is_installed();
  inner = caching::allocator.load();
  if (inner == nullptr || inner->name() != "native" || !inner->initialized()) return 0;
  streams::serve(new Ordinary);
  planned = new Planned;
  for (int priority = 0; priority < 256 && c10::GetAllocator(c10::kCUDA) != planned; ++priority)
    c10::SetAllocator(c10::kCUDA, planned, static_cast<uint8_t>(priority));
  caching::allocator.store(planned);
  return is_installed();
}

// A request and a free by the functions that torch itself uses, for the check. `door`: 0 those for tensors, 1 those for
// workspaces, 2 those of code that looks up the allocator of a device. Null if there is no memory.
void* memopt_cuda_request(int64_t nbytes, int door) {
  try {
    if (door == 1) return caching::raw_alloc(nbytes);
    c10::Allocator* const from = door == 0 ? static_cast<c10::Allocator*>(caching::get()) : c10::GetAllocator(c10::kCUDA);
    return from->raw_allocate(nbytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void memopt_cuda_free(void* at, int door) {
  if (door == 1) caching::raw_delete(at);
  else caching::get()->raw_deallocate(at);
}
}
