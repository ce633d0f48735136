// What the parts of the emulated device share. All state belongs to the process, and one lock guards it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define LOCK std::lock_guard<std::recursive_mutex> held_lock(emulated::lock)

namespace emulated {

extern std::recursive_mutex lock;

// State that outlives the process's last call: torch's threads and its own state call CUDA while the process ends.
template <class T>
class Immortal {
 public:
  T& operator*() const { return *state_; }
  T* operator->() const { return state_; }

 private:
  T* const state_ = new T;
};

// What the environment asks for, read once.
struct Settings {
  bool bits;           // EMULATED_MODE=bits: memory holds values; "bytes" (the default): it is never touched
  bool races;          // EMULATED_RACES=1: accesses that nothing orders are reported
  int devices;         // EMULATED_DEVICES
  size_t memory;       // EMULATED_MEMORY: bytes of each device
  int capability;      // EMULATED_CAPABILITY: 90 for 9.0
  int polls;           // EMULATED_POLLS: number of queries that answer "not ready" before the device goes on
  size_t pinnable;     // EMULATED_PINNABLE: number of bytes of the host that can be page-locked
  double link;         // EMULATED_LINK: bytes a second between host and device, in real time; 0: copies take none
};
const Settings& settings();

using Clock = std::map<int, uint64_t>;  // number of a stream -> how many of its ops happened before

struct Stream;
struct Capture;

struct Event {
  unsigned flags = 0;
  Stream* stream = nullptr;            // where it was recorded last
  uint64_t recorded = 0, reached = 0;  // how often it was recorded, and the last of these that the device came to
  int polls = 0;
  double at = 0;  // seconds, by the device's clock
  Clock clock;
  Capture* capture = nullptr;
};

// Bytes of memory that an op reads or writes.
struct Range {
  uintptr_t begin, end;
  bool write;
};
Range range(const void* p, size_t nbytes, bool write);

struct Op {
  std::function<void()> run;  // none for a kernel, which computes nothing
  Event* wait = nullptr;      // the op waits until this event was reached so often
  uint64_t wait_for = 0;
};

struct Stream {
  int number = 0, device = 0, priority = 0, polls = 0;
  std::deque<Op> queue;  // what the host asked for and the device has not done
  uint64_t ops = 0;
  double free_at = 0;  // seconds, by the device's clock, at which all of it is done
  Clock clock;
  Capture* capture = nullptr;
};

// streams.cpp: the device does an op when somebody waits for it, and not before.
Stream* stream_of(cudaStream_t handle);
void enqueue(Stream* s, Op op, double seconds, const std::vector<Range>& ranges, const std::string& what);
void finish(Stream* s);         // do all that was asked for, as the device; the host has not waited for it
void synchronize(Stream* s);    // the host waits
void synchronize_device(int device);
void synchronize_all();

// graphs.cpp
void captured(Capture* capture, Op op);
void join(Capture* capture, Stream* s);  // s is captured, too

// memory.cpp
bool is_device(const void* p);
bool is_pinned(const void* p);
int device_of(const void* p);  // of the memory at an address
int current_device();
bool take(int device, size_t nbytes);  // false where the device has less
void give_back(int device, size_t nbytes);
void* allocate(int device, size_t nbytes);  // null where the device has less
void* reserve_addresses(size_t nbytes);     // aligned to 2 MiB; null where the process has no more
int protection();                           // of memory that is in use: bytes mode never touches it
void add_range(void* p, size_t nbytes, int device);
void remove_range(void* p);

// races.cpp
void accessed(const Stream* s, const std::vector<Range>& ranges, const std::string& what);
void forget(uintptr_t begin, uintptr_t end);  // memory that was freed: whoever has it next starts anew

// devices.cpp
cudaError_t failed(cudaError_t error);
cudaError_t failed(cudaError_t error, const std::string& why);
cudaError_t take_last_error();
void opens_context(int device);  // what is asked of a device for the first time: on a card, it takes hundreds of MiB
bool has_context(int device);
void count(const std::string& what);  // for EMULATED_STATISTICS=1: what was called, at exit

}  // namespace emulated
