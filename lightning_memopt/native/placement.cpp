// Placement of buffers: best-fit, and an exact search. Uses only standard headers.
//
// The search is that of MiniMalloc (Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
// Learning", ASPLOS 2023), written from the paper:
//
// - Canonical solutions. If there is a placement, there is one in which each buffer rests on the ground or on another buffer.
//   In the order of offsets, each buffer is at its floor: the highest top of the buffers before it that share a moment with it.
//   So the search only decides which buffer comes next, never an offset.
// - Monotonic floor. Later buffers are not lower. A buffer whose floor is below the last offset must rest on a buffer that is
//   still to come.
// - Dominance. If a buffer fits entirely between its floor and the last offset, then moving it down there also gives a valid
//   placement, which is found elsewhere.
// - Sections. Time is cut into moments, each with a set of buffers. In each section, the remaining buffers must fit between the
//   lowest floor of one of them and the capacity.
// - Decomposition. Groups of buffers that no buffers connect in time are placed separately.
//
// In addition to the paper, the order in which buffers are tried is learned: it begins with the buffers of the sections at
// which earlier tries failed. And some tries jump: if the failure is at other times than the last decision, other choices for
// that decision are skipped. Such tries prove nothing.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 4;
constexpr int64_t kFewestNodes = 2000;  // minimum number of nodes of a try
constexpr int64_t kNodesBetweenLooks = 256;  // number of nodes between two looks at the clock and the stop flag
constexpr double kForgets = 0.9;  // after a try, the weight of a section is multiplied by this

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Sections first .. last - 1; none if first >= last.
struct Span {
  int first = std::numeric_limits<int>::max(), last = 0;
  void add(const Span& other) {
    first = std::min(first, other.first);
    last = std::max(last, other.last);
  }
  bool meets(const Span& other) const { return first < other.last && other.first < last; }
};

struct Buffers {
  int count, sections;
  const int32_t *first, *last;
  const int64_t* size;
  Span span(int b) const { return {first[b], last[b]}; }
};

// The criteria for the order of buffers: lifetime, area, load of the most crowded section, and how often sections failed.
struct Strategy {
  const char* keys;
  bool jumps;
};
constexpr Strategy kSystematic[] = {{"LAT", false}, {"TAL", false}, {"TLA", false}, {"ATL", false}};
constexpr Strategy kLearning[] = {{"FTA", true}, {"FLA", true}, {"FAL", true}, {"FTA", false}, {"FLA", false}, {"FAL", false}};

enum class Result { kPlaced, kNone, kGivenUp };

class Search {
 public:
  Search(const Buffers& given, int64_t capacity, volatile int32_t* stop, double until)
      : b_(given), capacity_(capacity), stop_(stop), until_(until), beside_(b_.count), members_(b_.sections), load_(b_.sections, 0),
        failures_(b_.sections, 0.0), weight_(b_.count, 0.0), rank_(b_.count), floor_(b_.count), low_(b_.count), offset_(b_.count),
        left_(b_.sections), witness_(b_.sections) {
    for (int i = 0; i < b_.count; ++i)
      for (int s = b_.first[i]; s < b_.last[i]; ++s) {
        members_[s].push_back(i);
        load_[s] += b_.size[i];
      }
    std::vector<int> seen(b_.count, -1);
    for (int i = 0; i < b_.count; ++i)
      for (int s = b_.first[i]; s < b_.last[i]; ++s)
        for (int j : members_[s])
          if (j != i && seen[j] != i) {
            seen[j] = i;
            beside_[i].push_back(j);
          }
  }

  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t nodes() const { return nodes_; }

  // Tries with growing numbers of nodes. Learning tries get half of all nodes, in Luby's sequence; the others double theirs.
  Result run() {
    for (int s = 0; s < b_.sections; ++s)
      if (load_[s] > capacity_) return Result::kNone;
    int64_t most = kFewestNodes, systematic = 0, learning = 0;
    for (int turn = 0, learned = 0;; most = turn % std::size(kSystematic) == 0 ? 2 * most : most) {
      systematic -= nodes_;
      Result result = attempt(kSystematic[turn++ % std::size(kSystematic)], most);
      systematic += nodes_;
      if (result != Result::kGivenUp || over_) return result;
      while (learning < systematic) {
        learning -= nodes_;
        const Strategy& strategy = kLearning[learned % std::size(kLearning)];
        result = attempt(strategy, kFewestNodes * luby(1 + learned++ / std::size(kLearning)));
        learning += nodes_;
        if (result == Result::kPlaced || over_ || (result == Result::kNone && !strategy.jumps)) return result;
      }
    }
  }

 private:
  struct Change {
    int buffer;
    int64_t floor;  // before; -1: the buffer was placed
  };

  static int64_t luby(int64_t i) {
    for (;;) {
      int64_t k = 1;
      while ((int64_t{1} << k) - 1 < i) ++k;
      if ((int64_t{1} << k) - 1 == i) return int64_t{1} << (k - 1);
      i -= (int64_t{1} << (k - 1)) - 1;
    }
  }

  Result attempt(const Strategy& strategy, int64_t most_nodes) {
    jumps_ = strategy.jumps;
    limit_ = nodes_ + most_nodes;
    given_up_ = false;
    order(strategy.keys);
    std::fill(floor_.begin(), floor_.end(), 0);
    std::fill(offset_.begin(), offset_.end(), -1);
    left_ = load_;
    trail_.clear();
    std::vector<int> all(b_.count);
    std::iota(all.begin(), all.end(), 0);
    std::stable_sort(all.begin(), all.end(), [&](int i, int j) { return b_.first[i] < b_.first[j]; });
    const bool placed = parts(all.data(), all.data() + all.size(), -1, -1);
    for (double& failures : failures_) failures *= kForgets;
    return placed ? Result::kPlaced : given_up_ ? Result::kGivenUp : Result::kNone;
  }

  void order(const char* keys) {
    std::vector<int> by(b_.count);
    std::iota(by.begin(), by.end(), 0);
    for (int i = 0; i < b_.count; ++i)
      weight_[i] = *std::max_element(failures_.begin() + b_.first[i], failures_.begin() + b_.last[i]);
    std::stable_sort(by.begin(), by.end(), [&](int i, int j) {
      for (const char* key = keys; *key; ++key)
        if (const double x = value(i, *key), y = value(j, *key); x != y) return x > y;
      return false;
    });
    for (int k = 0; k < b_.count; ++k) rank_[by[k]] = k;
    for (auto& members : members_) std::sort(members.begin(), members.end(), [&](int i, int j) { return rank_[i] < rank_[j]; });
    for (int s = 0; s < b_.sections; ++s) witness_[s] = members_[s].front();
  }

  double value(int i, char key) const {
    const double lifetime = b_.last[i] - b_.first[i];
    if (key == 'L') return lifetime;
    if (key == 'A') return lifetime * static_cast<double>(b_.size[i]);
    if (key == 'F') return weight_[i];
    return static_cast<double>(*std::max_element(load_.begin() + b_.first[i], load_.begin() + b_.last[i]));
  }

  // Place buffers, which are in the order of time, after one that was placed at `last` with this rank: part by part.
  bool parts(const int* begin, const int* end, int64_t last, int rank) {
    std::vector<std::pair<const int*, const int*>> found;
    for (const int* from = begin; from != end;) {
      const int* to = from;
      for (int until = b_.last[*from]; to != end && b_.first[*to] < until; ++to) until = std::max(until, b_.last[*to]);
      found.push_back({from, to});
      from = to;
    }
    std::stable_sort(found.begin(), found.end(), [](auto& x, auto& y) { return x.second - x.first < y.second - y.first; });
    for (const auto& [from, to] : found)
      if (!part(from, to, last, rank)) return false;
    return true;
  }

  // Whether the buffer may come next: after the last one, in the order of offsets and ranks.
  bool follows(int i, int64_t last, int rank) const { return floor_[i] > last || (floor_[i] == last && rank_[i] > rank); }

  bool fails(const Span& where) {
    failed_ = where;
    return false;
  }

  bool part(const int* begin, const int* end, int64_t last, int rank) {
    if (++nodes_ >= limit_ || (nodes_ % kNodesBetweenLooks == 0 && stopped())) {
      given_up_ = true;
      return false;
    }
    int lowest = *begin;  // the buffer with the lowest top, if it came now
    Span all;
    for (const int* at = begin; at != end; ++at) {
      if (floor_[*at] + b_.size[*at] < floor_[lowest] + b_.size[lowest]) lowest = *at;
      all.add(b_.span(*at));
    }
    const int64_t lowest_top = floor_[lowest] + b_.size[lowest];
    if (lowest_top <= last) return fails(b_.span(lowest));
    std::vector<int> next;
    for (const int* at = begin; at != end; ++at) {
      const int i = *at;
      low_[i] = floor_[i];
      if (follows(i, last, rank)) {
        if (floor_[i] < lowest_top) next.push_back(i);
      } else {
        low_[i] = kFar;  // it must rest on a buffer that is still to come
        for (int j : beside_[i])
          if (offset_[j] < 0) low_[i] = std::min(low_[i], (follows(j, last, rank) ? floor_[j] : lowest_top) + b_.size[j]);
      }
      if (low_[i] > capacity_ - b_.size[i]) return fails(b_.span(i));
    }
    for (int s = all.first; s < all.last; ++s)
      if (left_[s] > 0 && !has_space(s)) return false;
    std::sort(next.begin(), next.end(), [&](int i, int j) { return floor_[i] != floor_[j] ? floor_[i] < floor_[j] : rank_[i] < rank_[j]; });
    Span failed = next.empty() ? all : Span();
    std::vector<int> rest;
    for (size_t k = 0; k < next.size(); ++k) {
      const int i = next[k];
      if (std::any_of(next.begin(), next.begin() + k, [&](int j) { return twins(i, j); })) continue;
      const size_t mark = trail_.size();
      place(i);
      rest.clear();
      std::copy_if(begin, end, std::back_inserter(rest), [&](int j) { return j != i; });
      if (parts(rest.data(), rest.data() + rest.size(), offset_[i], rank_[i])) return true;
      undo(mark);
      if (given_up_ || (jumps_ && !failed_.meets(b_.span(i)))) return false;
      failed.add(failed_);
      failed.add(b_.span(i));
    }
    return fails(failed);
  }

  // Whether a buffer of the section can begin low enough that all remaining buffers of the section fit above that.
  bool has_space(int s) {
    const int64_t most = capacity_ - left_[s];
    const auto low = [&](int i) { return offset_[i] < 0 && low_[i] <= most; };
    if (low(witness_[s])) return true;
    for (int i : members_[s])
      if (low(i)) {
        witness_[s] = i;
        return true;
      }
    ++failures_[s];
    Span where;
    for (int i : members_[s])
      if (offset_[i] < 0) where.add(b_.span(i));
    return fails(where);
  }

  bool twins(int i, int j) const {
    return b_.size[i] == b_.size[j] && b_.first[i] == b_.first[j] && b_.last[i] == b_.last[j];
  }

  void place(int i) {
    offset_[i] = floor_[i];
    trail_.push_back({i, -1});
    for (int s = b_.first[i]; s < b_.last[i]; ++s) left_[s] -= b_.size[i];
    const int64_t top = offset_[i] + b_.size[i];
    for (int j : beside_[i])
      if (offset_[j] < 0 && floor_[j] < top) {
        trail_.push_back({j, floor_[j]});
        floor_[j] = top;
      }
  }

  void undo(size_t mark) {
    for (; trail_.size() > mark; trail_.pop_back()) {
      const auto [i, floor] = trail_.back();
      if (floor >= 0) {
        floor_[i] = floor;
        continue;
      }
      offset_[i] = -1;
      for (int s = b_.first[i]; s < b_.last[i]; ++s) left_[s] += b_.size[i];
    }
  }

  bool stopped() {
    over_ = over_ || *stop_ || now() > until_;
    return over_;
  }

  const Buffers b_;
  const int64_t capacity_;
  volatile int32_t* stop_;
  const double until_;
  std::vector<std::vector<int>> beside_, members_;  // by buffer: those that share a section; by section: its buffers, by rank
  std::vector<int64_t> load_;
  std::vector<double> failures_, weight_;
  std::vector<int> rank_;
  std::vector<int64_t> floor_, low_, offset_, left_;  // offset_: -1 for buffers that are not placed; left_: their bytes by section
  std::vector<int> witness_;  // section -> a buffer that could begin low enough at the last look
  std::vector<Change> trail_;
  Span failed_;
  int64_t nodes_ = 0, limit_ = 0;
  bool jumps_ = false, given_up_ = false, over_ = false;
};

}  // namespace

extern "C" {

void memopt_best_fit(int32_t n, const int64_t* lower, const int64_t* upper, const int64_t* size,
                     const int64_t* order, int64_t* offsets) {
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

// 1: placed; 0: there is no placement within the capacity; -1: time ran out, or the caller stopped it.
int32_t memopt_search(int32_t n, const int32_t* first, const int32_t* last, const int64_t* size, int32_t sections, int64_t capacity,
                      double seconds, volatile int32_t* stop, int64_t* offsets, int64_t* nodes) {
  Search search({n, sections, first, last, size}, capacity, stop, now() + seconds);
  const Result result = search.run();
  *nodes = search.nodes();
  if (result == Result::kPlaced) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
  return result == Result::kPlaced ? 1 : result == Result::kNone ? 0 : -1;
}
}
