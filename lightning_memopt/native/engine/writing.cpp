#include "writing.h"

#include "making.h"
#include "objects.h"
#include "tensors.h"
#include "values.h"

namespace memopt {
namespace {

namespace py = pybind11;

// The version that `t` is on; null if it is parked, or from outside, or if there is none.
PyObject* version_at(const Forward& forward, const at::Tensor& t) {
  PyObject* const version = at_address(forward, t);
  if (version == nullptr || version_slots.origin.get(version) == constants.external) return nullptr;
  return is_parked(version_slots.holding.get(version)) ? nullptr : version;
}

// Notes that the counter of a version is to be read from `t`: autograd moves it after the op.
void note_unread(const Forward& forward, PyObject* version, const at::Tensor& t) {
  const auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(wrapped(t).ptr(), nullptr));
  const auto entry = py::reinterpret_steal<py::object>(PyTuple_Pack(2, version, reference.ptr()));
  if (!entry || PyList_Append(forward.unread.ptr(), entry.ptr()) < 0) throw py::error_already_set();
}

}  // namespace

bool overwrites(const Forward& forward, const at::Tensor& t) {
  PyObject* const version = PyDict_GET_SIZE(forward.beneath.ptr()) > 0 ? nullptr : version_at(forward, t);
  if (version == nullptr) return false;
  PyObject* const holding = version_slots.holding.get(version);
  const bool held = holding_slots.value.get(holding) != Py_None;
  if (!is_rebuildable(version)) return !held || version_slots.read.get(version) != Py_True;  // else its bytes are copied
  drop(holding);
  return true;
}

py::object overwritten(
    const Forward& forward, const at::Tensor& t, const py::object& call, bool startable, const py::object& tensor) {
  PyObject* const old = version_at(forward, t);
  if (old == nullptr || call.is_none()) return {};
  PyObject* const before = version_slots.holding.get(old);
  const bool has_handles = PyLong_AsLongLong(holding_slots.handles.get(before)) > 0;
  const bool is_claimed = holding_slots.claim.get(before) != constants.no_claim;
  if ((has_handles || is_claimed) && !startable) return {};  // autograd may read bytes that no call makes again
  const py::object no_reason = py::str();
  const py::object made = version_of(t, {tensor, 0, call, constants.recorded, no_reason, startable}, forward.weak);
  PyObject* const version = made.ptr();
  const bool shared = PyLong_AsLongLong(version_slots.counter.get(old)) != constants.unshared;
  version_slots.counter.set(version, PyLong_FromLongLong(shared ? constants.unknown : constants.unshared));
  version_slots.counter_in_op.set(version, PyLong_FromLong(t._version()));
  if (has_handles || is_claimed) holding_slots.claim.set(version_slots.holding.get(version), Py_NewRef(constants.possible_claim));
  version_slots.next.set(old, Py_NewRef(tensor.ptr()));
  add(forward, made);
  note_unread(forward, version, t);
  return made;
}

}  // namespace memopt
