// What an allocator of CUDA memory asks of the planned pools of its streams (streams.cpp). No torch here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace memopt_streams {

// The ordinary allocator, which the arenas are memory of.
class Ordinary {
 public:
  // Memory that belongs to a stream, or null.
  virtual void* allocate(int device, cudaStream_t stream, size_t nbytes) = 0;
  virtual void free(void* at) = 0;
  // Gives cached memory back to the system.
  virtual void trim() = 0;
  // All bytes that are requested of it and live, with those of the arenas.
  virtual int64_t live_nbytes(int device) = 0;
};

struct Place {
  int device;
  cudaStream_t stream;
};

// Must be called before everything else. It is never freed.
void serve(Ordinary* ordinary);
// Whether requests of any stream are logged or planned now; if not, nothing else needs to be called for a request.
bool in_window();
// An address for the next request of a stream, or null: then the ordinary allocator must serve it.
void* take(Place place, size_t nbytes);
// The ordinary allocator has served a request, and is about to free its memory.
void served(Place place, void* context, size_t nbytes);
void freed(void* context);
// Ends the use of an address that `take` returned. Returns whether it was one.
bool give_back(void* at);
// The beginning of the arena that has an address; null if none has.
void* arena_of(const void* at);
// Another stream uses a buffer: its range is not used again before what that stream has to do until the buffer is freed.
// Returns whether it is a buffer in an arena.
bool used_by(const void* at, Place user);
// Memory of a device is allocated for a CUDA graph, or for a private pool, from now on: all requests are left to the
// ordinary allocator until as many captures end.
void capture_begins(int device);
void capture_ends(int device);

}  // namespace memopt_streams
