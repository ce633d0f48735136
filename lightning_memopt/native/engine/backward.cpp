#include "backward.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/api.h>
#include <torch/csrc/utils/disable_torch_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "handle.h"
#include "hooks.h"
#include "objects.h"
#include "prepared.h"
#include "rerun.h"
#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

Actions::Tensors tensors_of(py::handle sequence) {
  Actions::Tensors tensors;
  for (const py::handle tensor : sequence) tensors.push_back(tensor.cast<int64_t>());
  return tensors;
}

// Whether the step has not deviated from the plan. Only then there is nothing to do besides the plan's actions.
bool is_as_planned(const Backward& backward) {
  const Progress& cursor = backward.cursor;
  return cursor.on_plan && !cursor.out_of_order && backward.until.empty() && backward.stand_ins.empty() && backward.due.empty();
}

// If this event is the next one, takes it and returns it; else null.
const Actions::Event* take(const Backward& backward, bool is_unpack, int64_t save, int64_t occurrence) {
  int64_t& turn = backward.cursor.turn;
  const auto& events = backward.actions.events;
  if (turn >= static_cast<int64_t>(events.size())) return nullptr;
  const auto& event = events[turn];
  if (event.is_unpack != is_unpack || event.save != save || event.occurrence != occurrence) return nullptr;
  for (const int64_t tensor : event.frees) {  // a failed copy raises an error when a parked tensor is dropped
    const Version* const version = is_unpack ? nullptr : backward.versions.at(tensor);
    if (version != nullptr && version->is_parked()) return nullptr;
  }
  ++turn;
  return &event;
}

// `PlannedHoldings.may_drop`, for a version that is not parked, in a step that is as planned.
bool may_drop(const Backward& backward, const Version& version) {
  if (version.has_claim(constants.pinned_claim)) return false;
  if (version.is_rebuildable()) return true;
  const auto last = backward.actions.last_fetch.find(version.tensor);
  return last == backward.actions.last_fetch.end() || backward.cursor.point >= last->second;
}

// The plan no longer needs the version: drop it, unless another tensor of the plan lives in it. `method`: the method of
// `PlannedHoldings` to call if the version is parked.
void let_go(const Backward& backward, py::handle engine, Version& version, const char* method) {
  if (backward.active.has(version.tensor)) return;
  if (version.is_parked()) {
    engine.attr("holdings").attr(method)(py::handle(object_of(version)));
  } else if (may_drop(backward, version)) {
    version.drop();
  }
}

// `_free` of the engine.
void free(const Backward& backward, py::handle engine, const Actions::Event& event) {
  for (const int64_t tensor : event.frees) {
    backward.active.discard(tensor);
    if (Version* const version = backward.versions.at(tensor)) let_go(backward, engine, *version, "let_go");
  }
}

// The tensor of a handle if it is in memory and there is no error to raise; else none.
py::object in_memory(const Backward& backward, const Handle& handle) {
  const Version* version = &handle.version();
  while (version->is_stale()) version = backward.versions.at(version->next);  // `present`
  if (handle.now() != handle.counter || handle.is_lazy()) return py::none();
  if (!version->has_ordinary_value() || version->is_parked() || !version->is_intact()) return py::none();
  version->put_in_order();
  return wrapped(handle.window.on(version->value));
}

// Whether a call can read the version as it is in memory (`missing` in rebuild.py).
bool is_there(const Version& version) {
  if (!version.has_ordinary_value() || !version.is_intact()) return false;
  return static_cast<int64_t>(version.value.storage().nbytes()) >= version.nbytes;  // a weight that is not gathered has none
}

// Runs an op of the plan's forward again if nothing prevents it (`run_again` of the engine).
bool runs_again(const Backward& backward, const Actions::Step& step) {
  const Versions& versions = backward.versions;
  py::object owner = py::none();
  for (const int64_t tensor : step.made)
    if (const Version* const version = owner.is_none() ? versions.at(tensor) : nullptr) owner = version->call;
  const Call* const call = value_in<Call>(owner.ptr());
  if (call == nullptr || call->prepared.is_none()) return false;
  for (const int64_t id : numbers_in(call->reads)) {
    const Version* const version = versions.at(id);
    if (version == nullptr || !is_there(*version)) return false;
  }
  std::vector<const Version*> clones;
  for (const int64_t tensor : step.clones) clones.push_back(versions.at(tensor));
  const auto survives = [&](const Version& version) { return std::find(clones.begin(), clones.end(), &version) != clones.end(); };
  if (!rerun(*call, versions, survives)) return false;
  PyList_Append(backward.ran.ptr(), py::int_(call->op).ptr());
  return true;
}

// While it exists, this thread has the engine's lock, which is a Python object.
class Lock {
 public:
  explicit Lock(py::handle engine) : lock_(engine.attr("lock")) { lock_.attr("acquire")(); }
  ~Lock() {
    PyObject* const done = PyObject_CallMethod(lock_.ptr(), "release", nullptr);
    if (done == nullptr) PyErr_WriteUnraisable(lock_.ptr());
    Py_XDECREF(done);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  py::object lock_;
};

// `below_autograd` in record/below.py, outside of functorch.
struct BelowAutograd {
  torch::DisableTorchDispatch no_modes;
  at::AutoDispatchBelowAutograd no_history;
  c10::impl::ExcludeDispatchKeyGuard above{c10::DispatchKeySet(
      {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA, c10::DispatchKey::VmapMode})};
  c10::AutoGradMode grad{c10::GradMode::is_enabled()};  // calls run under their own mode; afterwards this one is restored
};

bool flushes_denormals() {  // torch has no getter: ask the processor
  volatile double smallest = 5e-324;
  return smallest * 1.0 == 0.0;
}

// Whether the numeric settings are those of the forward (R6). Python asks for each of them only if one may have been set since it
// last did.
bool has_settings_of_forward(const Backward& backward, py::handle engine) {
  const auto changes = py::handle(constants.changes);
  const bool watched = changes.attr("watched").cast<bool>();
  Compared now{changes.attr("last"), std::this_thread::get_id(), at::get_num_threads(), flushes_denormals()};
  const Compared& before = backward.compared;
  if (watched && now.last.is(before.last) && now.thread == before.thread && now.threads == before.threads &&
      now.flushes_denormals == before.flushes_denormals)
    return true;
  const py::object flags = py::handle(constants.numeric_flags)();
  if (!flags.equal(engine.attr("tape").attr("flags"))) return false;
  backward.compared = std::move(now);
  return true;
}

// `perform_natively` of the engine, if its contexts only need to go below autograd.
void perform_below(const Backward& backward, py::handle engine, int64_t segment) {
  if (!has_settings_of_forward(backward, engine) || is_in_transform() || torch::autograd::profiler::profilerEnabled()) {
    engine.attr("perform_natively")(segment);
    return;
  }
  const BelowAutograd below;
  perform(backward, engine, segment);
}

}  // namespace

std::unique_ptr<Actions> actions_of(py::handle events, py::handle segments, py::handle last_fetch) {
  auto made = std::make_unique<Actions>();
  made->last_fetch = last_fetch.cast<std::unordered_map<int64_t, int64_t>>();
  for (const py::handle event : events) {
    const auto fields = py::reinterpret_borrow<py::tuple>(event);
    made->events.push_back({fields[0].cast<bool>(), fields[1].cast<int64_t>(), fields[2].cast<int64_t>(), fields[3].cast<int64_t>(), tensors_of(fields[4])});
  }
  for (const py::handle segment : segments) {
    const auto fields = py::reinterpret_borrow<py::tuple>(segment);
    made->segments.push_back({fields[0].cast<int64_t>(), tensors_of(fields[1]), {}});
    for (const py::handle step : fields[2]) {
      const auto parts = py::reinterpret_borrow<py::tuple>(step);
      const auto kind = static_cast<Actions::Step::Kind>(parts[0].cast<int>());
      made->segments.back().steps.push_back({kind, parts[1].cast<int64_t>(), tensors_of(parts[2]), tensors_of(parts[3])});
    }
  }
  return made;
}

py::object unpacked(py::handle engine, py::handle handle) {
  static PyObject* const name = PyUnicode_InternFromString("_backward");
  const auto owner = py::reinterpret_steal<py::object>(PyObject_GetAttr(engine.ptr(), name));
  if (!owner) throw py::error_already_set();
  if (owner.is_none()) return py::none();
  const Lock lock(engine);
  if (PyList_GET_SIZE(constants.deferred) > 0) return py::none();
  const auto* const backward = static_cast<Backward*>(PyCapsule_GetPointer(owner.ptr(), nullptr));
  if (backward == nullptr) throw py::error_already_set();
  try {
    return request(*backward, engine, handle);
  } catch (py::error_already_set& error) {
    if (!error.matches(constants.start_changed)) throw;
    const py::object named = engine.attr("start_changed")(error.value().attr("version"));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(named.ptr())), named.ptr());
    throw py::error_already_set();
  }
}

py::object request(const Backward& backward, py::handle engine, py::handle handle) {
  Handle* const asked = value_in<Handle>(handle.ptr());
  if (asked == nullptr || !is_as_planned(backward)) return py::none();
  const auto* const event = take(backward, true, asked->save, asked->times);
  if (event == nullptr) return py::none();
  int64_t& point = backward.cursor.point;
  if (event->segment >= 0 && backward.actions.segments[event->segment].point > point) {
    point = backward.actions.segments[event->segment].point;
    perform_below(backward, engine, event->segment);
  }
  ++asked->times;
  py::object value = in_memory(backward, *asked);
  if (value.is_none()) value = engine.attr("given")(handle);
  free(backward, engine, *event);
  return value;
}

bool released(const Backward& backward, py::handle engine, py::handle handle) {
  const Handle* const gone = value_in<Handle>(handle.ptr());
  if (gone == nullptr || !is_as_planned(backward) || gone->version().is_parked()) return false;
  const auto* const event = take(backward, false, gone->save, 0);
  if (event == nullptr) return false;
  free(backward, engine, *event);
  if (gone->version().handles == 0) let_go(backward, engine, gone->version(), "let_go");
  return true;
}

namespace {

// Tells the engine of a release.
void tell(py::handle engine, py::handle handle) {
  static PyObject* const name = PyUnicode_InternFromString("_backward");
  const auto capsule = py::reinterpret_steal<py::object>(PyObject_GetAttr(engine.ptr(), name));
  if (!capsule) throw py::error_already_set();
  if (!capsule.is_none()) {
    const auto* const backward = static_cast<Backward*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (backward == nullptr) throw py::error_already_set();
    const Lock lock(engine);
    if (released(*backward, engine, handle)) return;
  }
  engine.attr("released")(handle);
}

}  // namespace

void release(PyObject* handle) {
  Handle& gone = value_of<Handle>(handle);
  const py::object engine = std::exchange(gone.engine, py::none());
  if (engine.is_none()) return;
  --gone.version().handles;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  try {
    tell(engine, handle);
  } catch (py::error_already_set& error) {  // an interrupt: names Python's destructor (record/interrupts.py)
    error.restore();
    PyErr_WriteUnraisable(constants.destructor);
  }
  PyErr_Restore(type, value, trace);
}

void perform(const Backward& backward, py::handle engine, size_t segment) {
  const auto& planned = backward.actions.segments.at(segment);
  for (const int64_t tensor : planned.births)
    if (backward.versions.at(tensor) != nullptr) backward.active.add(tensor);
  for (const auto& step : planned.steps) {
    if (step.kind == Actions::Step::kFetch) {
      engine.attr("fetch")(step.subject);
    } else if (step.kind == Actions::Step::kRebuild) {
      if (!runs_again(backward, step)) engine.attr("run_again")(step.subject, step.clones, true);
    } else if (Version* const version = backward.versions.at(step.subject)) {
      let_go(backward, engine, *version, "free");
    }
  }
}

}  // namespace memopt
