// The parts of the engine that are native, as a Python module (__init__.py builds and loads it).
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "interpreter.h"
#include "matching.h"
#include "objects.h"
#include "packing.h"
#include "prepared.h"
#include "rerun.h"

namespace memopt {
namespace {

template <typename T>
PyObject* capsule(std::unique_ptr<T> owned) {
  if (owned == nullptr) Py_RETURN_NONE;
  const auto forget = [](PyObject* self) { delete static_cast<T*>(PyCapsule_GetPointer(self, nullptr)); };
  return PyCapsule_New(owned.release(), nullptr, forget);
}

// know(objects, in_order, current_stream): the classes whose slots are read, constants, and two functions, see rerun.h.
PyObject* know_objects(PyObject*, PyObject* args) {
  PyObject* objects;
  if (!PyArg_ParseTuple(args, "O!OO", &PyDict_Type, &objects, &in_order, &current_stream)) return nullptr;
  Py_INCREF(in_order);
  Py_INCREF(current_stream);
  if (!know(objects)) return nullptr;
  Py_RETURN_NONE;
}

// prepare(name, overload, args, kwargs): an object for the slot `prepared` of a call; None if it must run in Python.
PyObject* prepare_call(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject *given, *named;
  if (!PyArg_ParseTuple(args, "ssOO!", &name, &overload, &given, &PyDict_Type, &named)) return nullptr;
  return capsule(std::unique_ptr<Prepared>(prepare(name, overload, given, named)));
  END_HANDLE_TH_ERRORS
}

// run(call, versions, survives): runs a prepared call again. Returns whether it has; if not, nothing has been done.
PyObject* run_call(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 3) return PyErr_Format(PyExc_TypeError, "run takes 3 arguments, got %zd", n);
  const int ran = rerun(args[0], args[1], args[2]);
  return ran < 0 ? nullptr : PyBool_FromLong(ran);
  END_HANDLE_TH_ERRORS
}

// template(template, args, kwargs): an object for the slot `native` of a template; None if its op must be matched in Python.
PyObject* make_template(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *python, *given, *named;
  if (!PyArg_ParseTuple(args, "OOO!", &python, &given, &PyDict_Type, &named)) return nullptr;
  return capsule(template_of(python, given, named));
  END_HANDLE_TH_ERRORS
}

// forward(of_storage, versions, weak, cursor, holds, unsaved, active, sized_by_data): an object for the slot `native` of a matcher.
PyObject* make_forward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const auto all = pybind11::reinterpret_borrow<pybind11::tuple>(args);
  if (all.size() != 8) return PyErr_Format(PyExc_TypeError, "forward takes 8 arguments, got %zd", all.size());
  return capsule(std::unique_ptr<Forward>(new Forward{all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7]}));
  END_HANDLE_TH_ERRORS
}

// packing(of_storage, cursor, names, tracked, parked, outdated, unkept, packs, packs_here, labels, stands, packed): for `pack`.
PyObject* make_packing(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const auto all = pybind11::reinterpret_borrow<pybind11::tuple>(args);
  if (all.size() != 12) return PyErr_Format(PyExc_TypeError, "packing takes 12 arguments, got %zd", all.size());
  return capsule(std::unique_ptr<Packing>(new Packing{
      all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7], all[8], all[9], all[10], all[11]}));
  END_HANDLE_TH_ERRORS
}

// pack(packing, engine, tensor): what autograd holds in place of the tensor; None if it must be packed in Python.
PyObject* pack_tensor(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 3 || !THPVariable_Check(args[2])) return PyErr_Format(PyExc_TypeError, "pack takes a packing, an engine and a tensor");
  const auto* packing = static_cast<Packing*>(PyCapsule_GetPointer(args[0], nullptr));
  return packing == nullptr ? nullptr : pack(*packing, args[1], THPVariable_Unpack(args[2])).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* begin(PyObject*, PyObject*) {
  begin_forward();
  Py_RETURN_NONE;
}

PyObject* end(PyObject*, PyObject*) {
  end_forward();
  Py_RETURN_NONE;
}

// counts(): how many ops of planned forwards were run natively, and how many in Python, so far.
PyObject* counts(PyObject*, PyObject*) { return Py_BuildValue("LL", native_ops, python_ops); }

PyMethodDef methods[] = {
    {"know", know_objects, METH_VARARGS, nullptr},
    {"prepare", prepare_call, METH_VARARGS, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_call)), METH_FASTCALL, nullptr},
    {"template", make_template, METH_VARARGS, nullptr},
    {"forward", make_forward, METH_VARARGS, nullptr},
    {"packing", make_packing, METH_VARARGS, nullptr},
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(pack_tensor)), METH_FASTCALL, nullptr},
    {"begin", begin, METH_NOARGS, nullptr},
    {"end", end, METH_NOARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module{PyModuleDef_HEAD_INIT, "engine", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace memopt

PyMODINIT_FUNC PyInit_engine() { return PyModule_Create(&memopt::module); }
