// The functions of the planned pools of streams (streams.cpp) that an allocator of CUDA memory calls. Does not use torch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace memopt_streams {

// The ordinary allocator, from which arenas are allocated.
class Ordinary {
 public:
  // Memory that belongs to a stream, or null.
  virtual void* allocate(int device, cudaStream_t stream, size_t nbytes) = 0;
  virtual void free(void* at) = 0;
  // Gives cached memory back to the system.
  virtual void trim() = 0;
  // All live bytes that were requested from it, including the arenas.
  virtual int64_t live_nbytes(int device) = 0;
};

struct StreamKey {
  int device;
  cudaStream_t stream;
};

// Must be called before everything else. It is never freed.
void serve(Ordinary* ordinary);
// Whether requests of any stream are logged or planned now. If not, no other function needs to be called for a request.
bool in_window();
// An address for the next request of a stream; null if the ordinary allocator must serve it.
void* take(StreamKey place, size_t nbytes);
// The ordinary allocator has served a request, and is about to free its memory.
void served(StreamKey place, void* context, size_t nbytes);
void freed(void* context);
// Ends the use of an address that `take` returned. Returns whether it was one.
bool give_back(void* at);
// The beginning of the arena that contains an address; null if none does.
void* arena_of(const void* at);
// Another stream uses a buffer. After the buffer is freed, its range is not used again until the present work of that stream is
// done. Returns whether it is a buffer in an arena.
bool used_by(const void* at, StreamKey user);
// From now on, memory of a device is allocated for a CUDA graph, or for a private pool: all requests are left to the ordinary
// allocator until all captures that began have ended.
void capture_begins(int device);
void capture_ends(int device);

}  // namespace memopt_streams
