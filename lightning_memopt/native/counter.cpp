// An allocator around torch's CPU allocator that counts live bytes, and their peak in each of a few windows. Requests that the
// planned pool (pool.cpp) has an address for get that address; all others get memory of the inner allocator.
//
// Memory of the inner allocator keeps its address and its context; only the deleter is replaced. Sizes are kept in a table by
// context, never next to the bytes. So memory from before the installation, and memory that another allocator frees later, is
// freed as without this allocator. No object here is ever destroyed, because memory may be freed while the process ends.
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "pool.h"
#include "spin.h"

#ifndef _WIN32
#include <pthread.h>
#endif

namespace {

using memopt::Spin;

constexpr int kWindows = 32;
enum Kind { kAll, kPlain, kOutside, kKinds };  // all bytes; those not allocated while hidden; those outside of the planned pool
constexpr int64_t kNone = INT64_MAX;  // the peak of a window that is not open: no count exceeds it

struct Entry {
  void* context;
  int64_t nbytes;
  c10::DeleterFnPtr deleter;
  bool own;
  int64_t number;  // which allocation it was; 0 for memory from before the installation
};

// Open addressing with linear probing; a removal moves later entries up, so there are no gaps.
class Table {
 public:
  // Returns the entry, or null if there is none.
  Entry* find(void* context) {
    for (size_t i = home(context); at_ != nullptr && at_[i].context != nullptr; i = (i + 1) & mask_)
      if (at_[i].context == context) return &at_[i];
    return nullptr;
  }

  bool add(const Entry& entry) {
    if (2 * (used_ + 1) > size() && !grow()) return false;
    put(entry);
    ++used_;
    return true;
  }

  void remove(Entry* entry) {
    size_t gap = entry - at_;
    for (size_t i = (gap + 1) & mask_; at_[i].context != nullptr; i = (i + 1) & mask_)
      if (((i - home(at_[i].context)) & mask_) >= ((i - gap) & mask_)) {
        at_[gap] = at_[i];
        gap = i;
      }
    at_[gap].context = nullptr;
    --used_;
  }

 private:
  size_t size() const { return at_ == nullptr ? 0 : mask_ + 1; }
  size_t home(void* context) const {
    return ((reinterpret_cast<uintptr_t>(context) >> 4) * 0x9E3779B97F4A7C15ull >> 24) & mask_;
  }
  void put(const Entry& entry) {
    size_t i = home(entry.context);
    while (at_[i].context != nullptr) i = (i + 1) & mask_;
    at_[i] = entry;
  }
  bool grow() {
    const size_t before = size(), after = before == 0 ? 4096 : 2 * before;
    auto* larger = static_cast<Entry*>(std::calloc(after, sizeof(Entry)));
    if (larger == nullptr) return false;
    Entry* old = at_;
    at_ = larger;
    mask_ = after - 1;
    for (size_t i = 0; i < before; ++i)
      if (old[i].context != nullptr) put(old[i]);
    std::free(old);
    return true;
  }

  Entry* at_ = nullptr;
  size_t mask_ = 0, used_ = 0;
};

Spin guard;  // protects everything below
Table& table = *new Table;
int64_t live[kKinds];    // bytes
int64_t lowest[kKinds];  // lowest peak of the open windows: most allocations compare only with it
int64_t peaks[kKinds][kWindows];
int64_t allocations = 0;  // so far
thread_local int hidden = 0;
c10::Allocator* inner = nullptr;

struct Locked {
  Locked() { guard.lock(); }
  ~Locked() { guard.unlock(); }
};

void raise(int kind) {
  lowest[kind] = kNone;
  for (int64_t& peak : peaks[kind]) {
    if (peak != kNone && live[kind] > peak) peak = live[kind];
    if (peak < lowest[kind]) lowest[kind] = peak;
  }
}

void pooled(void* at) {  // the deleter of memory in the planned pool
  c10::profiledCPUMemoryReporter().Delete(at);
  memopt_pool::give_back(at);
}

bool counts_in(const Entry& entry, int kind) {
  return kind == kAll || (kind == kPlain ? !entry.own : entry.deleter != &pooled);
}

void subtract(Entry* entry) {
  for (int kind = 0; kind < kKinds; ++kind)
    if (counts_in(*entry, kind)) live[kind] -= entry->nbytes;
  table.remove(entry);
}

bool add(void* context, int64_t nbytes, c10::DeleterFnPtr deleter, bool from_before = false) {
  const Locked locked;
  if (Entry* before = table.find(context)) subtract(before);  // it was freed without this allocator's deleter
  const Entry entry{context, nbytes, deleter, hidden > 0, from_before ? 0 : ++allocations};
  if (!table.add(entry)) return false;
  for (int kind = 0; kind < kKinds; ++kind)
    if (counts_in(entry, kind)) {
      live[kind] += nbytes;
      if (live[kind] > lowest[kind]) raise(kind);
    }
  return true;
}

void release(void* context) {
  c10::DeleterFnPtr deleter = nullptr;
  {
    const Locked locked;
    if (Entry* entry = table.find(context)) {
      deleter = entry->deleter;
      subtract(entry);
    }
  }
  if (memopt_pool::is_logging()) memopt_pool::freed(context);
  if (deleter == nullptr) deleter = inner->raw_deleter();  // memory from before the installation, freed by `raw_deallocate`
  if (deleter != nullptr) deleter(context);
}

class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (memopt_pool::in_window())
      if (void* const at = memopt_pool::take(n)) {
        if (add(at, static_cast<int64_t>(n), &pooled)) {
          c10::profiledCPUMemoryReporter().New(at, n);
          return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
        }
        memopt_pool::give_back(at);
      }
    c10::DataPtr made = inner->allocate(n);
    void* const context = made.get_context();
    const c10::DeleterFnPtr deleter = made.get_deleter();
    if (context == nullptr || add(context, static_cast<int64_t>(n), deleter))
      (void)made.compare_exchange_deleter(deleter, &release);
    if (memopt_pool::is_logging()) memopt_pool::requested(context, n);
    return made;
  }
  bool is_simple_data_ptr(const c10::DataPtr& p) const override { return inner->is_simple_data_ptr(p); }
  c10::DeleterFnPtr raw_deleter() const override { return inner->raw_deleter() == nullptr ? nullptr : &release; }
  void copy_data(void* to, const void* from, size_t n) const override { inner->copy_data(to, from, n); }
};

Counting& counting = *new Counting;

}  // namespace

extern "C" {

// Whether torch allocates through this allocator.
int memopt_installed() { return inner != nullptr && c10::GetAllocator(c10::kCPU) == &counting; }

// Installs the allocator around the current one, with the lowest sufficient priority, so that others can still set theirs.
int memopt_install() {
  if (inner != nullptr) return memopt_installed();
  for (int kind = 0; kind < kKinds; ++kind) {
    lowest[kind] = kNone;
    for (int64_t& peak : peaks[kind]) peak = kNone;
  }
  inner = c10::GetAllocator(c10::kCPU);
  for (int priority = 0; priority < 256 && !memopt_installed(); ++priority)
    c10::SetAllocator(c10::kCPU, &counting, static_cast<uint8_t>(priority));
#ifndef _WIN32
  pthread_atfork(
      [] { guard.lock(), memopt_pool::before_fork(); },
      [] { memopt_pool::after_fork(false), guard.unlock(); },
      [] { memopt_pool::after_fork(true), guard.unlock(); });
#endif
  return memopt_installed();
}

// Live bytes of a kind (`Kind`).
int64_t memopt_live(int kind) {
  const Locked locked;
  return live[kind];
}

// Allocations of this thread are hidden from now on, until `memopt_hide(-1)`.
void memopt_hide(int by) { hidden += by; }

// Opens a window whose peak begins at the live bytes. Returns its number, or -1 if all windows are open.
int memopt_open(int kind) {
  const Locked locked;
  for (int i = 0; i < kWindows; ++i)
    if (peaks[kind][i] == kNone) {
      peaks[kind][i] = live[kind];
      raise(kind);
      return i;
    }
  return -1;
}

int64_t memopt_peak(int kind, int window) {
  const Locked locked;
  return peaks[kind][window];
}

// Sets the peak of a window to the live bytes, and returns them.
int64_t memopt_reset(int kind, int window) {
  const Locked locked;
  peaks[kind][window] = live[kind];
  raise(kind);
  return live[kind];
}

void memopt_close(int kind, int window) {
  const Locked locked;
  peaks[kind][window] = kNone;
  raise(kind);
}

// From now until it is freed, counts the bytes of a storage (a `c10::StorageImpl`) from before the installation. Returns
// whether they are counted: bytes of another allocator (numpy, shared memory, a file) cannot be.
int memopt_adopt(void* storage) {
  auto* const impl = static_cast<c10::StorageImpl*>(storage);
  c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  void* const context = data.get_context();
  if (context == nullptr || !data.device().is_cpu()) return 0;
  const c10::DeleterFnPtr deleter = data.get_deleter();
  if (deleter == &release) return 1;
  const auto nbytes = impl->sym_nbytes().maybe_as_int();
  if (deleter == nullptr || deleter != inner->raw_deleter() || !nbytes || !add(context, *nbytes, deleter, true)) return 0;
  (void)data.compare_exchange_deleter(deleter, &release);
  if (impl->allocator() == inner) impl->set_allocator(&counting);
  return 1;
}

// The counted bytes of a storage, or -1 if it is not counted.
int64_t memopt_nbytes(void* storage) {
  const Locked locked;
  const Entry* const entry = table.find(static_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks().get_context());
  return entry == nullptr ? -1 : entry->nbytes;
}

// Number of allocations so far.
int64_t memopt_allocations() {
  const Locked locked;
  return allocations;
}

// The number of a storage's allocation: 0 if it is older than this allocator, -1 if it is not counted.
int64_t memopt_number(void* storage) {
  const Locked locked;
  const Entry* const entry = table.find(static_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks().get_context());
  return entry == nullptr ? -1 : entry->number;
}

// For timing: allocations and frees through the inner allocator, or through this one.
void memopt_exercise(int64_t nbytes, int64_t times, int counted) {
  c10::Allocator* const allocator = counted ? static_cast<c10::Allocator*>(&counting) : inner;
  for (int64_t i = 0; i < times; ++i) (void)allocator->allocate(static_cast<size_t>(nbytes));
}
}
