#include "fences.h"

namespace memopt {

cudaEvent_t event_of(StreamKey place) {
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

void wait_for(StreamKey place, std::vector<Fence>& fences) {
  for (Fence& fence : fences) {
    for (const StreamKey user : fence.late) fence.events.push_back(event_of(user));
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
