// The planned pools of CUDA streams. Each stream has a lane (lane.h) with its own log, plans and arena, because only the work
// of one stream has an order. A lane gets the requests of all threads on its stream, because backward runs in its own thread.
//
// If other streams also use a buffer (`record_stream`), it gets a fence when it is freed: events of these streams. Before its
// range is used again, the arena's stream waits for these events. Nothing else waits.
//
// The ordinary allocator and the CUDA runtime are never called under the lock, because they may wait for the device, and the
// ordinary allocator has callbacks. No object is ever destroyed, because memory may be freed while the process ends.
#include "streams.h"

#include <atomic>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "fences.h"
#include "lane.h"
#include "spin.h"

#ifndef _WIN32
#include <pthread.h>
#endif

namespace {

using namespace memopt;
using memopt_streams::Ordinary;
using memopt_streams::StreamKey;

constexpr int kMostStreams = 16;  // maximum per device; requests of further streams are left to the ordinary allocator

struct Stream {
  explicit Stream(StreamKey at) : place(at) {}
  StreamKey place;
  Lane lane;
  bool active = false;      // whether something was requested, and not forgotten, while a window of the device was open
  int64_t beside_peak = 0;  // maximum bytes of the device outside of this lane's arenas in the planned window
  std::map<const char*, std::vector<StreamKey>> users;  // live buffer -> the other streams that use it
  std::vector<Fence> fences;
};

struct Dead {
  StreamKey place;
  Arena* arena;
  std::vector<Fence> fences;
};

Spin guard;  // protects everything below that is not atomic
std::vector<Stream*>& streams = *new std::vector<Stream*>;
std::map<const char*, Stream*>& owners = *new std::map<const char*, Stream*>;  // beginning of an arena -> its stream
std::map<int, int>& captures = *new std::map<int, int>;                        // device -> number in progress
std::vector<Dead>& dead = *new std::vector<Dead>;                              // arenas without buffers
Ordinary* ordinary = nullptr;
bool forked = false;  // whether this process is a forked child, where CUDA cannot be used
std::atomic<bool> windows{false}, logging{false}, arenas{false};

std::vector<Fence> fences_in(Stream* stream, const char* begin, const char* end) {
  std::vector<Fence> in, others;
  for (Fence& fence : stream->fences) (fence.begin < end && begin < fence.end ? in : others).push_back(std::move(fence));
  stream->fences = std::move(others);
  return in;
}

// Holds the lock. At its end, updates the values that others read without the lock, and frees dead arenas. They are not freed
// during a capture, because the wait for a fence would become part of the graph.
struct Locked {
  Locked() { guard.lock(); }
  ~Locked() {
    bool window = false, log = false;
    for (Stream* stream : streams) {
      window |= stream->lane.window() != 0;
      log |= stream->lane.logging();
      for (Arena* arena : stream->lane.dead()) {
        owners.erase(arena->base);
        dead.push_back({stream->place, arena, fences_in(stream, arena->base, arena->base + arena->nbytes)});
      }
      stream->lane.dead().clear();
    }
    windows = window;
    logging = log;
    arenas = !owners.empty();
    std::vector<Dead> now, later;
    if (!dead.empty() && !forked) {
      for (Dead& each : dead) (captures[each.place.device] > 0 ? later : now).push_back(std::move(each));
      dead.swap(later);
    }
    guard.unlock();
    for (Dead& each : now) {
      wait_for(each.place, each.fences);
      ordinary->free(each.arena->base);
      delete each.arena;
    }
  }
};

// The stream of the arena that contains an address; null if there is none.
Stream* owner_of(const void* at) {
  auto next = owners.upper_bound(static_cast<const char*>(at));
  if (next == owners.begin()) return nullptr;
  Stream* const stream = std::prev(next)->second;
  return stream->lane.owner(at) == nullptr ? nullptr : stream;
}

// The lane of a stream, made on first use; null if the device has too many.
Stream* stream_at(StreamKey place) {
  int others = 0;
  for (Stream* stream : streams) {
    if (stream->place.device != place.device) continue;
    if (stream->place.stream == place.stream) return stream;
    ++others;
  }
  if (others >= kMostStreams) return nullptr;
  streams.push_back(new Stream(place));
  return streams.back();
}

bool watched(int device) {
  for (const Stream* stream : streams)
    if (stream->place.device == device && stream->lane.window() != 0) return true;
  return false;
}

}  // namespace

namespace memopt_streams {

void serve(Ordinary* with) {
  ordinary = with;
#ifndef _WIN32
  pthread_atfork([] { guard.lock(); }, [] { guard.unlock(); }, [] {
    for (Stream* stream : streams) stream->lane.log_ends();
    windows = logging = false;
    forked = true;
    guard.unlock();
  });
#endif
}

bool in_window() { return windows.load(std::memory_order_relaxed); }

void* take(StreamKey place, size_t n) {
  const int64_t nbytes = static_cast<int64_t>(n);
  if (nbytes <= 0) return nullptr;
  std::vector<Fence> fences;
  char* at = nullptr;
  {
    const Locked locked;
    if (captures[place.device] > 0 || !watched(place.device)) return nullptr;
    Stream* const stream = stream_at(place);
    if (stream == nullptr) return nullptr;
    stream->active = true;
    at = static_cast<char*>(stream->lane.take(nbytes));
    if (at != nullptr && !stream->fences.empty()) fences = fences_in(stream, at, at + nbytes);
  }
  wait_for(place, fences);
  return at;
}

void served(StreamKey place, void* context, size_t nbytes) {
  bool planned = false;
  {
    const Locked locked;
    if (captures[place.device] > 0 || !watched(place.device)) return;
    Stream* const stream = stream_at(place);
    if (stream != nullptr) stream->lane.requested(context, static_cast<int64_t>(nbytes));
    for (Stream* each : streams) planned |= each->place.device == place.device && each->lane.planned();
  }
  if (!planned) return;
  const int64_t live = ordinary->live_nbytes(place.device);
  const Locked locked;
  for (Stream* each : streams) {
    const int64_t beside = live - each->lane.arenas_nbytes();
    if (each->place.device == place.device && beside > each->beside_peak) each->beside_peak = beside;
  }
}

void freed(void* context) {
  if (!logging.load(std::memory_order_relaxed)) return;
  const Locked locked;
  for (Stream* stream : streams) stream->lane.freed(context);
}

bool give_back(void* at) {
  if (!arenas.load()) return false;
  Stream* stream = nullptr;
  Fence fence{};
  std::vector<StreamKey> users;
  {
    const Locked locked;
    stream = owner_of(at);
    if (stream == nullptr) return false;
    const auto used = stream->users.find(static_cast<const char*>(at));
    if (used != stream->users.end()) {
      users = std::move(used->second);
      stream->users.erase(used);
      const Arena* const arena = stream->lane.owner(at);
      fence.begin = static_cast<const char*>(at);
      fence.end = arena->base + arena->live.at(fence.begin - arena->base);
    }
    if (captures[stream->place.device] > 0 || forked) fence.late.swap(users);
  }
  for (const StreamKey user : users) fence.events.push_back(event_of(user));  // before the range can be used again
  const Locked locked;
  if (fence.begin != nullptr) stream->fences.push_back(std::move(fence));
  stream->lane.give_back(at);
  return true;
}

void* arena_of(const void* at) {
  if (!arenas.load()) return nullptr;
  const Locked locked;
  Stream* const stream = owner_of(at);
  return stream == nullptr ? nullptr : stream->lane.owner(at)->base;
}

bool used_by(const void* at, StreamKey user) {
  if (!arenas.load()) return false;
  const Locked locked;
  Stream* const stream = owner_of(at);
  if (stream == nullptr) return false;
  if (user.device == stream->place.device && user.stream == stream->place.stream) return true;
  const Arena* const arena = stream->lane.owner(at);
  auto live = arena->live.upper_bound(static_cast<const char*>(at) - arena->base);
  if (live == arena->live.begin()) return true;
  std::vector<StreamKey>& users = stream->users[arena->base + std::prev(live)->first];
  for (const StreamKey& known : users)
    if (known.device == user.device && known.stream == user.stream) return true;
  users.push_back(user);
  return true;
}

void capture_begins(int device) {
  const Locked locked;
  ++captures[device];
}

void capture_ends(int device) {
  const Locked locked;
  if (captures[device] > 0) --captures[device];
}

}  // namespace memopt_streams

// Each function below is a function of `Lane`, for the stream with a given number. Python calls them.
extern "C" {

// The number of a stream, or -1 if the device has too many.
int32_t memopt_stream_number(int32_t device, void* stream) {
  const Locked locked;
  const Stream* const known = stream_at({device, static_cast<cudaStream_t>(stream)});
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i] == known) return static_cast<int32_t>(i);
  return -1;
}

// Writes the numbers of a device's streams, at most `most`. Returns how many there are.
int32_t memopt_streams_of(int32_t device, int32_t most, int32_t* to) {
  const Locked locked;
  int32_t count = 0;
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i]->place.device == device && count++ < most) to[count - 1] = static_cast<int32_t>(i);
  return count;
}

void memopt_stream_log(int32_t number) {
  const Locked locked;
  streams[number]->lane.log();
}

int32_t memopt_stream_active(int32_t number) {
  const Locked locked;
  return streams[number]->active;
}

// Forgets what was logged and requested, because it is not part of coming steps.
void memopt_stream_forget(int32_t number) {
  const Locked locked;
  streams[number]->lane.log();
  streams[number]->lane.log_ends();
  streams[number]->active = false;
}

void memopt_stream_log_ends(int32_t number) {
  const Locked locked;
  streams[number]->lane.log_ends();
}

int64_t memopt_stream_logged(int32_t number) {
  const Locked locked;
  return streams[number]->lane.logged();
}

void memopt_stream_read(int32_t number, int64_t n, int64_t* to) {
  const Locked locked;
  streams[number]->lane.read(n, to);
}

int64_t memopt_stream_add(int32_t number, int64_t n, const int64_t* nbytes, const int64_t* offsets) {
  const Locked locked;
  return streams[number]->lane.add(n, nbytes, offsets);
}

void memopt_stream_remove(int32_t number, int64_t plan) {
  const Locked locked;
  streams[number]->lane.remove(plan);
}

// Begins a window under a plan, in an arena of at least `nbytes`. Returns false, and begins no window, if there is no memory
// for it. During a capture no arena is made: the window then has none, and the ordinary allocator serves all requests.
int64_t memopt_stream_begin(int32_t number, int64_t plan, int64_t nbytes) {
  Stream* stream = nullptr;
  bool has_arena = false;
  {
    const Locked locked;
    stream = streams[number];
    stream->lane.end();
    if (!stream->lane.knows(plan)) return 0;
    has_arena = stream->lane.has_arena(nbytes) || captures[stream->place.device] > 0;
  }
  if (!has_arena) {
    ordinary->trim();
    void* const base = ordinary->allocate(stream->place.device, stream->place.stream, nbytes);
    if (base == nullptr) return 0;
    const Locked locked;
    stream->lane.adopt(base, nbytes);
    owners[static_cast<const char*>(base)] = stream;
  }
  const int64_t live = ordinary->live_nbytes(stream->place.device);
  const Locked locked;
  stream->lane.begin(plan);
  stream->beside_peak = live - stream->lane.arenas_nbytes();
  return 1;
}

void memopt_stream_end(int32_t number, int free) {
  const Locked locked;
  streams[number]->lane.end();
  if (free) streams[number]->lane.retire();
}

void memopt_stream_counts(int32_t number, int64_t* to) {
  const Locked locked;
  for (int i = 0; i < kCounts; ++i) to[i] = streams[number]->lane.counts()[i];
}

void memopt_stream_arenas(int32_t number, int64_t* to) {
  const Locked locked;
  to[0] = streams[number]->lane.arenas_nbytes();
  to[1] = streams[number]->lane.live_nbytes();
}

// Maximum bytes of the device outside of the stream's arenas since its last planned window began.
int64_t memopt_stream_beside(int32_t number) {
  const Locked locked;
  return streams[number]->beside_peak;
}

// All live bytes of a device, including the arenas.
int64_t memopt_device_live(int32_t device) { return ordinary->live_nbytes(device); }
}
