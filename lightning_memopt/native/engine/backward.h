// What the plan does in backward: events, segments and frees (runtime/engine/planned.py), while the step is as planned.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "numbers.h"
#include "progress.h"
#include "versions.h"

namespace memopt {

// The plan's actions, by the events of backward. Tensors are tensors of the plan: ids of the tape's versions.
struct Actions {
  using Tensors = std::vector<int64_t>;
  struct Step {
    enum Kind { kFetch, kFree, kRebuild } kind;
    int64_t subject;        // the tensor, or the op
    Tensors made, clones;  // the op's results, and the inputs that it overwrites and that are still needed
  };
  struct Segment {
    int64_t point;
    Tensors births;
    std::vector<Step> steps;
  };
  struct Event {
    bool is_unpack;
    int64_t save, occurrence;
    int64_t segment;  // index of the segment; -1: nothing runs
    Tensors frees;
  };
  std::vector<Event> events;  // in the observed order
  std::vector<Segment> segments;
  std::unordered_map<int64_t, int64_t> last_fetch;  // parked tensor -> the point of its last fetch
};

// `events`: (is unpack, save, occurrence, segment, frees) of each. `segments`: (point, births, steps) of each; a step is (kind,
// tensor or op, made, clones).
std::unique_ptr<Actions> actions_of(pybind11::handle events, pybind11::handle segments, pybind11::handle last_fetch);

// The moment in which the numeric settings were last compared with those of the forward, and were the same.
struct Compared {
  pybind11::object last;  // `Changes.last` (record/settings.py)
  std::thread::id thread;
  // Of the thread. A library may change them, too: they are compared for themselves.
  int threads;
  bool flushes_denormals;
};

// The backward of one forward. It has no reference to the engine.
struct Backward {
  pybind11::object owners;  // of what is referred to
  const Actions& actions;
  Versions& versions;
  Numbers& active;
  Progress& cursor;
  pybind11::dict stand_ins;  // of the guard (`Guard`), as is the next one
  pybind11::list until;
  pybind11::list due, ran;
  mutable Compared compared;
};

// `Engine.unpacked`, for any engine. None if Python must return the tensor; then nothing has been done.
pybind11::object unpacked(pybind11::handle engine, pybind11::handle handle);
// The tensor that autograd asks for with a handle. The thread has the engine's lock. None if Python must return it; then
// nothing has been done.
pybind11::object request(const Backward& backward, pybind11::handle engine, pybind11::handle handle);
// A node released a handle. Returns false if Python must handle that; then nothing has been done.
bool released(const Backward& backward, pybind11::handle engine, pybind11::handle handle);
// `Handle.__del__`, for a handle of the native engine.
void release(PyObject* handle);
// Runs the steps of a segment. Call it below autograd.
void perform(const Backward& backward, pybind11::handle engine, size_t segment);

}  // namespace memopt
