#include "lane.h"

#include <iterator>
#include <utility>

namespace memopt {

namespace {

constexpr size_t kLongest = 1 << 20;  // maximum length of a log, because a loop may go on for long without another step
constexpr int64_t kTail = 16;    // maximum number of unexpected requests at a step's end that count as the next step's batch
constexpr int64_t kExtra = 8;    // maximum number of unexpected requests that may be extra ones
constexpr int64_t kAway = 256;   // an unexpected request is compared with planned ones up to this far from the expected one

}  // namespace

bool Arena::is_free(int64_t begin, int64_t end) const {
  auto next = live.lower_bound(begin);
  if (next != live.end() && next->first < end) return false;
  return next == live.begin() || std::prev(next)->second <= begin;
}

void Lane::log() {
  end();
  requests_.clear();
  logged_.clear();
  logging_ = true;
  begin_window();
}

void Lane::log_ends() {
  logging_ = false;
  logged_.clear();
  end();
}

void Lane::read(int64_t n, int64_t* to) const {
  for (int64_t i = 0; i < n && i < logged(); ++i) {
    to[2 * i] = requests_[i].nbytes;
    to[2 * i + 1] = requests_[i].freed;
  }
}

void Lane::requested(void* context, int64_t nbytes) {
  if (!logging_ || context == nullptr || nbytes == 0 || requests_.size() >= kLongest) return;
  logged_[context] = requests_.size();
  requests_.push_back({nbytes, -1});
}

void Lane::freed(void* context) {
  const auto known = logged_.find(context);
  if (known == logged_.end()) return;
  requests_[known->second].freed = requests_.size();
  logged_.erase(known);
}

int64_t Lane::add(int64_t n, const int64_t* nbytes, const int64_t* offsets) {
  plans_[next_plan_] = {{nbytes, nbytes + n}, {offsets, offsets + n}};
  return next_plan_++;
}

void Lane::remove(int64_t number) {
  const auto at = plans_.find(number);
  if (at == plans_.end()) return;
  if (plan_ == &at->second) end();
  plans_.erase(at);
}

bool Lane::has_arena(int64_t nbytes) {
  if (arena_ != nullptr && arena_->nbytes < nbytes) retire();
  for (Arena* old : arenas_)  // buffers that outlive a step keep it alive, so it need not be made again
    if (arena_ == nullptr && old->nbytes >= nbytes) arena_ = old;
  return arena_ != nullptr;
}

void Lane::adopt(void* base, int64_t nbytes) {
  arena_ = new Arena{static_cast<char*>(base), nbytes, {}};
  arenas_.push_back(arena_);
}

void Lane::drop(Arena* empty) {
  for (size_t i = 0; i < arenas_.size(); ++i)
    if (arenas_[i] == empty) arenas_.erase(arenas_.begin() + i);
  dead_.push_back(empty);
}

void Lane::retire() {
  Arena* const old = std::exchange(arena_, nullptr);
  if (old != nullptr && old->live.empty()) drop(old);
}

Arena* Lane::owner(const void* at) {
  for (Arena* each : arenas_)
    if (each->has(at)) return each;
  return nullptr;
}

int64_t Lane::arenas_nbytes() const {
  int64_t sum = 0;
  for (const Arena* each : arenas_) sum += each->nbytes;
  return sum;
}

int64_t Lane::live_nbytes() const {
  int64_t sum = 0;
  for (const Arena* each : arenas_)
    for (const auto& [begin, end] : each->live) sum += end - begin;
  return sum;
}

int64_t Lane::begin(int64_t number) {
  plan_ = &plans_.at(number);
  expected_ = matched_ = unexpected_ = unexpected_nbytes_ = last_nbytes_ = 0;
  begin_window();
  return arena_ == nullptr ? 0 : arena_->nbytes;
}

void Lane::begin_window() {
  window_ = ++windows_;
  for (int64_t& value : counts_) value = 0;
}

void Lane::end() {
  if (plan_ != nullptr && window_ != 0) {
    const int64_t n = plan_->nbytes.size(), missing = n - (expected_ - unexpected_);
    counts_[kSkipped] = matched_ < n ? n - matched_ : 0;
    if (missing <= kTail && unexpected_ <= kTail) {  // the next batch is made before its step begins, and may have another shape
      counts_[kDiffers] -= unexpected_;
      counts_[kDiffersBytes] -= unexpected_nbytes_;
      counts_[kOutside] += unexpected_;
      counts_[kOutsideBytes] += unexpected_nbytes_;
    }
  }
  window_ = 0;
  plan_ = nullptr;
}

void Lane::count(Count what, int64_t nbytes) {
  ++counts_[what];
  counts_[what + 1] += nbytes;
}

// The planned request that matches this request; -1 if there is none. It is the next one if that has the same size. After
// unexpected requests it may also be the first one that did not come (then these were extra ones), or the nearest one that has
// the same size and whose predecessor has the size of the previous request.
int64_t Lane::place_of(int64_t nbytes) {
  const auto& planned = plan_->nbytes;
  const int64_t n = planned.size();
  const auto has = [&](int64_t i, int64_t size) { return i >= 0 && i < n && planned[i] == size; };
  int64_t at = -1;
  if (has(expected_, nbytes)) {
    at = expected_;
  } else if (unexpected_ > 0) {
    if (unexpected_ <= kExtra && has(expected_ - unexpected_, nbytes)) at = expected_ - unexpected_;
    for (int64_t away = 1; away <= kAway && at < 0; ++away)
      for (const int64_t i : {expected_ + away, expected_ - away})
        if (at < 0 && has(i, nbytes) && has(i - 1, last_nbytes_)) at = i;
  }
  last_nbytes_ = nbytes;
  if (at < 0) {
    ++expected_;
    ++unexpected_;
    unexpected_nbytes_ += nbytes;
    return -1;
  }
  ++matched_;
  expected_ = at + 1;
  unexpected_ = unexpected_nbytes_ = 0;
  return at;
}

void* Lane::take(int64_t nbytes) {
  if (plan_ == nullptr) return nullptr;
  const int64_t at = place_of(nbytes);
  if (at < 0) {
    count(kDiffers, nbytes);
    return nullptr;
  }
  const int64_t begin = plan_->offsets[at];
  if (begin < 0) {
    count(kOutside, nbytes);
    return nullptr;
  }
  if (arena_ == nullptr || begin + nbytes > arena_->nbytes || !arena_->is_free(begin, begin + nbytes)) {
    count(kOccupied, nbytes);
    return nullptr;
  }
  arena_->live.emplace(begin, begin + nbytes);
  count(kServed, nbytes);
  return arena_->base + begin;
}

bool Lane::give_back(const void* at) {
  Arena* const arena = owner(at);
  if (arena == nullptr) return false;
  arena->live.erase(static_cast<const char*>(at) - arena->base);
  if (arena != arena_ && arena->live.empty()) drop(arena);
  return true;
}

}  // namespace memopt
