#include "making.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "guards.h"
#include "objects.h"
#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

PyObject* make(PyObject* type) {
  auto* const kind = reinterpret_cast<PyTypeObject*>(type);
  PyObject* const made = PyObject_GC_New(PyObject, kind);  // not known to the garbage collector
  if (made == nullptr) throw py::error_already_set();
  std::memset(made + 1, 0, kind->tp_basicsize - sizeof(PyObject));
  return made;
}

PyObject* none() { return Py_NewRef(Py_None); }
PyObject* boolean(bool value) { return Py_NewRef(value ? Py_True : Py_False); }
PyObject* ref(py::handle object) { return Py_NewRef(object.ptr()); }

PyObject* tuple_of(c10::IntArrayRef numbers) {
  PyObject* const made = PyTuple_New(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) PyTuple_SET_ITEM(made, i, PyLong_FromLongLong(numbers[i]));
  return hidden(made);
}

PyObject* holding_of(py::handle tensor, bool reachable) {
  PyObject* const made = make(holding_slots.type);
  holding_slots.value.set(made, none());
  holding_slots.expected.set(made, PyLong_FromLongLong(constants.unknown));
  holding_slots.stream.set(made, none());
  holding_slots.parked.set(made, none());
  holding_slots.reachable.set(made, boolean(reachable));
  holding_slots.handles.set(made, PyLong_FromLong(0));
  holding_slots.claim.set(made, Py_NewRef(constants.no_claim));
  holding_slots.tensor.set(made, ref(tensor));
  return made;
}

}  // namespace

PyObject* hidden(PyObject* object) {
  if (PyObject_GC_IsTracked(object)) PyObject_GC_UnTrack(object);
  return object;
}

PyObject* view_of(const Window& window, PyObject* version, bool conj, bool neg) {
  PyObject* const made = make(view_slots.type);
  view_slots.version.set(made, Py_NewRef(version));
  view_slots.size.set(made, tuple_of(window.size));
  view_slots.stride.set(made, tuple_of(window.stride));
  view_slots.offset.set(made, PyLong_FromLongLong(window.offset));
  view_slots.dtype.set(made, Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(window.dtype.toScalarType()))));
  view_slots.conj.set(made, boolean(conj));
  view_slots.neg.set(made, boolean(neg));
  return made;
}

py::object version_of(const at::Tensor& t, const NewVersion& as, const py::list& weak) {
  auto made = py::reinterpret_steal<py::object>(make(version_slots.type));
  PyObject* const v = made.ptr();
  const c10::Storage& storage = t.storage();
  const auto reference = py::reinterpret_steal<py::object>(
      PyLong_FromVoidPtr(c10::raw::intrusive_ptr::make_weak(storage.unsafeGetStorageImpl())));
  PyList_Append(weak.ptr(), reference.ptr());
  version_slots.id.set(v, ref(as.tensor));
  version_slots.nbytes.set(v, PyLong_FromSize_t(storage.nbytes()));
  version_slots.device.set(v, wrapped(t.device()).release().ptr());
  version_slots.weak.set(v, ref(reference));
  version_slots.origin.set(v, ref(as.origin));
  version_slots.call.set(v, ref(as.call));
  version_slots.index.set(v, PyLong_FromSize_t(as.index));
  version_slots.counter.set(v, PyLong_FromLong(t._version()));
  version_slots.counter_in_op.set(v, none());
  version_slots.next.set(v, none());
  version_slots.parameter.set(v, boolean(false));
  version_slots.exposed.set(v, boolean(false));
  version_slots.read.set(v, boolean(false));
  version_slots.why.set(v, ref(as.why));
  version_slots.holding.set(v, holding_of(as.tensor, as.reachable));
  return made;
}

void hold(PyObject* holding, const at::Tensor& t) {
  holding_slots.value.set(holding, wrapped(alias_of(t)).release().ptr());
  holding_slots.expected.set(holding, PyLong_FromLongLong(constants.unknown));
  holding_slots.stream.set(holding, none());
}

bool is_current(PyObject* version, const at::Tensor& t) {
  const int64_t counter = PyLong_AsLongLong(version_slots.counter.get(version)), now = t._version();
  if (counter == now || counter == constants.unshared) return true;
  PyObject* const in_op = version_slots.counter_in_op.get(version);
  if (counter != constants.unknown || (in_op != Py_None && now > PyLong_AsLongLong(in_op) + 1)) return false;
  PyObject* const holding = version_slots.holding.get(version);
  version_slots.counter.set(version, PyLong_FromLongLong(now));
  if (holding_slots.value.get(holding) != Py_None) hold(holding, t);  // with the counter that was read
  return true;
}

py::object kept(const at::Tensor& t, const py::object& about) {
  PyObject* const made = make(kept_slots.type);
  const bool is_own = t.requires_grad() && !t.is_leaf() && is_plain(t);
  kept_slots.about.set(made, hidden(ref(about)));
  kept_slots.t.set(made, is_own ? hidden(wrapped(alias_of(t)).release().ptr()) : wrapped(t).release().ptr());
  kept_slots.counter.set(made, PyLong_FromLongLong(t.is_inference() ? constants.unknown : t._version()));
  return py::reinterpret_steal<py::object>(made);
}

py::object handle(const at::Tensor& t, py::handle engine, int64_t save, PyObject* version) {
  PyObject* const made = make(handle_slots.type);
  PyObject* const holding = version_slots.holding.get(version);
  const int64_t handles = PyLong_AsLongLong(holding_slots.handles.get(holding));
  handle_slots.save.set(made, PyLong_FromLongLong(save));
  handle_slots.version.set(made, Py_NewRef(version));
  handle_slots.guard.set(made, guard_of(t).release().ptr());
  handle_slots.counter.set(made, PyLong_FromLong(t._version()));
  handle_slots.times.set(made, PyLong_FromLong(0));
  holding_slots.handles.set(holding, PyLong_FromLongLong(handles + 1));
  handle_slots.engine.set(made, ref(engine));
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace memopt
