#include "fences.h"

#include <c10/cuda/CUDAFunctions.h>

namespace memopt {

namespace {

// The default stream has no handle of its own: calls for it go to the current device. Then the device from before is the current
// one again, as torch has it: a device without a context gets none.
struct OnDevice {
  explicit OnDevice(int device) : known_(c10::cuda::GetDevice(&before_) == cudaSuccess) {
    (void)c10::cuda::SetDevice(static_cast<c10::DeviceIndex>(device));
  }
  ~OnDevice() {
    if (known_) (void)c10::cuda::MaybeSetDevice(before_);
  }
  c10::DeviceIndex before_ = 0;
  bool known_;
};

}  // namespace

cudaEvent_t event_of(Place place) {
  const OnDevice here(place.device);
  cudaEvent_t event = nullptr;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess) {
    if (cudaEventRecord(event, place.stream) == cudaSuccess) return event;
    (void)cudaEventDestroy(event);
  }
  (void)cudaGetLastError();
  (void)cudaStreamSynchronize(place.stream);
  return nullptr;
}

void wait_for(Place place, std::vector<Fence>& fences) {
  for (Fence& fence : fences) {
    for (const Place user : fence.late) fence.events.push_back(event_of(user));
    const OnDevice here(place.device);
    for (const cudaEvent_t event : fence.events) {
      if (event == nullptr) continue;
      if (cudaStreamWaitEvent(place.stream, event, 0) != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaEventSynchronize(event);
      }
      (void)cudaEventDestroy(event);
    }
  }
  fences.clear();
}

}  // namespace memopt
