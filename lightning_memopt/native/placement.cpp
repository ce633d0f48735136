// Placement of buffers: best-fit, and an exact search. The same algorithms, step by step, are in Python in
// solvers/placement (best_fit.py, search.py), which say how they work; tests compare both. No header beyond the standard ones.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 4;

constexpr int kMostDepth = 100000;  // of the search, which needs some 300 bytes of the stack for each step
constexpr double kLeans[] = {0.0, 0.05, 0.3};

struct Block {
  int64_t bottom, top;
  int buffer;
};

// A change that is undone when the search goes back.
struct Change {
  enum Kind { kFloor, kSlack, kReal, kUnder, kLow, kInserted, kPopped, kPlaced, kOptions } kind;
  int index;
  int64_t value;
  Block block;
};

struct Deeper {
  explicit Deeper(int* depth) : depth(depth) { ++*depth; }
  ~Deeper() { --*depth; }
  int* depth;
};

class Search {
 public:
  Search(int n, const int32_t* first, const int32_t* last, const int64_t* size, const int32_t* twin, int sections,
         const int64_t* load, int64_t capacity, uint64_t seed, volatile int32_t* stop, double until)
      : n_(n), first_(first), last_(last), size_(size), twin_(twin), sections_(sections), capacity_(capacity), state_(seed),
        stop_(stop), until_(until), floor_(sections, 0), slack_(sections), real_(sections, 1), under_(sections, -1),
        blocks_(sections), members_(sections), left_(sections, 0), low_(n, 0), offset_(n, -1), noise_(n), weight_(sections, 1),
        options_(sections, 0), enders_(sections), starters_(sections), crossing_(sections, 0) {
    quantum_ = 0;
    for (int j = 0; j < n; ++j) {
      quantum_ = gcd(quantum_, size[j]);
      for (int s = first[j]; s < last[j]; ++s) members_[s].push_back(j);
    }
    for (int s = 0; s < sections; ++s) {
      slack_[s] = capacity - load[s];
      left_[s] = members_[s].size();
    }
    for (int s = 0; s + 1 < sections; ++s) {
      for (int j : members_[s])
        if (last[j] == s + 1) enders_[s].push_back(j); else ++crossing_[s];
      for (int j : members_[s + 1])
        if (first[j] == s + 1) starters_[s].push_back(j);
    }
  }

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

  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  static int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

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
    if (*stop_ || std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count() > until_) over_ = true;
    return over_;
  }

  void undo(size_t mark) {
    while (trail_.size() > mark) {
      const Change& c = trail_.back();
      switch (c.kind) {
        case Change::kFloor: floor_[c.index] = c.value; break;
        case Change::kSlack: slack_[c.index] = c.value; break;
        case Change::kReal: real_[c.index] = c.value; break;
        case Change::kUnder: under_[c.index] = c.value; break;
        case Change::kOptions: options_[c.index] = c.value; break;
        case Change::kLow: low_[c.index] = c.value; break;
        case Change::kInserted: blocks_[c.index].erase(blocks_[c.index].begin() + c.value); break;
        case Change::kPopped: blocks_[c.index].push_back(c.block); break;
        case Change::kPlaced:
          offset_[c.index] = -1;
          --placed_;
          for (int s = first_[c.index]; s < last_[c.index]; ++s) {
            ++left_[s];
            if (s + 1 < last_[c.index]) ++crossing_[s];
          }
          break;
      }
      trail_.pop_back();
    }
    dirty_first_ = sections_;
    dirty_last_ = 0;
  }

  void note(Change::Kind kind, int index, int64_t value) { trail_.push_back({kind, index, value, {}}); }

  // Nothing of section `s` is below `height` any more. Returns false if a buffer does not fit above it.
  bool raise(int s, int64_t height, bool real, int under) {
    note(Change::kFloor, s, floor_[s]);
    note(Change::kReal, s, real_[s]);
    note(Change::kUnder, s, under_[s]);
    floor_[s] = height;
    real_[s] = real;
    under_[s] = under;
    auto& blocks = blocks_[s];
    while (!blocks.empty() && blocks.back().bottom <= floor_[s]) {
      trail_.push_back({Change::kPopped, s, 0, blocks.back()});
      floor_[s] = blocks.back().top;
      real_[s] = 1;
      under_[s] = blocks.back().buffer;
      blocks.pop_back();
    }
    touch(s, s + 1);
    for (int j : members_[s])
      if (offset_[j] < 0 && low_[j] <= floor_[s]) {
        touch(first_[j], last_[j]);
        if (low_[j] == floor_[s]) continue;
        note(Change::kLow, j, low_[j]);
        low_[j] = floor_[s];
        if (low_[j] + size_[j] > capacity_) return false;
      }
    return true;
  }

  // The bytes from the floor of section `s` to `height` stay empty. `height` is not above the lowest block.
  bool waste(int s, int64_t height) {
    if (height - floor_[s] > slack_[s]) return false;
    note(Change::kSlack, s, slack_[s]);
    slack_[s] -= height - floor_[s];
    return raise(s, height, false, -1) && level(s - 1) && level(s);
  }

  // These sections are looked at again.
  void touch(int first, int last) {
    dirty_first_ = std::min(dirty_first_, first);
    dirty_last_ = std::max(dirty_last_, last);
  }

  // What goes across the boundary between sections `s` and `s + 1` has the same bottom on both sides. So below the lowest of it,
  // what ends there reaches as high as what begins there, but for wasted bytes. Returns false if no choice of them does.
  bool level(int s) {
    if (s < 0 || s + 1 >= sections_ || crossing_[s] == 0) return true;
    if (floor_[s] == floor_[s + 1]) return true;
    const int64_t higher = floor_[s] - floor_[s + 1];
    if (higher <= slack_[s + 1] && -higher <= slack_[s]) return true;
    terms_.clear();
    for (int j : starters_[s])
      if (offset_[j] < 0) terms_.push_back(size_[j]);
    for (int j : enders_[s])
      if (offset_[j] < 0) terms_.push_back(-size_[j]);
    for (const Block& block : blocks_[s])
      if (last_[block.buffer] == s + 1) terms_.push_back(block.bottom - block.top);
    for (const Block& block : blocks_[s + 1])
      if (first_[block.buffer] == s + 1) terms_.push_back(block.top - block.bottom);
    if (reaches(higher - slack_[s + 1], higher + slack_[s])) return true;
    ++weight_[s];
    ++weight_[s + 1];
    return false;
  }

  // Whether some of the terms sum up to `least .. most`; true, too, if that takes too long to say.
  bool reaches(int64_t least, int64_t most) {
    if (least <= 0 && most >= 0) return true;
    std::sort(terms_.begin(), terms_.end(), [](int64_t a, int64_t b) { return std::abs(a) != std::abs(b) ? std::abs(a) > std::abs(b) : a > b; });
    const size_t count = terms_.size();
    ups_.assign(count + 1, 0);
    downs_.assign(count + 1, 0);
    for (size_t i = count; i-- > 0;) {
      ups_[i] = ups_[i + 1] + std::max<int64_t>(terms_[i], 0);
      downs_[i] = downs_[i + 1] + std::min<int64_t>(terms_[i], 0);
    }
    int steps = 2000;
    return sums(0, 0, least, most, &steps);
  }

  bool sums(size_t i, int64_t sum, int64_t least, int64_t most, int* steps) {
    if (sum >= least && sum <= most) return true;
    if (sum + ups_[i] < least || sum + downs_[i] > most) return false;
    if (--*steps < 0) return true;
    return sums(i + 1, sum + terms_[i], least, most, steps) || sums(i + 1, sum, least, most, steps);
  }

  // Whether the gap below the lowest block of section `s` can be filled, but for the slack.
  bool fills(int s, int64_t ceiling) {
    if (ceiling - floor_[s] <= slack_[s]) return true;
    terms_.clear();
    for (int j : members_[s])
      if (offset_[j] < 0 && low_[j] + size_[j] <= ceiling) terms_.push_back(size_[j]);
    return reaches(ceiling - floor_[s] - slack_[s], ceiling - floor_[s]);
  }


  bool place(int j, int64_t at) {
    note(Change::kPlaced, j, 0);
    offset_[j] = at;
    ++placed_;
    for (int s = first_[j]; s < last_[j]; ++s) {
      --left_[s];
      if (s + 1 < last_[j]) --crossing_[s];
    }
    for (int s = first_[j]; s < last_[j]; ++s) {
      if (floor_[s] == at) {
        if (!raise(s, at + size_[j], true, j)) return false;
        continue;
      }
      auto& blocks = blocks_[s];
      size_t rank = blocks.size();
      while (rank > 0 && blocks[rank - 1].bottom < at) --rank;
      blocks.insert(blocks.begin() + rank, Block{at, at + size_[j], j});
      note(Change::kInserted, s, rank);
      touch(s, s + 1);
      for (int k : members_[s])
        if (offset_[k] < 0) touch(first_[k], last_[k]);
    }
    return level(first_[j] - 1) && level(last_[j] - 1);
  }

  bool fits(int j, int64_t at) const {
    if (low_[j] > at || at + size_[j] > capacity_) return false;
    for (int s = first_[j]; s < last_[j]; ++s)
      for (auto block = blocks_[s].rbegin(); block != blocks_[s].rend() && block->bottom < at + size_[j]; ++block)
        if (block->top > at) return false;
    return true;
  }

  // Whether the buffer would stand on another one, or on the ground, and not on wasted bytes only.
  bool stands(int j, int64_t at) const {
    if (at == 0) return true;
    for (int s = first_[j]; s < last_[j]; ++s) {
      if (floor_[s] == at && real_[s]) return true;
      for (const Block& block : blocks_[s])
        if (block.top == at) return true;
    }
    return false;
  }

  bool candidate(int j, int s) const {
    const int64_t at = floor_[s];
    if (twin_[j] >= 0 && offset_[twin_[j]] < 0) return false;
    const int k = under_[s];
    if (k >= 0 && first_[k] == first_[j] && last_[k] == last_[j] && size_[k] < size_[j]) return false;
    return fits(j, at) && (real_[s] || stands(j, at));
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

  void set_options(int s, int64_t options) {
    if (options_[s] == options) return;
    note(Change::kOptions, s, options_[s]);
    options_[s] = options;
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
    if (behind >= sections_ || crossing_[behind - 1] == 0 || floor_[behind] == top) snug *= snug_;
    return static_cast<double>(size_[j]) * length * (long_ ? length : 1) * static_cast<double>(noise_[j]) * (flush == length ? 1024.0 : 1.0) * snug;
  }

  const int n_;
  const int32_t *first_, *last_;
  const int64_t* size_;
  const int32_t* twin_;
  const int sections_;
  const int64_t capacity_;
  uint64_t state_;
  volatile int32_t* stop_;
  const double until_;
  std::vector<int64_t> floor_, slack_;
  std::vector<char> real_;
  std::vector<int> under_;
  std::vector<std::vector<Block>> blocks_;
  std::vector<std::vector<int>> members_;
  std::vector<int> left_;
  std::vector<int64_t> low_, offset_, noise_;
  std::vector<int64_t> weight_;
  std::vector<int64_t> options_, terms_, ups_, downs_;
  std::vector<std::vector<int>> enders_, starters_;  // of the boundary behind each section
  std::vector<int> crossing_;  // unplaced buffers that go across it
  int dirty_first_ = 0, dirty_last_ = 0;
  std::vector<Change> trail_;
  int64_t quantum_, nodes_ = 0, limit_ = 0;
  int placed_ = 0;
  double lean_ = 0, snug_ = 1;
  bool long_ = false;
  int depth_ = 0;
  bool over_ = false;
};

}  // namespace

extern "C" {

void memopt_best_fit(int32_t n, const int64_t* lower, const int64_t* upper, const int64_t* size, const int64_t* order,
                     int64_t* offsets) {
  struct Placed {
    int64_t bottom, top, lower, upper;
  };
  std::vector<Placed> placed;
  placed.reserve(n);
  for (int32_t i = 0; i < n; ++i) {
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
  const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  Search search(n, first, last, size, twin, sections, load, capacity, seed, stop, now + seconds);
  const int result = search.run(nodes_a_try, most_nodes, nodes);
  if (result == 1) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
  return result;
}
}
