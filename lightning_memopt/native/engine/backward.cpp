#include "backward.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "guards.h"
#include "objects.h"
#include "prepared.h"
#include "rerun.h"
#include "tensors.h"
#include "values.h"

namespace memopt {
namespace {

namespace py = pybind11;

int64_t number(const Slot& slot, PyObject* object) { return PyLong_AsLongLong(slot.get(object)); }

void set_number(const Slot& slot, PyObject* object, int64_t value) { slot.set(object, PyLong_FromLongLong(value)); }

Actions::Tensors tensors_of(py::handle sequence) {
  Actions::Tensors tensors;
  for (const py::handle tensor : sequence) tensors.push_back(py::reinterpret_borrow<py::object>(tensor));
  return tensors;
}

// Whether the step has not deviated from the plan: only then the plan's actions are all that is to be done.
bool is_as_planned(const Backward& backward) {
  PyObject* const guard = backward.guard.ptr();
  PyObject* const deviation = cursor_slots.deviation.get(backward.cursor.ptr());
  return deviation_slots.first.get(deviation) == Py_None && deviation_slots.out_of_order.get(deviation) == Py_False &&
      PyList_GET_SIZE(guard_slots.until.get(guard)) == 0 && PyDict_GET_SIZE(guard_slots.stands.get(guard)) == 0 &&
      PyList_GET_SIZE(backward.due.ptr()) == 0;
}

// The event that comes next, if it is this one, which then has come; else null.
const Actions::Event* take(const Backward& backward, bool is_unpack, int64_t save, int64_t occurrence) {
  PyObject* const turns = backward.turns.ptr();
  const int64_t next = number(turns_slots.next, turns);
  const auto& events = backward.actions.events;
  if (next >= static_cast<int64_t>(events.size())) return nullptr;
  const auto& event = events[next];
  if (event.is_unpack != is_unpack || event.save != save || event.occurrence != occurrence) return nullptr;
  for (const auto& tensor : event.frees) {  // a copy that has failed raises an error where a parked tensor is dropped
    PyObject* const version = is_unpack ? nullptr : version_with(backward.versions.ptr(), tensor.ptr());
    if (version != nullptr && is_parked(version_slots.holding.get(version))) return nullptr;
  }
  set_number(turns_slots.next, turns, next + 1);
  return &event;
}

bool lives(const Backward& backward, PyObject* holding) { return has(backward.active.ptr(), holding_slots.tensor.get(holding)); }

// `PlannedHoldings.may_drop`, of a version that is not parked, in a step that is as planned.
bool may_drop(const Backward& backward, PyObject* version) {
  PyObject* const holding = version_slots.holding.get(version);
  if (holding_slots.claim.get(holding) == constants.pinned_claim) return false;
  if (is_rebuildable(version)) return true;
  PyObject* const last = PyDict_GetItemWithError(backward.actions.last_fetch.ptr(), holding_slots.tensor.get(holding));
  return last == nullptr || number(cursor_slots.point, backward.cursor.ptr()) >= PyLong_AsLongLong(last);
}

// The plan needs the version no longer: drop it, unless another tensor of the plan lives in it. `method`: that of
// `PlannedHoldings`, which is called where the version is parked.
void let_go(const Backward& backward, py::handle engine, PyObject* version, const char* method) {
  PyObject* const holding = version_slots.holding.get(version);
  if (lives(backward, holding)) return;
  if (is_parked(holding)) {
    engine.attr("holdings").attr(method)(py::handle(version));
  } else if (may_drop(backward, version)) {
    drop(holding);
  }
}

// `_free` of the engine.
void free(const Backward& backward, py::handle engine, const Actions::Event& event) {
  for (const auto& tensor : event.frees) {
    PySet_Discard(backward.active.ptr(), tensor.ptr());
    PyObject* const version = version_with(backward.versions.ptr(), tensor.ptr());
    if (version != nullptr) let_go(backward, engine, version, "let_go");
  }
}

// The tensor of a handle, if it is in memory, and nothing is to be said about it; else none.
py::object in_memory(const Backward& backward, PyObject* handle) {
  PyObject* version = handle_slots.version.get(handle);
  while (version_slots.next.get(version) != Py_None)  // `present`
    version = version_with(backward.versions.ptr(), version_slots.next.get(version));
  PyObject* const holding = version_slots.holding.get(version);
  const int64_t counter = version_at(handle_slots.guard.get(handle));
  const at::Tensor* const value = value_of(holding);
  if (value == nullptr || is_parked(holding)) return py::none();
  if (counter != number(handle_slots.counter, handle) || !is_intact(holding, *value)) return py::none();
  const auto window = window_of(handle_slots.view.get(handle));
  if (!window) return py::none();
  put_in_order(holding, *value);
  return wrapped(window->on(*value));
}

// Whether a call can read the version as it is in memory (`missing` in rebuild.py).
bool is_there(PyObject* version) {
  PyObject* const holding = version_slots.holding.get(version);
  const at::Tensor* const value = value_of(holding);
  if (value == nullptr || !is_intact(holding, *value)) return false;
  return static_cast<int64_t>(value->storage().nbytes()) >= number(version_slots.nbytes, version);  // a weight that is away has none
}

// Runs an op of the plan's forward again, if nothing stands in its way (`run_again` of the engine).
bool runs_again(const Backward& backward, const Actions::Step& step) {
  PyObject* const versions = backward.versions.ptr();
  PyObject* call = Py_None;
  for (const auto& tensor : step.made)
    if (PyObject* const version = call == Py_None ? version_with(versions, tensor.ptr()) : nullptr) call = version_slots.call.get(version);
  if (call == Py_None || call_slots.prepared.get(call) == Py_None) return false;
  const auto owner = py::reinterpret_borrow<py::object>(call);
  PyObject* const reads = call_slots.reads.get(call);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(reads); ++i) {
    PyObject* const version = version_with(versions, PyTuple_GET_ITEM(reads, i));
    if (version == nullptr || !is_there(version)) return false;
  }
  std::vector<PyObject*> clones;
  for (const auto& tensor : step.clones) clones.push_back(version_with(versions, tensor.ptr()));
  const auto survives = [&](PyObject* version) { return std::find(clones.begin(), clones.end(), version) != clones.end(); };
  if (!rerun(call, versions, survives)) return false;
  PyList_Append(backward.ran.ptr(), call_slots.op.get(call));
  return true;
}

}  // namespace

std::unique_ptr<Actions> actions_of(py::handle events, py::handle segments, py::handle last_fetch) {
  auto made = std::make_unique<Actions>();
  made->last_fetch = py::reinterpret_borrow<py::object>(last_fetch);
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
      made->segments.back().steps.push_back({kind, parts[1], tensors_of(parts[2]), tensors_of(parts[3])});
    }
  }
  return made;
}

py::object request(const Backward& backward, py::handle engine, py::handle handle) {
  PyObject* const h = handle.ptr();
  if (!is_as_planned(backward)) return py::none();
  const int64_t times = number(handle_slots.times, h);
  const auto* const event = take(backward, true, number(handle_slots.save, h), times);
  if (event == nullptr) return py::none();
  PyObject* const cursor = backward.cursor.ptr();
  if (event->segment >= 0 && backward.actions.segments[event->segment].point > number(cursor_slots.point, cursor)) {
    set_number(cursor_slots.point, cursor, backward.actions.segments[event->segment].point);
    engine.attr("perform_natively")(event->segment);
  }
  set_number(handle_slots.times, h, times + 1);
  py::object value = in_memory(backward, h);
  if (value.is_none()) value = engine.attr("given")(handle);
  free(backward, engine, *event);
  return value;
}

bool released(const Backward& backward, py::handle engine, py::handle handle) {
  PyObject* const h = handle.ptr();
  PyObject* const version = handle_slots.version.get(h);
  PyObject* const holding = version_slots.holding.get(version);
  if (!is_as_planned(backward) || is_parked(holding)) return false;
  const auto* const event = take(backward, false, number(handle_slots.save, h), 0);
  if (event == nullptr) return false;
  free(backward, engine, *event);
  if (number(holding_slots.handles, holding) == 0) let_go(backward, engine, version, "let_go");
  return true;
}

void perform(const Backward& backward, py::handle engine, size_t segment) {
  PyObject* const versions = backward.versions.ptr();
  const auto& planned = backward.actions.segments.at(segment);
  for (const auto& tensor : planned.births)
    if (version_with(versions, tensor.ptr()) != nullptr) PySet_Add(backward.active.ptr(), tensor.ptr());
  for (const auto& step : planned.steps) {
    if (step.kind == Actions::Step::kFetch) {
      engine.attr("fetch")(step.subject);
    } else if (step.kind == Actions::Step::kRebuild) {
      if (!runs_again(backward, step)) engine.attr("run_again")(step.subject, step.clones, true);
    } else if (PyObject* const version = version_with(versions, step.subject.ptr())) {
      let_go(backward, engine, version, "free");
    }
  }
}

}  // namespace memopt
