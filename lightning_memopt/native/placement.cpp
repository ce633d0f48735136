// Placement of buffers: best-fit, and an exact search. The same algorithms, step by step, are in Python in
// solvers/placement (best_fit.py, search.py), which say how they work; tests compare both. No header beyond the standard ones.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "placement_state.h"

namespace {

using namespace memopt_placement;

constexpr int kMostDepth = 100000;  // of the search, which needs some 300 bytes of the stack for each step
constexpr double kLeans[] = {0.0, 0.05, 0.3};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Deeper {
  explicit Deeper(int* depth) : depth(depth) { ++*depth; }
  ~Deeper() { --*depth; }
  int* depth;
};

class Search : public State {
 public:
  Search(const Sections& given, int64_t capacity, uint64_t seed, volatile int32_t* stop, double until)
      : State(given, capacity), state_(seed), stop_(stop), until_(until), noise_(given.buffers) {}

  // 1: placed; 0: there is no placement; -1: the limit of nodes, time, or the caller stopped it.
  int run(int64_t nodes_a_try, int64_t most_nodes, int64_t* nodes) {
    for (int s = 0; s < sections_; ++s)
      if (slack_[s] < 0) return 0;
    int result = -1;
    for (int64_t round = 1; result < 0 && !over_ && nodes_ < most_nodes; ++round) {
      for (int j = 0; j < n_; ++j) noise_[j] = round == 1 ? 1024 : 512 + next() % 1024;
      lean_ = round == 1 ? 0.05 : kLeans[next() % 3];
      long_ = round > 1 && next() % 2;
      snug_ = round > 1 && next() % 4 == 0 ? 1.0 : 64.0;
      limit_ = std::min(most_nodes, nodes_ + nodes_a_try * luby(round));
      dirty_first_ = 0;
      dirty_last_ = sections_;
      result = descend();
      if (result < 1) undo(0);
    }
    *nodes = nodes_;
    return result;
  }

 private:
  static int64_t luby(int64_t i) {
    for (;;) {
      int64_t k = 1;
      while ((int64_t{1} << k) - 1 < i) ++k;
      if ((int64_t{1} << k) - 1 == i) return int64_t{1} << (k - 1);
      i -= (int64_t{1} << (k - 1)) - 1;
    }
  }

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  bool stopped() {
    if (*stop_ || now() > until_) over_ = true;
    return over_;
  }

  // Raise floors to where a buffer can be. Sets the section to decide; -1 if no section has a candidate. False: a dead end.
  bool look(int* chosen) {
    *chosen = -1;
    while (dirty_first_ < dirty_last_) {
      const int from = dirty_first_, to = dirty_last_;
      dirty_first_ = sections_;
      dirty_last_ = 0;
      for (int s = from; s < to; ++s) {
        if (left_[s] == 0) { set_options(s, 0); continue; }
        const int64_t at = floor_[s], ceiling = blocks_[s].empty() ? capacity_ : blocks_[s].back().bottom;
        int64_t lowest = kFar, fill = 0;
        const bool passes = real_[s] && slack_[s] >= quantum_;  // it may be that no buffer begins at this height
        int options = passes;
        for (int j : members_[s]) {
          if (offset_[j] >= 0) continue;
          if (low_[j] + size_[j] <= ceiling) {
            fill += size_[j];
            lowest = std::min(lowest, low_[j]);
          }
          if (low_[j] <= at && (passes || candidate(j, s))) ++options;
        }
        if (lowest == kFar) lowest = ceiling;  // nothing goes into this gap
        if (!blocks_[s].empty() && (ceiling - at - fill > slack_[s] || !fills(s, ceiling))) { ++weight_[s]; return false; }
        if (lowest > at) {
          if (!waste(s, lowest)) { ++weight_[s]; return false; }
          continue;
        }
        if (options == 0) {
          if (slack_[s] == 0) { ++weight_[s]; return false; }
        }
        set_options(s, options);
      }
    }
    double best = 0;
    for (int s = 0; s < sections_; ++s) {
      if (options_[s] == 0) continue;
      const double value = floor_[s] + lean_ * slack_[s] + 1e-3 * options_[s] / weight_[s];
      if (*chosen < 0 || value < best) {
        *chosen = s;
        best = value;
      }
    }
    return true;
  }

  // No section has a candidate: what is lowest of all rests on a placed buffer. Raise all floors to the least such height.
  bool bump() {
    int64_t least = kFar;
    for (int j = 0; j < n_; ++j) {
      if (offset_[j] >= 0) continue;
      for (int s = first_[j]; s < last_[j]; ++s) {
        if (real_[s] && floor_[s] >= low_[j] && floor_[s] < least && fits(j, floor_[s])) least = floor_[s];
        for (const Block& block : blocks_[s])
          if (block.top >= low_[j] && block.top < least && fits(j, block.top)) least = block.top;
      }
    }
    if (least == kFar) return false;
    bool moved = false;
    for (int s = 0; s < sections_; ++s)
      while (left_[s] > 0 && floor_[s] < least) {
        const int64_t to = blocks_[s].empty() ? least : std::min(least, blocks_[s].back().bottom);
        if (!waste(s, to)) { ++weight_[s]; return false; }
        moved = true;
      }
    return moved;
  }

  int descend() {
    if (placed_ == n_) return 1;
    if (++nodes_ >= limit_ || stopped()) return -1;
    const Deeper deeper(&depth_);
    if (depth_ > kMostDepth) return -1;
    int s;
    if (!look(&s)) return 0;
    while (s < 0) {
      if (!bump() || !look(&s)) return 0;
    }
    const int64_t at = floor_[s];
    std::vector<std::pair<double, int>> options;
    for (int j : members_[s])
      if (offset_[j] < 0 && candidate(j, s)) options.push_back({-score(j, at), j});
    std::sort(options.begin(), options.end());
    const size_t mark = trail_.size();
    for (const auto& option : options) {
      int result = place(option.second, at) ? descend() : 0;
      if (result != 0) return result;
      undo(mark);
    }
    if (!real_[s] || slack_[s] < quantum_) return 0;
    return waste(s, at + quantum_) ? descend() : 0;
  }

  // Candidates that leave no gap below them come first, of them those of the largest area.
  double score(int j, int64_t at) const {
    int flush = 0;
    for (int s = first_[j]; s < last_[j]; ++s) flush += floor_[s] == at;
    const int length = last_[j] - first_[j];
    const int64_t top = at + size_[j];
    double snug = 1;
    const int before = first_[j] - 1, behind = last_[j];
    if (before < 0 || crossing_[before] == 0 || floor_[before] == top) snug *= snug_;
    if (crossing_[behind - 1] == 0 || floor_[behind] == top) snug *= snug_;
    return static_cast<double>(size_[j]) * length * (long_ ? length : 1) * static_cast<double>(noise_[j]) * (flush == length ? 1024.0 : 1.0) * snug;
  }

  uint64_t state_;
  volatile int32_t* stop_;
  const double until_;
  std::vector<int64_t> noise_;
  int64_t nodes_ = 0, limit_ = 0;
  double lean_ = 0, snug_ = 1;
  bool long_ = false;
  int depth_ = 0;
  bool over_ = false;
};

}  // namespace

extern "C" {

// Buffers whose offset is not negative were placed before; `order` has the `count` others.
void memopt_best_fit(int32_t n, int32_t count, const int64_t* lower, const int64_t* upper, const int64_t* size,
                     const int64_t* order, int64_t* offsets) {
  struct Placed {
    int64_t bottom, top, lower, upper;
  };
  std::vector<Placed> placed;
  placed.reserve(n);
  for (int32_t k = 0; k < n; ++k)
    if (offsets[k] >= 0) placed.push_back({offsets[k], offsets[k] + size[k], lower[k], upper[k]});
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) { return a.bottom < b.bottom; });
  for (int32_t i = 0; i < count; ++i) {
    const int64_t k = order[i], lo = lower[k], up = upper[k], need = size[k];
    int64_t floor = 0, smallest = std::numeric_limits<int64_t>::max(), at = -1;
    for (const Placed& p : placed) {
      if (p.lower >= up || p.upper <= lo) continue;
      const int64_t gap = p.bottom - floor;
      if (gap >= need && gap < smallest) {
        smallest = gap;
        at = floor;
      }
      floor = std::max(floor, p.top);
    }
    if (at < 0) at = floor;
    offsets[k] = at;
    auto rank = std::upper_bound(placed.begin(), placed.end(), at, [](int64_t value, const Placed& p) { return value < p.bottom; });
    placed.insert(rank, Placed{at, at + need, lo, up});
  }
}

int32_t memopt_search(int32_t n, const int32_t* first, const int32_t* last, const int64_t* size, const int32_t* twin,
                      int32_t sections, const int64_t* load, int64_t capacity, uint64_t seed, int64_t nodes_a_try,
                      int64_t most_nodes, double seconds, volatile int32_t* stop, int64_t* offsets, int64_t* nodes) {
  Search search({n, first, last, size, twin, sections, load}, capacity, seed, stop, now() + seconds);
  const int result = search.run(nodes_a_try, most_nodes, nodes);
  if (result == 1) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
  return result;
}
}
