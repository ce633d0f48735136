// Streams and events. The device is late: it does an op when the host waits for it, or when another op that is done waits for it.
// A copy that nobody waits for is seen as the bytes from before.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "emulated.h"

namespace emulated {

static Immortal<std::vector<Stream*>> streams;  // those that were created; events may name one that was destroyed
static Immortal<std::map<int, Stream*>> defaults;
static Immortal<Clock> host;  // what the host waited for
static int numbers = 0;

// What was asked for while EMULATED's log was on: who reads it knows which ops are ordered (tests/emulated/device.py).
struct Logged {
  std::string what;
  int stream, device;
  uint64_t op;
  size_t nbytes;
  Clock clock;
};
static Immortal<std::vector<Logged>> logged;
static bool is_logging = false;

static Stream* default_stream(int device) {
  Stream*& s = (*defaults)[device];
  if (!s) {
    s = new Stream;
    s->number = numbers++, s->device = device;
  }
  return s;
}
Stream* stream_of(cudaStream_t handle) {
  LOCK;
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? default_stream(current_device()) : reinterpret_cast<Stream*>(handle);
}

static double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}
static void join(Clock& into, const Clock& from) {
  for (auto& [stream, op] : from) into[stream] = std::max(into[stream], op);
}

// Does the ops of a stream, until an event was reached so often, or all of them.
static void advance(Stream* s, const Event* until, uint64_t times) {
  while (!s->queue.empty() && !(until && until->reached >= times)) {
    const Op op = std::move(s->queue.front());
    s->queue.pop_front();
    if (op.wait && op.wait->reached < op.wait_for) advance(op.wait->stream, op.wait, op.wait_for);
    if (op.run) op.run();
  }
}
void finish(Stream* s) { advance(s, nullptr, 0); }
void synchronize(Stream* s) {
  finish(s);
  join(*host, s->clock);
}
void synchronize_device(int device) {
  synchronize(default_stream(device));
  for (Stream* s : *streams)
    if (s->device == device) synchronize(s);
}
void synchronize_all() {
  for (auto& [_, s] : *defaults) synchronize(s);
  for (Stream* s : *streams) synchronize(s);
}

void enqueue(Stream* s, Op op, double seconds, const std::vector<Range>& ranges, const std::string& what) {
  opens_context(s->device);
  if (s->capture) return captured(s->capture, std::move(op));
  join(s->clock, *host);
  s->clock[s->number] = ++s->ops;
  s->free_at = std::max(s->free_at, now()) + seconds;
  s->polls = 0;
  if (settings().races) accessed(s, ranges, what);
  if (is_logging) logged->push_back({what, s->number, s->device, s->ops, ranges.empty() ? 0 : ranges[0].end - ranges[0].begin, s->clock});
  if (op.run || op.wait) s->queue.push_back(std::move(op));
}

// The host waits for an event.
static void reach(Event* e) {
  if (e->recorded == 0) return;
  advance(e->stream, e, e->recorded);
  join(*host, e->clock);
}

}  // namespace emulated
using namespace emulated;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  LOCK;
  count("cudaStreamCreate");
  opens_context(current_device());
  Stream* s = new Stream;
  streams->push_back(s);
  s->number = numbers++, s->device = current_device(), s->priority = priority;
  return *out = reinterpret_cast<cudaStream_t>(s), cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  LOCK;
  return finish(stream_of(handle)), cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  LOCK;
  return *priority = stream_of(handle)->priority, cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  LOCK;
  count("cudaStreamSynchronize");
  return synchronize(stream_of(handle)), cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  LOCK;
  Stream* s = stream_of(handle);
  if (!s->queue.empty() && ++s->polls <= settings().polls) return cudaErrorNotReady;
  return synchronize(s), cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  LOCK;
  count("cudaEventCreate");
  opens_context(current_device());
  Event* e = new Event;
  e->flags = flags;
  return *out = reinterpret_cast<cudaEvent_t>(e), cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // not freed: ops that wait for it may be queued
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  LOCK;
  count("cudaEventRecord");
  Event* e = reinterpret_cast<Event*>(handle);
  Stream* s = stream_of(stream);
  e->capture = s->capture;
  if (s->capture) return cudaSuccess;
  e->stream = s, e->polls = 0;
  const uint64_t times = ++e->recorded;
  Op op;
  op.run = [=] { e->reached = std::max(e->reached, times); };
  enqueue(s, op, 0, {}, "record");
  e->at = s->free_at, e->clock = s->clock;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  LOCK;
  count("cudaStreamWaitEvent");
  Event* e = reinterpret_cast<Event*>(handle);
  Stream* s = stream_of(stream);
  if (e->capture) return join(e->capture, s), cudaSuccess;  // this stream is captured, too
  if (e->recorded == 0) return cudaSuccess;
  s->free_at = std::max(s->free_at, e->at);
  join(s->clock, e->clock);
  Op op;
  op.wait = e, op.wait_for = e->recorded;
  enqueue(s, op, 0, {}, "wait");
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  LOCK;
  count("cudaEventQuery");
  Event* e = reinterpret_cast<Event*>(handle);
  if (e->reached < e->recorded && ++e->polls <= settings().polls) return cudaErrorNotReady;
  return reach(e), cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  LOCK;
  count("cudaEventSynchronize");
  return reach(reinterpret_cast<Event*>(handle)), cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  LOCK;
  const Event *a = reinterpret_cast<Event*>(from), *b = reinterpret_cast<Event*>(to);
  if (!a->recorded || !b->recorded || (a->flags | b->flags) & cudaEventDisableTiming) return failed(cudaErrorInvalidResourceHandle);
  if (a->reached < a->recorded || b->reached < b->recorded) return cudaErrorNotReady;
  return *milliseconds = float((b->at - a->at) * 1e3), cudaSuccess;
}

// Writes what was logged, one op a line: stream, device, its number in the stream, bytes, the clock, what. Then logs, or does not.
API void emulated_log(int on, const char* path) {
  LOCK;
  FILE* file = path ? fopen(path, "w") : nullptr;
  for (size_t i = 0; file && i < logged->size(); ++i) {
    const Logged& each = (*logged)[i];
    fprintf(file, "%d\t%d\t%llu\t%zu\t", each.stream, each.device, (unsigned long long)each.op, each.nbytes);
    for (auto& [stream, op] : each.clock) fprintf(file, "%d:%llu ", stream, (unsigned long long)op);
    fprintf(file, "\t%s\n", each.what.c_str());
  }
  if (file) fclose(file);
  logged->clear();
  is_logging = on;
}

// An operator of ATen is computed by operators.cpp when it is called: all that was asked for in its stream before is done first.
// Returns the error that an earlier call left, which torch asks for behind each kernel; then there is none.
API cudaError_t emulated_operator_begins(cudaStream_t handle) {
  LOCK;
  finish(stream_of(handle));
  return take_last_error();
}
API void emulated_operator_ran(cudaStream_t handle, const char* name, size_t n, const uintptr_t* begins, const uintptr_t* ends,
                               const bool* writes) {
  LOCK;
  count(name);
  std::vector<Range> ranges;
  for (size_t i = 0; i < n; ++i) ranges.push_back({begins[i], ends[i], writes[i]});
  enqueue(stream_of(handle), {}, 4e-6, ranges, name);
}
