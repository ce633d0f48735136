// The planned pool: requests of a step are logged, and later steps get addresses in one arena that were planned from the log.
//
// A window is one step of one thread. In a logged window every request gets a number, and a free is noted with the number of
// the request that comes next. In a planned window the n-th request gets the offset that was planned for it. Correctness never
// depends on the plan: a request is served from the arena only if it has the planned size, and if no live buffer has a byte of
// its range. Everything else is served by the ordinary allocator, and counted. An arena lives until its last buffer is freed.
//
// No torch here: an allocator calls the functions of pool.h, Python those at the end. No object is ever destroyed, because
// memory may be freed while the process ends.
#include "pool.h"
#include "spin.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <atomic>
#include <cstdint>
#include <map>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using memopt::Spin;

constexpr std::align_val_t kPage{4096};
constexpr size_t kLongest = 1 << 20;  // of a log: a loop may go on for long without another step
constexpr int64_t kTail = 16;    // so many unexpected requests at the end of a step are taken for the next step's batch
constexpr int64_t kExtra = 8;    // so many unexpected requests may be extra ones
constexpr int64_t kAway = 256;   // an unexpected request is compared with planned ones that are no further from the expected one

enum Count {
  kServed,         // requests with an address in the arena
  kServedBytes,
  kOutside,        // requests that the plan leaves to the ordinary allocator, and those of the next step's batch
  kOutsideBytes,
  kDiffers,        // requests that the plan does not have at this place
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
  int64_t freed;  // number of the request that came next; -1: it is live
};

struct Plan {
  std::vector<int64_t> nbytes;   // of every request of the step
  std::vector<int64_t> offsets;  // of every request; -1: it is left to the ordinary allocator
};

struct Arena {
  char* base;
  int64_t nbytes;
  std::map<int64_t, int64_t> live;  // offset -> end of every live buffer

  bool is_free(int64_t begin, int64_t end) const {
    auto next = live.lower_bound(begin);
    if (next != live.end() && next->first < end) return false;
    return next == live.begin() || std::prev(next)->second <= begin;
  }
};

Spin guard;  // protects everything below, but what is atomic
std::map<int64_t, Plan>& plans = *new std::map<int64_t, Plan>;
std::vector<Arena*>& arenas = *new std::vector<Arena*>;  // the one in use, and older ones with live buffers
std::vector<Request>& requests = *new std::vector<Request>;
std::unordered_map<void*, int64_t>& logged = *new std::unordered_map<void*, int64_t>;
Arena* arena = nullptr;   // the one in use
const Plan* plan = nullptr;
int64_t next_plan = 1, windows = 0;
int64_t expected = 0;     // number of the planned request that comes next, if each request comes in the place of a planned one
int64_t matched = 0;      // requests that are planned ones
int64_t unexpected = 0;   // requests since the last one that is a planned one, and their bytes
int64_t unexpected_nbytes = 0;
int64_t last_nbytes = 0;  // of the last request
int64_t counts[kCounts];
std::atomic<int64_t> window{0};  // number of the window; 0: there is none
std::atomic<bool> logging{false};
thread_local int64_t my_window = 0;  // the window that this thread began last

struct Locked {
  Locked() { guard.lock(); }
  ~Locked() { guard.unlock(); }
};

void count(Count what, int64_t nbytes) {
  ++counts[what];
  counts[what + 1] += nbytes;
}

// The planned request that this one is; -1 if there is none. It is the next one if that has its size. After unexpected requests
// it may also be the first one that did not come, because those were extra ones; or the nearest one that has its size behind one
// that has the size of the request before it.
int64_t place_of(int64_t nbytes) {
  const auto& planned = plan->nbytes;
  const int64_t n = planned.size();
  const auto has = [&](int64_t i, int64_t size) { return i >= 0 && i < n && planned[i] == size; };
  int64_t at = -1;
  if (has(expected, nbytes)) {
    at = expected;
  } else if (unexpected > 0) {
    if (unexpected <= kExtra && has(expected - unexpected, nbytes)) at = expected - unexpected;
    for (int64_t away = 1; away <= kAway && at < 0; ++away)
      for (const int64_t i : {expected + away, expected - away})
        if (at < 0 && has(i, nbytes) && has(i - 1, last_nbytes)) at = i;
  }
  last_nbytes = nbytes;
  if (at < 0) {
    ++expected;
    ++unexpected;
    unexpected_nbytes += nbytes;
    return -1;
  }
  ++matched;
  expected = at + 1;
  unexpected = unexpected_nbytes = 0;
  return at;
}

void drop(Arena* empty) {
  for (size_t i = 0; i < arenas.size(); ++i)
    if (arenas[i] == empty) arenas.erase(arenas.begin() + i);
  ::operator delete(empty->base, kPage);
  delete empty;
}

// From now on the arena is not in use; it is freed with its last buffer.
void retire() {
  Arena* const old = std::exchange(arena, nullptr);
  if (old != nullptr && old->live.empty()) drop(old);
}

void end_window() {
  if (plan != nullptr && window != 0) {
    const int64_t n = plan->nbytes.size(), missing = n - (expected - unexpected);
    counts[kSkipped] = matched < n ? n - matched : 0;
    if (missing <= kTail && unexpected <= kTail) {  // the next batch is made before its step begins, and may have another shape
      counts[kDiffers] -= unexpected;
      counts[kDiffersBytes] -= unexpected_nbytes;
      counts[kOutside] += unexpected;
      counts[kOutsideBytes] += unexpected_nbytes;
    }
  }
  window = 0;
  plan = nullptr;
}

void begin_window() {
  window = my_window = ++windows;
  for (int64_t& value : counts) value = 0;
}

}  // namespace

namespace memopt_pool {

bool in_window() { return window.load(std::memory_order_relaxed) != 0; }
bool is_logging() { return logging.load(std::memory_order_relaxed); }

void* take(size_t n) {
  const int64_t nbytes = static_cast<int64_t>(n);
  if (nbytes <= 0) return nullptr;
  const Locked locked;
  if (plan == nullptr) return nullptr;
  if (my_window != window) {
    count(kOtherThreads, nbytes);
    return nullptr;
  }
  const int64_t at = place_of(nbytes);
  if (at < 0) {
    count(kDiffers, nbytes);
    return nullptr;
  }
  const int64_t begin = plan->offsets[at];
  if (begin < 0) {
    count(kOutside, nbytes);
    return nullptr;
  }
  if (arena == nullptr || begin + nbytes > arena->nbytes || !arena->is_free(begin, begin + nbytes)) {
    count(kOccupied, nbytes);
    return nullptr;
  }
  arena->live.emplace(begin, begin + nbytes);
  count(kServed, nbytes);
  return arena->base + begin;
}

void give_back(void* context) {
  char* const at = static_cast<char*>(context);
  const Locked locked;
  for (Arena* owner : arenas)
    if (at >= owner->base && at < owner->base + owner->nbytes) {
      owner->live.erase(at - owner->base);
      if (owner != arena && owner->live.empty()) drop(owner);
      return;
    }
}

void requested(void* context, size_t nbytes) {
  const Locked locked;
  if (!logging || my_window != window || context == nullptr || nbytes == 0 || requests.size() >= kLongest) return;
  logged[context] = requests.size();
  requests.push_back({static_cast<int64_t>(nbytes), -1});
}

void freed(void* context) {
  const Locked locked;
  const auto known = logged.find(context);
  if (known == logged.end()) return;
  requests[known->second].freed = requests.size();
  logged.erase(known);
}

void before_fork() { guard.lock(); }

void after_fork(bool child) {
  if (child) {
    end_window();
    logging = false;
  }
  guard.unlock();
}

}  // namespace memopt_pool

extern "C" {

// Begins a log, whose first window begins now in this thread. What was logged before is forgotten.
void memopt_pool_log() {
  const Locked locked;
  end_window();
  requests.clear();
  logged.clear();
  logging = true;
  begin_window();
}

// Ends the log, and the window. What was logged stays until the next log.
void memopt_pool_log_ends() {
  const Locked locked;
  logging = false;
  logged.clear();
  end_window();
}

// How many requests were logged.
int64_t memopt_pool_logged() {
  const Locked locked;
  return requests.size();
}

// Writes two numbers for each of the first `n` logged requests: its bytes, and the number of the request that came next when it
// was freed (-1: it was not).
void memopt_pool_read(int64_t n, int64_t* to) {
  const Locked locked;
  for (int64_t i = 0; i < n && i < static_cast<int64_t>(requests.size()); ++i) {
    to[2 * i] = requests[i].nbytes;
    to[2 * i + 1] = requests[i].freed;
  }
}

// Adds the plan of a step with `n` requests: bytes and offset of each. Returns its number.
int64_t memopt_pool_add(int64_t n, const int64_t* nbytes, const int64_t* offsets) {
  const Locked locked;
  plans[next_plan] = {{nbytes, nbytes + n}, {offsets, offsets + n}};
  return next_plan++;
}

void memopt_pool_remove(int64_t number) {
  const Locked locked;
  const auto at = plans.find(number);
  if (at == plans.end()) return;
  if (plan == &at->second) end_window();
  plans.erase(at);
}

// Begins a window under a plan, in this thread, in an arena of at least `nbytes`. Returns the bytes of the arena, or 0 if there
// is no memory for it; then there is no window.
int64_t memopt_pool_begin(int64_t number, int64_t nbytes) {
  const Locked locked;
  end_window();
  const auto at = plans.find(number);
  if (at == plans.end()) return 0;
  if (arena != nullptr && arena->nbytes < nbytes) retire();
  for (Arena* old : arenas)  // buffers that outlived a step keep it; it need not be made a second time
    if (arena == nullptr && old->nbytes >= nbytes) arena = old;
  if (arena == nullptr) {
#ifdef __GLIBC__
    malloc_trim(0);  // the ordinary allocator keeps what steps without the arena needed
#endif
    auto* const base = static_cast<char*>(::operator new(nbytes, kPage, std::nothrow));
    if (base == nullptr) return 0;
    arena = new Arena{base, nbytes, {}};
    arenas.push_back(arena);
  }
  plan = &at->second;
  expected = matched = unexpected = unexpected_nbytes = last_nbytes = 0;
  begin_window();
  return arena->nbytes;
}

// Ends the window, if there is one. `free`: the arena is freed, now or with its last buffer.
void memopt_pool_end(int free) {
  const Locked locked;
  end_window();
  if (free) retire();
}

// Writes the counts of the window that is open, or of the last one.
void memopt_pool_counts(int64_t* to) {
  const Locked locked;
  for (int i = 0; i < kCounts; ++i) to[i] = counts[i];
}

// Bytes of all arenas that are not freed, and bytes of the live buffers in them.
void memopt_pool_arenas(int64_t* to) {
  const Locked locked;
  to[0] = to[1] = 0;
  for (const Arena* each : arenas) {
    to[0] += each->nbytes;
    for (const auto& [begin, end] : each->live) to[1] += end - begin;
  }
}

// Allocates and frees as an allocator does, for tests: null if the ordinary allocator would serve it.
void* memopt_pool_take(int64_t nbytes) { return memopt_pool::take(static_cast<size_t>(nbytes)); }
void memopt_pool_give_back(void* at) { memopt_pool::give_back(at); }
}
