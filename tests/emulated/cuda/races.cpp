// Accesses to memory that nothing orders, found with vector clocks.
//
// Each op has a number in its stream. A stream's clock says which op of every other stream is known to be over when its own next
// op begins: a wait for an event takes over the event's clock, and what the host has waited for is known to all later ops. Of
// each byte the last write, and the reads since then, are kept; an access that comes after one its clock does not know is a race.
// Source: C. J. Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988.
#include <cstdio>
#include <set>

#include "emulated.h"

namespace emulated {

namespace {
struct Access {
  int stream = -1;  // none
  uint64_t op = 0;
  const std::string* what = nullptr;
};
struct Piece {  // bytes with one history
  uintptr_t end = 0;
  Access write;
  std::map<int, Access> reads;  // by stream
};
uint64_t races = 0;
Immortal<std::map<uintptr_t, Piece>> pieces;  // by their first byte; they do not overlap

void split(uintptr_t at) {
  auto it = pieces->upper_bound(at);
  if (it == pieces->begin()) return;
  --it;
  if (it->first < at && at < it->second.end) {
    Piece tail = it->second;
    it->second.end = at;
    (*pieces)[at] = std::move(tail);
  }
}
bool is_ordered(const Access& before, const Stream* s) {
  if (before.stream < 0 || before.stream == s->number) return true;
  auto known = s->clock.find(before.stream);
  return known != s->clock.end() && known->second >= before.op;
}
void report(const char* kind, const Access& before, const Stream* s, const std::string& what, const Range& r) {
  static std::set<std::string> said;
  const std::string line = std::string(kind) + ": " + what + " (stream " + std::to_string(s->number) + ") after " + *before.what +
                           " (stream " + std::to_string(before.stream) + ")";
  if (said.insert(line).second)
    fprintf(stderr, "emulated CUDA: race, %s; %zu bytes at %p\n", line.c_str(), size_t(r.end - r.begin), (void*)r.begin);
  ++races;
}
void note(Piece& piece, bool write, const Access& access) {
  if (write) piece.write = access, piece.reads.clear();
  else piece.reads[access.stream] = access;
}
}  // namespace

void accessed(const Stream* s, const std::vector<Range>& ranges, const std::string& what) {
  static Immortal<std::set<std::string>> names;
  const Access access{s->number, s->ops, &*names->insert(what).first};
  for (const Range& r : ranges) {
    if (r.begin >= r.end) continue;
    split(r.begin), split(r.end);
    uintptr_t at = r.begin;
    std::vector<Range> untouched;
    for (auto it = pieces->lower_bound(at); it != pieces->end() && it->first < r.end; ++it) {
      if (it->first > at) untouched.push_back({at, it->first, r.write});
      Piece& piece = it->second;
      if (!is_ordered(piece.write, s)) report(r.write ? "write after write" : "read after write", piece.write, s, what, r);
      if (r.write)
        for (auto& [_, read] : piece.reads)
          if (!is_ordered(read, s)) report("write after read", read, s, what, r);
      note(piece, r.write, access);
      at = piece.end;
    }
    if (at < r.end) untouched.push_back({at, r.end, r.write});
    for (const Range& u : untouched) {
      Piece piece;
      piece.end = u.end;
      note(piece, r.write, access);
      (*pieces)[u.begin] = std::move(piece);
    }
  }
}

void forget(uintptr_t begin, uintptr_t end) {
  split(begin), split(end);
  pieces->erase(pieces->lower_bound(begin), pieces->lower_bound(end));
}

}  // namespace emulated

// Number of accesses that nothing ordered, since the process began.
API uint64_t emulated_races() {
  LOCK;
  return emulated::races;
}
