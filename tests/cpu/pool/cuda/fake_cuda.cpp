// A CUDA runtime and a c10_cuda without a device, for tests of native/cuda.cpp: they are built instead of the real ones.
//
// Device memory is memory of the C library. A stream is a counter of what it was given to do, and knows how much of each other
// stream it waits for. The caching allocator caches nothing; it knows its blocks, and refuses pointers that are none, as torch's
// does.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace caching = c10::cuda::CUDACachingAllocator;

namespace {

struct Block {
  size_t nbytes;
  int device;
  cudaStream_t stream;
};
using Streams = std::map<cudaStream_t, int64_t>;
struct Event {
  int device;
  cudaStream_t stream = nullptr;
  int64_t done = -1;
};

std::mutex& lock = *new std::mutex;
std::map<void*, Block>& blocks = *new std::map<void*, Block>;
std::map<void*, std::set<cudaStream_t>>& recorded = *new std::map<void*, std::set<cudaStream_t>>;
Streams& given = *new Streams;                                        // what each stream was given to do
std::map<cudaStream_t, Streams>& waits = *new std::map<cudaStream_t, Streams>;  // what of other streams each waits for
int64_t events = 0, trims = 0, wrong = 0, peak = 0;
size_t limit = SIZE_MAX;
bool fails = false;
thread_local int device = 0;
thread_local int64_t stream = 0;

// Streams of device 1 have numbers from 1000 on; the default stream is the current device's.
int device_of(cudaStream_t of) { return reinterpret_cast<intptr_t>(of) / 1000; }
cudaStream_t resolved(cudaStream_t of) { return of == nullptr ? reinterpret_cast<cudaStream_t>(intptr_t{1000} * device) : of; }

[[noreturn]] void invalid() { TORCH_CHECK(false, "invalid device pointer"); }

void fake_raw_delete(void* at);

class Inner final : public caching::CUDAAllocator {
 public:
  void* make(size_t n, cudaStream_t on) {
    if (n == 0) return nullptr;
    const std::lock_guard<std::mutex> locked(lock);
    TORCH_CHECK(live(device) + static_cast<int64_t>(n) <= static_cast<int64_t>(std::min<size_t>(limit, INT64_MAX)), "out of memory");
    void* const at = std::aligned_alloc(512, (n + 511) / 512 * 512);
    blocks[at] = {n, device, on};
    if (device == 0) peak = std::max(peak, live(0));
    return at;
  }
  static int64_t live(int of) {
    int64_t sum = 0;
    for (const auto& [at, block] : blocks) sum += block.device == of ? block.nbytes : 0;
    return sum;
  }
  static Block block_of(void* at) {
    const std::lock_guard<std::mutex> locked(lock);
    const auto known = blocks.find(at);
    if (known == blocks.end()) invalid();
    return known->second;
  }
  c10::DataPtr allocate(size_t n) override {
    void* const at = make(n, reinterpret_cast<cudaStream_t>(stream));
    return {at, at, &fake_raw_delete, c10::Device(c10::DeviceType::CUDA, device)};
  }
  void* raw_alloc(size_t n) override { return make(n, reinterpret_cast<cudaStream_t>(stream)); }
  void* raw_alloc_with_stream(size_t n, cudaStream_t on) override { return make(n, on); }
  void raw_delete(void* at) override {
    if (at == nullptr) return;
    const std::lock_guard<std::mutex> locked(lock);
    if (blocks.erase(at) == 0) invalid();
    recorded.erase(at);
    std::free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &fake_raw_delete; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& p, c10::cuda::CUDAStream on) override {
    if (p.get() == nullptr || p.get_deleter() != &fake_raw_delete) return;
    (void)block_of(p.get());
    const std::lock_guard<std::mutex> locked(lock);
    recorded[p.get()].insert(on.stream());
  }
  void* getBaseAllocation(void* at, size_t* size) override {
    const Block block = block_of(at);
    if (size != nullptr) *size = block.nbytes;
    return at;
  }
  caching::ShareableHandle shareIpcHandle(void* at) override {
    (void)block_of(at);
    return {64, "handle"};  // the block's place in its segment
  }
  caching::DeviceStats getDeviceStats(c10::DeviceIndex of) override {
    const std::lock_guard<std::mutex> locked(lock);
    caching::DeviceStats stats;
    stats.requested_bytes[0].current = live(of);
    return stats;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { ++trims; }
  std::string name() override { return "native"; }

  // What no test needs.
  void init(int) override {}
  double getMemoryFraction(c10::DeviceIndex) override { return 1; }
  void setMemoryFraction(double, c10::DeviceIndex) override {}
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { return {}; }
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  void cacheInfo(c10::DeviceIndex, size_t*) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  caching::SnapshotInfo snapshot(c10::MempoolId_t, bool) override { return {}; }
  void beginAllocateToPool(c10::DeviceIndex, c10::MempoolId_t, std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t) override {}
  void releasePool(c10::DeviceIndex, c10::MempoolId_t) override {}
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return nullptr; }
  void recordHistory(bool, caching::CreateContextFn, size_t, caching::RecordContext, bool,
                     const std::vector<std::string>&) override {}
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver) override {}
  void attachOomRejectionObserver(caching::OomRejectionObserver) override {}
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override {}
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override {}
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override { return cudaSuccess; }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex, c10::MempoolId_t) override { return nullptr; }
  caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex, std::shared_ptr<caching::AllocatorState>) override {
    caching::CheckpointDelta delta;
    delta.dataptrs_allocd.push_back(allocate(100));
    return delta;
  }
};

Inner& inner = *new Inner;

void fake_raw_delete(void* at) { inner.raw_delete(at); }

struct Register {
  Register() { c10::SetAllocator(c10::kCUDA, &inner); }
} const registered;

c10::cuda::CUDAStream as_stream(int64_t id) {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED,
                               c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), id));
}

}  // namespace

namespace c10::cuda {
namespace CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator{&inner};
}
cudaError_t GetDevice(DeviceIndex* to) { return *to = static_cast<DeviceIndex>(device), cudaSuccess; }
cudaError_t SetDevice(DeviceIndex to, const bool) { return device = to, cudaSuccess; }
cudaError_t MaybeSetDevice(DeviceIndex to) { return SetDevice(to, false); }
CUDAStream getCurrentCUDAStream(DeviceIndex) { return as_stream(stream); }
cudaStream_t CUDAStream::stream() const { return reinterpret_cast<cudaStream_t>(stream_.id()); }
void c10_cuda_check_implementation(const int32_t error, const char*, const char*, const uint32_t, const bool) {
  TORCH_CHECK(error == 0, "CUDA error");
}
}  // namespace c10::cuda

extern "C" {

// The runtime. An event or a stream of another device than the current one is an error, as on a device.
cudaError_t cudaGetDevice(int* to) { return *to = device, cudaSuccess; }
cudaError_t cudaSetDevice(int to) { return device = to, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t*, size_t*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) {
  const std::lock_guard<std::mutex> locked(lock);
  if (fails) return cudaErrorUnknown;
  ++events;
  *to = reinterpret_cast<cudaEvent_t>(new Event{device});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard<std::mutex> locked(lock);
  --events;
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) {
  const std::lock_guard<std::mutex> locked(lock);
  auto* const e = reinterpret_cast<Event*>(event);
  e->stream = resolved(on);
  if (e->device != device_of(e->stream)) return ++wrong, cudaErrorInvalidResourceHandle;
  e->done = given[e->stream];
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t waiting, cudaEvent_t event, unsigned) {
  const std::lock_guard<std::mutex> locked(lock);
  const auto* const e = reinterpret_cast<Event*>(event);
  if (e->done < 0) return ++wrong, cudaErrorInvalidResourceHandle;
  int64_t& until = waits[resolved(waiting)][e->stream];
  until = std::max(until, e->done);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t of) {
  const std::lock_guard<std::mutex> locked(lock);
  for (auto& [other, until] : given) waits[other][of] = given[of];  // the host waits: so does all that it gives later
  waits[nullptr][of] = given[of];
  return cudaSuccess;
}

// What tests drive. A handle is a DataPtr.
void fake_on(int on_device, int64_t on_stream) { device = on_device, stream = on_stream; }
void* fake_allocate(int64_t n) {
  try {
    return new c10::DataPtr(caching::get()->allocate(n));
  } catch (const c10::Error&) {
    return nullptr;
  }
}
void* fake_data(void* handle) { return static_cast<c10::DataPtr*>(handle)->get(); }
void fake_delete(void* handle) { delete static_cast<c10::DataPtr*>(handle); }
void fake_record_stream(void* handle, int64_t id) { caching::recordStream(*static_cast<c10::DataPtr*>(handle), as_stream(id)); }
int fake_has_standard_deleter(void* handle) {
  return static_cast<c10::DataPtr*>(handle)->get_deleter() == caching::get()->raw_deleter();
}
void* fake_checkpointed() { return new c10::DataPtr(std::move(caching::setCheckpointPoolState(0, nullptr).dataptrs_allocd[0])); }
int64_t fake_recorded(void* at) {
  const std::lock_guard<std::mutex> locked(lock);
  return recorded.count(at) ? recorded[at].size() : 0;
}
void* fake_raw_alloc(int64_t n) { return caching::raw_alloc(n); }
void* fake_raw_alloc_with_stream(int64_t n, int64_t on) {
  return caching::raw_alloc_with_stream(n, reinterpret_cast<cudaStream_t>(on));
}
int fake_raw_delete_of(void* at) {
  try {
    return caching::raw_delete(at), 1;
  } catch (const c10::Error&) {
    return 0;
  }
}
void* fake_base_of(void* at) { return caching::getBaseAllocation(at, nullptr); }
int64_t fake_block_nbytes(void* at) {
  size_t nbytes = 0;
  return caching::getBaseAllocation(at, &nbytes), nbytes;
}
int64_t fake_ipc_offset(void* at) { return caching::shareIpcHandle(at).offset; }
void fake_capture(int on_device, int begins) {
  if (begins) caching::beginAllocateToPool(on_device, {0, 1}, [](cudaStream_t) { return true; });
  else caching::endAllocateToPool(on_device, {0, 1});
}
void fake_give(int64_t to) {  // a kernel
  const std::lock_guard<std::mutex> locked(lock);
  ++given[reinterpret_cast<cudaStream_t>(to)];
}
int64_t fake_given(int64_t to) {
  const std::lock_guard<std::mutex> locked(lock);
  return given[reinterpret_cast<cudaStream_t>(to)];
}
int64_t fake_waits(int64_t waiting, int64_t of) {
  const std::lock_guard<std::mutex> locked(lock);
  return waits[reinterpret_cast<cudaStream_t>(waiting)][reinterpret_cast<cudaStream_t>(of)];
}
int64_t fake_live(int of) {
  const std::lock_guard<std::mutex> locked(lock);
  return Inner::live(of);
}
int64_t fake_reset_peak() { return std::exchange(peak, 0); }
int64_t fake_blocks() { return blocks.size(); }
int64_t fake_events() { return events; }
int64_t fake_trims() { return trims; }
int64_t fake_wrong() { return wrong; }
void fake_limit(int64_t nbytes) { limit = nbytes < 0 ? SIZE_MAX : nbytes; }
void fake_fails(int value) { fails = value; }
}
