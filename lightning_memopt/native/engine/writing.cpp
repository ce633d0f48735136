#include "writing.h"

#include "making.h"
#include "objects.h"
#include "tensors.h"
#include "values.h"

namespace memopt {
namespace {

namespace py = pybind11;

// The version that `t` is on; null if it is parked or from outside, or if there is none.
PyObject* version_at(const Forward& forward, const at::Tensor& t) {
  PyObject* const version = at_address(forward, t);
  if (version == nullptr || version_slots.origin.get(version) == constants.external) return nullptr;
  return is_parked(version_slots.holding.get(version)) ? nullptr : version;
}

// Notes that the counter of a version must be read from `t` later, because autograd moves it after the op.
void note_unread(const Forward& forward, PyObject* version, const at::Tensor& t) {
  const auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(wrapped(t).ptr(), nullptr));
  const auto entry = py::reinterpret_steal<py::object>(PyTuple_Pack(2, version, reference.ptr()));
  if (!entry || PyList_Append(forward.unread.ptr(), entry.ptr()) < 0) throw py::error_already_set();
}

// Autograd may read the new bytes through saves of the old ones, if the counter of the tensor that it saved does not move
// (`Holdings.overwritten`, `PlannedHoldings.overwritten`).
void claim(PyObject* old, PyObject* before, PyObject* after, const at::Tensor& t, bool reachable) {
  const bool has_handles = PyLong_AsLongLong(holding_slots.handles.get(before)) > 0;
  PyObject* const earlier = holding_slots.claim.get(before);
  const bool is_pinned = earlier == constants.pinned_claim;
  if (has_handles || earlier != constants.no_claim) holding_slots.claim.set(after, Py_NewRef(constants.possible_claim));
  if (reachable || !(has_handles || is_pinned)) return;
  hold(after, t);
  holding_slots.claim.set(after, Py_NewRef(constants.pinned_claim));
  if (version_slots.read.get(old) == Py_True) return;
  drop(before);
  if (is_pinned) holding_slots.claim.set(before, Py_NewRef(constants.possible_claim));
}

}  // namespace

bool overwrites(const Forward& forward, const at::Tensor& t) {
  PyObject* const version = PyDict_GET_SIZE(forward.beneath.ptr()) > 0 ? nullptr : version_at(forward, t);
  if (version == nullptr) return false;
  PyObject* const holding = version_slots.holding.get(version);
  const bool held = holding_slots.value.get(holding) != Py_None;
  if (!is_rebuildable(version)) return !held || version_slots.read.get(version) != Py_True;  // else its bytes are copied
  if (held && !can_make_from_memory(forward.versions.ptr(), version)) return false;
  drop(holding);
  return true;
}

py::object overwritten(
    const Forward& forward, const at::Tensor& t, const py::object& call, bool startable, const py::object& tensor) {
  PyObject* const old = version_at(forward, t);
  if (old == nullptr) return {};
  PyObject* const before = version_slots.holding.get(old);
  const bool runs_again = !call.is_none(), reachable = runs_again && startable;
  const py::object why = runs_again ? py::str() : py::reinterpret_borrow<py::object>(constants.overwritten);
  const py::object made = version_of(t, {tensor, 0, call, constants.recorded, why, reachable}, forward.weak);
  PyObject *const version = made.ptr(), *const after = version_slots.holding.get(version);
  const bool shared = PyLong_AsLongLong(version_slots.counter.get(old)) != constants.unshared;
  version_slots.counter.set(version, PyLong_FromLongLong(shared ? constants.unknown : constants.unshared));
  version_slots.counter_in_op.set(version, PyLong_FromLong(t._version()));
  if (!runs_again) {
    version_slots.exposed.set(version, Py_NewRef(version_slots.exposed.get(old)));
    version_slots.parameter.set(version, Py_NewRef(version_slots.parameter.get(old)));
  }
  version_slots.next.set(old, Py_NewRef(tensor.ptr()));
  claim(old, before, after, t, reachable);
  add(forward, t, made);
  note_unread(forward, version, t);
  return made;
}

}  // namespace memopt
