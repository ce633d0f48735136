// The planned pool of the CPU: requests of a step are logged, and later steps get addresses in one arena that were planned from
// the log (lane.h). A window belongs to the thread that begins it.
//
// This file does not use torch: an allocator calls the functions of pool.h, Python those at the end. No object is ever
// destroyed, because memory may be freed while the process ends.
#include "pool.h"

#include "lane.h"
#include "spin.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <atomic>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace {

using namespace memopt;

constexpr std::align_val_t kPage{4096};

Spin guard;  // protects everything below that is not atomic
Lane& lane = *new Lane;
std::atomic<bool> in_any_window{false};
std::atomic<bool> logging{false};
thread_local int64_t my_window = 0;  // the window that this thread began last

// Holds the lock. At its end, updates the values that other threads read without the lock, and frees dead arenas.
struct Locked {
  Locked() { guard.lock(); }
  ~Locked() {
    in_any_window = lane.window() != 0;
    logging = lane.logging();
    std::vector<Arena*> dead;
    dead.swap(lane.dead());
    guard.unlock();
    for (Arena* arena : dead) {
      ::operator delete(arena->base, kPage);
      delete arena;
    }
  }
};

bool is_mine() { return my_window == lane.window(); }

}  // namespace

namespace memopt_pool {

bool in_window() { return in_any_window.load(std::memory_order_relaxed); }
bool is_logging() { return logging.load(std::memory_order_relaxed); }

void* take(size_t n) {
  const int64_t nbytes = static_cast<int64_t>(n);
  if (nbytes <= 0) return nullptr;
  const Locked locked;
  if (lane.planned() && !is_mine()) {
    lane.count(kOtherThreads, nbytes);
    return nullptr;
  }
  return lane.take(nbytes);
}

void give_back(void* context) {
  const Locked locked;
  lane.give_back(context);
}

void requested(void* context, size_t nbytes) {
  const Locked locked;
  if (is_mine()) lane.requested(context, static_cast<int64_t>(nbytes));
}

void freed(void* context) {
  const Locked locked;
  lane.freed(context);
}

void before_fork() { guard.lock(); }

void after_fork(bool child) {
  if (child) {
    lane.log_ends();
    in_any_window = logging = false;
  }
  guard.unlock();
}

}  // namespace memopt_pool

extern "C" {

// Begins a log, whose first window begins now in this thread. The previous log is forgotten.
void memopt_pool_log() {
  const Locked locked;
  lane.log();
  my_window = lane.window();
}

// Ends the log and the window. The logged requests stay until the next log.
void memopt_pool_log_ends() {
  const Locked locked;
  lane.log_ends();
}

// Number of requests that were logged.
int64_t memopt_pool_logged() {
  const Locked locked;
  return lane.logged();
}

// Writes the first `n` logged requests (`Lane::read`).
void memopt_pool_read(int64_t n, int64_t* to) {
  const Locked locked;
  lane.read(n, to);
}

// Adds the plan of a step with `n` requests: bytes and offset of each. Returns its number.
int64_t memopt_pool_add(int64_t n, const int64_t* nbytes, const int64_t* offsets) {
  const Locked locked;
  return lane.add(n, nbytes, offsets);
}

void memopt_pool_remove(int64_t number) {
  const Locked locked;
  lane.remove(number);
}

// Begins a window under a plan, in this thread, in an arena of at least `nbytes`. Returns the bytes of the arena. If there is
// no memory for it, returns 0 and begins no window.
int64_t memopt_pool_begin(int64_t number, int64_t nbytes) {
  const Locked locked;
  lane.end();
  if (!lane.knows(number)) return 0;
  if (!lane.has_arena(nbytes)) {
#ifdef __GLIBC__
    malloc_trim(0);  // otherwise the ordinary allocator keeps the memory of steps without the arena
#endif
    void* const base = ::operator new(nbytes, kPage, std::nothrow);
    if (base == nullptr) return 0;
    lane.adopt(base, nbytes);
  }
  const int64_t arena_nbytes = lane.begin(number);
  my_window = lane.window();
  return arena_nbytes;
}

// Ends the window, if there is one. `free`: the arena is freed, now or with its last buffer.
void memopt_pool_end(int free) {
  const Locked locked;
  lane.end();
  if (free) lane.retire();
}

// Writes the counts of the window that is open, or of the last one.
void memopt_pool_counts(int64_t* to) {
  const Locked locked;
  for (int i = 0; i < kCounts; ++i) to[i] = lane.counts()[i];
}

// Bytes of all arenas that are not freed, and of the live buffers in them.
void memopt_pool_arenas(int64_t* to) {
  const Locked locked;
  to[0] = lane.arenas_nbytes();
  to[1] = lane.live_nbytes();
}
}
