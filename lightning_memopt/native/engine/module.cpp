// The parts of the engine that are native, as a Python module. lightning_memopt/native/engine_module.py builds and loads it.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <structmember.h>

#include "objects.h"
#include "prepared.h"
#include "rerun.h"

namespace memopt {

ViewSlots view_slots;
CallSlots call_slots;
VersionSlots version_slots;
HoldingSlots holding_slots;

bool Slot::find(PyObject* type, const char* name) {
  PyObject* const found = PyObject_GetAttrString(type, name);
  if (found == nullptr) return false;
  const PyMemberDef* const member =
      Py_TYPE(found) == &PyMemberDescr_Type ? reinterpret_cast<PyMemberDescrObject*>(found)->d_member : nullptr;
  if (member != nullptr) offset_ = member->offset;
  Py_DECREF(found);  // its type has it
  if (member == nullptr || member->type != T_OBJECT_EX) {
    PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
    return false;
  }
  return true;
}

namespace {

// know(View, Call, StorageVersion, Holding, in_order, current_stream): the classes whose slots are read.
PyObject* know(PyObject*, PyObject* args) {
  PyObject *view, *call, *version, *holding;
  if (!PyArg_ParseTuple(args, "OOOOOO", &view, &call, &version, &holding, &in_order, &current_stream)) return nullptr;
  auto& [type, of, size, stride, offset, dtype, conj, neg] = view_slots;
  type = view;
  const bool complete = of.find(view, "version") && size.find(view, "size") && stride.find(view, "stride") &&
      offset.find(view, "offset") && dtype.find(view, "dtype") && conj.find(view, "conj") && neg.find(view, "neg") &&
      call_slots.prepared.find(call, "prepared") && call_slots.reads.find(call, "reads") && call_slots.grad.find(call, "grad") &&
      call_slots.rng.find(call, "rng") && call_slots.made.find(call, "made") && call_slots.mutates.find(call, "mutates") &&
      version_slots.holding.find(version, "holding") && holding_slots.value.find(holding, "value") &&
      holding_slots.expected.find(holding, "expected") && holding_slots.stream.find(holding, "stream");
  if (!complete) return nullptr;
  for (PyObject* kept : {view, in_order, current_stream}) Py_INCREF(kept);  // as long as the process lives
  Py_RETURN_NONE;
}

void forget(PyObject* capsule) { delete static_cast<Prepared*>(PyCapsule_GetPointer(capsule, nullptr)); }

// prepare(name, overload, args, kwargs): an object for the slot `prepared` of a call; None if it must run in Python.
PyObject* prepare_call(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject *given, *named;
  if (!PyArg_ParseTuple(args, "ssOO!", &name, &overload, &given, &PyDict_Type, &named)) return nullptr;
  if (!PyList_Check(given) && !PyTuple_Check(given)) Py_RETURN_NONE;
  Prepared* const made = prepare(name, overload, given, named);
  if (made == nullptr) Py_RETURN_NONE;
  return PyCapsule_New(made, nullptr, &forget);
  END_HANDLE_TH_ERRORS
}

// run(call, versions, survives): runs a prepared call again. Returns whether it has; if not, nothing has been done.
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 3) return PyErr_Format(PyExc_TypeError, "run takes 3 arguments, got %zd", n);
  const int ran = rerun(args[0], args[1], args[2]);
  return ran < 0 ? nullptr : PyBool_FromLong(ran);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"know", know, METH_VARARGS, nullptr},
    {"prepare", prepare_call, METH_VARARGS, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module{PyModuleDef_HEAD_INIT, "engine", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace memopt

PyMODINIT_FUNC PyInit_engine() { return PyModule_Create(&memopt::module); }
