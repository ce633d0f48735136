// The state of the search for a placement: what is decided, what follows from it, and how it is undone; the same code as in
// solvers/placement/search.py, step by step, which says how the search works.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

namespace memopt_placement {

constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 4;

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

// What the search is given; arrays over buffers and over sections, as in solvers/placement/sections.py.
struct Sections {
  int buffers;
  const int32_t *first, *last;
  const int64_t* size;
  const int32_t* twin;
  int count;
  const int64_t* load;
};

class State {
 public:
  const std::vector<int64_t>& offsets() const { return offset_; }

 protected:
  State(const Sections& given, int64_t capacity)
      : n_(given.buffers), first_(given.first), last_(given.last), size_(given.size), twin_(given.twin), sections_(given.count),
        capacity_(capacity), floor_(sections_, 0), slack_(sections_), real_(sections_, 1), under_(sections_, -1), blocks_(sections_),
        members_(sections_), left_(sections_, 0), low_(n_, 0), offset_(n_, -1), weight_(sections_, 1), options_(sections_, 0),
        enders_(sections_), starters_(sections_), crossing_(sections_, 0) {
    for (int j = 0; j < n_; ++j) {
      quantum_ = gcd(quantum_, size_[j]);
      for (int s = first_[j]; s < last_[j]; ++s) members_[s].push_back(j);
    }
    for (int s = 0; s < sections_; ++s) {
      slack_[s] = capacity - given.load[s];
      left_[s] = members_[s].size();
    }
    for (int s = 0; s + 1 < sections_; ++s) {
      for (int j : members_[s])
        if (last_[j] == s + 1) enders_[s].push_back(j); else ++crossing_[s];
      for (int j : members_[s + 1])
        if (first_[j] == s + 1) starters_[s].push_back(j);
    }
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

  void set_options(int s, int64_t options) {
    if (options_[s] == options) return;
    note(Change::kOptions, s, options_[s]);
    options_[s] = options;
  }

  const int n_;
  const int32_t *first_, *last_;
  const int64_t* size_;
  const int32_t* twin_;
  const int sections_;
  const int64_t capacity_;
  std::vector<int64_t> floor_, slack_;
  std::vector<char> real_;
  std::vector<int> under_;
  std::vector<std::vector<Block>> blocks_;
  std::vector<std::vector<int>> members_;
  std::vector<int> left_;
  std::vector<int64_t> low_, offset_;
  std::vector<int64_t> weight_;
  std::vector<int64_t> options_;
  std::vector<std::vector<int>> enders_, starters_;  // of the boundary behind each section
  std::vector<int> crossing_;  // unplaced buffers that go across its end; none across the last one's
  int dirty_first_ = 0, dirty_last_ = 0;
  std::vector<Change> trail_;
  int64_t quantum_ = 0;
  int placed_ = 0;

 private:
  static int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

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

  // What goes across the boundary between sections `s` and `s + 1` has the same bottom on both sides. So below the lowest of it,
  // what ends there reaches as high as what begins there, but for wasted bytes. Returns false if no choice of them does.
  bool level(int s) {
    if (s < 0 || crossing_[s] == 0) return true;
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

  std::vector<int64_t> terms_, ups_, downs_;
};

}  // namespace memopt_placement
