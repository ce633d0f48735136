// One sequence of requests: its log, its plans, its windows, and the arenas from which requests are served. The CPU has one
// lane (pool.cpp); CUDA has one for each stream (streams.cpp).
//
// A window is one step of a lane. In a logged window every request gets a number, and a free is noted with the number of
// the request that comes next. In a planned window the n-th request gets the offset that was planned for it. Correctness never
// depends on the plan: a request is served from the arena only if it has the planned size, and if no live buffer has a byte of
// its range. Everything else is served by the ordinary allocator, and counted. An arena lives until its last buffer is freed.
//
// A lane locks nothing, and neither allocates nor frees arenas. Its caller holds a lock, gives it the memory of an arena
// (`adopt`), and frees the arenas in `dead` after releasing the lock.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace memopt {

enum Count {
  kServed,         // requests with an address in the arena
  kServedBytes,
  kOutside,        // requests that the plan leaves to the ordinary allocator, and those of the next step's batch
  kOutsideBytes,
  kDiffers,        // unplanned requests
  kDiffersBytes,
  kOccupied,       // requests whose planned range has a live buffer
  kOccupiedBytes,
  kSkipped,        // planned requests that did not come
  kOtherThreads,   // requests of other threads
  kOtherThreadsBytes,
  kCounts
};

struct Request {
  int64_t nbytes;
  int64_t freed;  // number of the next request when it was freed; -1: it is live
};

struct Plan {
  std::vector<int64_t> nbytes;   // of every request of the step
  std::vector<int64_t> offsets;  // of every request; -1: it is left to the ordinary allocator
};

struct Arena {
  char* base;
  int64_t nbytes;
  std::map<int64_t, int64_t> live;  // offset -> end of every live buffer

  bool has(const void* at) const { return at >= base && at < base + nbytes; }
  bool is_free(int64_t begin, int64_t end) const;
};

class Lane {
 public:
  // Begins and ends the log. The previous log is forgotten.
  void log();
  void log_ends();
  bool logging() const { return logging_; }
  int64_t logged() const { return requests_.size(); }
  // Writes two numbers for each of the first `n` logged requests: its bytes, and the number of the next request when it was
  // freed (-1: it was not freed).
  void read(int64_t n, int64_t* to) const;
  // The ordinary allocator has served a request, or is about to free its memory.
  void requested(void* context, int64_t nbytes);
  void freed(void* context);

  // Adds the plan of a step with `n` requests: bytes and offset of each. Returns its number.
  int64_t add(int64_t n, const int64_t* nbytes, const int64_t* offsets);
  void remove(int64_t number);
  bool knows(int64_t number) const { return plans_.count(number) != 0; }

  // Puts an arena of at least `nbytes` in use, if there is one. A smaller one is retired.
  bool has_arena(int64_t nbytes);
  // Puts new memory in use as the arena.
  void adopt(void* base, int64_t nbytes);
  // Takes the arena out of use. It becomes dead when its last buffer is freed.
  void retire();
  Arena* owner(const void* at);
  int64_t arenas_nbytes() const;
  int64_t live_nbytes() const;
  std::vector<Arena*>& dead() { return dead_; }

  // Windows. `begin`: under a known plan, in the arena in use. Returns the bytes of the arena.
  int64_t begin(int64_t number);
  void end();
  int64_t window() const { return window_; }
  bool planned() const { return plan_ != nullptr; }
  // An address for the next request, or null: then the ordinary allocator must serve it.
  void* take(int64_t nbytes);
  // Ends the use of an address that `take` returned. Returns whether it was one.
  bool give_back(const void* at);
  void count(Count what, int64_t nbytes);
  const int64_t* counts() const { return counts_; }

 private:
  int64_t place_of(int64_t nbytes);
  void drop(Arena* empty);
  void begin_window();

  std::map<int64_t, Plan> plans_;
  std::vector<Arena*> arenas_;  // the one in use, and older ones with live buffers
  std::vector<Arena*> dead_;    // they have no buffers and can be freed
  std::vector<Request> requests_;
  std::unordered_map<void*, int64_t> logged_;
  Arena* arena_ = nullptr;  // the one in use
  const Plan* plan_ = nullptr;
  int64_t next_plan_ = 1, windows_ = 0;
  int64_t window_ = 0;      // number of the window; 0: there is none
  bool logging_ = false;
  int64_t expected_ = 0;    // number of the next planned request, if each request so far replaces a planned one
  int64_t matched_ = 0;     // number of requests that matched planned ones
  int64_t unexpected_ = 0;  // number of requests since the last match, and their bytes
  int64_t unexpected_nbytes_ = 0;
  int64_t last_nbytes_ = 0;  // of the last request
  int64_t counts_[kCounts] = {};
};

}  // namespace memopt
