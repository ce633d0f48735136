#include "view.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memopt {
namespace {

namespace py = pybind11;

// View(version, t)
PyObject* new_view(PyTypeObject*, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  long long version;
  PyObject* t;
  if (!PyArg_ParseTuple(args, "LO!", &version, THPVariableClass, &t)) return nullptr;
  return view_of(THPVariable_Unpack(t), version).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* tuple_of(c10::IntArrayRef numbers) {
  PyObject* const made = PyTuple_New(numbers.size());
  for (size_t i = 0; made != nullptr && i < numbers.size(); ++i) PyTuple_SET_ITEM(made, i, PyLong_FromLongLong(numbers[i]));
  return made;
}

PyObject* get_size(PyObject* self, void*) { return tuple_of(value_of<View>(self).window.size); }
PyObject* get_stride(PyObject* self, void*) { return tuple_of(value_of<View>(self).window.stride); }
PyObject* get_dtype(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(value_of<View>(self).window.dtype.toScalarType())));
}

// named(version): the same window, on another version.
PyObject* named(PyObject* self, PyObject* version) {
  HANDLE_TH_ERRORS
  View other = value_of<View>(self);
  other.window.version = py::handle(version).cast<int64_t>();
  return make<View>(std::move(other)).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

bool add_view(PyObject* module) {
  static PyMemberDef fields[] = {
      {"version", T_LONGLONG, offsetof(Object<View>, value.window.version), READONLY, nullptr},
      {"offset", T_LONGLONG, offsetof(Object<View>, value.window.offset), READONLY, nullptr},
      MEMOPT_FIELD(View, T_BOOL, conj, READONLY),
      MEMOPT_FIELD(View, T_BOOL, neg, READONLY),
      kLastField,
  };
  static PyGetSetDef computed[] = {
      {"size", get_size, nullptr, nullptr, nullptr},
      {"stride", get_stride, nullptr, nullptr, nullptr},
      {"dtype", get_dtype, nullptr, nullptr, nullptr},
      kLastComputed,
  };
  static PyMethodDef methods[] = {{"named", named, METH_O, nullptr}, kLastMethod};
  return add_type<View>(
      module, "View",
      {{Py_tp_new, reinterpret_cast<void*>(new_view)}, {Py_tp_members, fields}, {Py_tp_getset, computed}, {Py_tp_methods, methods}});
}

py::object view_of(const at::Tensor& t, int64_t version) {
  Window window = window_on(t);
  window.version = version;
  return make<View>(std::move(window), t.is_conj(), t.is_neg());
}

}  // namespace memopt
