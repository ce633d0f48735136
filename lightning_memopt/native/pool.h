// The functions of the planned pool (pool.cpp) that an allocator calls.
#pragma once
#include <cstddef>

namespace memopt_pool {

// Whether requests are logged or planned now. If not, no other function needs to be called for a request.
bool in_window();
// An address for the next request of this thread; null if the ordinary allocator must serve it.
void* take(size_t nbytes);
// Ends the use of an address that `take` returned.
void give_back(void* at);
// Whether frees are logged now.
bool is_logging();
// The ordinary allocator has served a request, and is about to free its memory.
void requested(void* context, size_t nbytes);
void freed(void* context);
// Around a fork: the child has no window.
void before_fork();
void after_fork(bool child);

}  // namespace memopt_pool
