#include "call.h"

#include <torch/csrc/Exceptions.h>

namespace memopt {
namespace {

namespace py = pybind11;

// Call(op, func, args, kwargs, reads, grad)
PyObject* new_call(PyTypeObject*, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  long long op;
  PyObject *func, *given, *named, *reads;
  int grad;
  if (!PyArg_ParseTuple(args, "LOOO!O!p", &op, &func, &given, &PyDict_Type, &named, &PyTuple_Type, &reads, &grad)) return nullptr;
  const auto ref = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
  const py::object none = py::none(), empty = py::tuple();
  return make<Call>(op, ref(func), ref(given), ref(named), ref(reads), none, empty, empty, none, grad != 0, true).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

bool add_call(PyObject* module) {
#define FIELD(type, name) MEMOPT_FIELD(Call, type, name, 0)
  static PyMemberDef fields[] = {
      FIELD(T_LONGLONG, op), FIELD(T_OBJECT, func), FIELD(T_OBJECT, args), FIELD(T_OBJECT, kwargs), FIELD(T_OBJECT, reads),
      FIELD(T_OBJECT, rng), FIELD(T_OBJECT, made), FIELD(T_OBJECT, mutates), FIELD(T_OBJECT, prepared), FIELD(T_BOOL, grad),
      FIELD(T_BOOL, repeats), kLastField,
  };
#undef FIELD
  return add_type<Call>(module, "Call", {{Py_tp_new, reinterpret_cast<void*>(new_call)}, {Py_tp_members, fields}});
}

c10::SmallVector<int64_t, 4> numbers_in(const py::object& ids) {
  if (!PyTuple_Check(ids.ptr())) throw py::type_error("the ids of a call are a tuple");
  c10::SmallVector<int64_t, 4> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ids.ptr()); ++i) numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(ids.ptr(), i)));
  if (PyErr_Occurred()) throw py::error_already_set();
  return numbers;
}

c10::SmallVector<std::pair<int64_t, int64_t>, 2> pairs_in(const py::object& pairs) {
  if (!PyTuple_Check(pairs.ptr())) throw py::type_error("the pairs of a call are a tuple");
  c10::SmallVector<std::pair<int64_t, int64_t>, 2> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs.ptr()); ++i) {
    const auto pair = numbers_in(py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(pairs.ptr(), i)));
    numbers.emplace_back(pair.at(0), pair.at(1));
  }
  return numbers;
}

}  // namespace memopt
