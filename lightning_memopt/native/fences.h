// A fence stands on a range of an arena: other streams used its buffer until it was freed, and the arena's stream waits for
// them before it uses the range again. The functions here call the CUDA runtime, so never call them under a lock.
#pragma once
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "streams.h"

namespace memopt {

using memopt_streams::Place;

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

struct Fence {
  const char* begin;
  const char* end;
  std::vector<cudaEvent_t> events;
  std::vector<Place> late;  // streams whose event could not be recorded when the buffer was freed
};

// What a stream has to do until now, as an event; null if there can be none: then that has been waited for.
cudaEvent_t event_of(Place place);

// From now on a stream does nothing before the users of these buffers are ready.
void wait_for(Place place, std::vector<Fence>& fences);

}  // namespace memopt
