// A stream fence guards a freed range of an arena whose buffer other streams used: the arena's stream waits for them before it uses
// the range again. The functions here call the CUDA runtime, so never call them under a lock.
#pragma once
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "streams.h"

namespace memopt {

using memopt_streams::StreamKey;

// The default stream has no handle of its own: calls for it go to the current device. Afterwards the previous device is made
// current again as torch does it, so that no context is made on a device that has none.
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
  std::vector<StreamKey> late;  // streams whose event could not be recorded when the buffer was freed
};

// An event after all present work of a stream; null if no event can be made, in which case that work has been waited for.
cudaEvent_t event_of(StreamKey place);

// Makes a stream wait until the streams that used these buffers have finished.
void wait_for(StreamKey place, std::vector<Fence>& fences);

}  // namespace memopt
