#include "making.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

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

PyObject* boolean(bool value) { return Py_NewRef(value ? Py_True : Py_False); }
PyObject* ref(py::handle object) { return Py_NewRef(object.ptr()); }

PyObject* tuple_of(c10::IntArrayRef numbers) {
  PyObject* const made = PyTuple_New(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) PyTuple_SET_ITEM(made, i, PyLong_FromLongLong(numbers[i]));
  return hidden(made);
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

py::object kept(const at::Tensor& t, const py::object& about) {
  PyObject* const made = make(kept_slots.type);
  const bool is_own = t.requires_grad() && !t.is_leaf() && is_plain(t);
  kept_slots.about.set(made, hidden(ref(about)));
  kept_slots.t.set(made, is_own ? hidden(wrapped(alias_of(t)).release().ptr()) : wrapped(t).release().ptr());
  kept_slots.counter.set(made, PyLong_FromLongLong(t.is_inference() ? constants.unknown : t._version()));
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace memopt
