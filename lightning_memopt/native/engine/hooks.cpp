#include "hooks.h"

#include <ATen/FuncTorchTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "objects.h"
#include "packing.h"

namespace memopt {

PyObject* in_transform;

namespace {

namespace py = pybind11;

struct Hook {
  PyObject_HEAD
  PyObject* engine;  // a weak reference
};

// Whether a transform of `torch.func` is under way. A thread that never began one needs not ask.
bool is_in_transform() {
  const py::handle asked(in_transform);
  return at::functorch::functorchTLSAccessor() != nullptr && asked().cast<bool>();
}

// The object of a weak reference; none if it is gone.
py::object referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(reference, &object) < 0) throw py::error_already_set();
  return object == nullptr ? py::none() : py::reinterpret_steal<py::object>(object);
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(reference));
#endif
}

PyObject* make_hook(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* engine;
  if (!PyArg_ParseTuple(args, "O", &engine)) return nullptr;
  PyObject* const made = type->tp_alloc(type, 0);
  if (made != nullptr) reinterpret_cast<Hook*>(made)->engine = Py_NewRef(engine);
  return made;
}

void forget_hook(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<Hook*>(self)->engine);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* call_hook(PyObject* self, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* t;
  if (!PyArg_ParseTuple(args, "O", &t)) return nullptr;
  const py::object engine = referent(reinterpret_cast<Hook*>(self)->engine);
  if (engine.is_none()) return PyErr_Format(PyExc_AssertionError, "the forward, which holds the engine, is over");
  static PyObject* const name = PyUnicode_InternFromString("packing");
  const auto packing = py::reinterpret_steal<py::object>(PyObject_GetAttr(engine.ptr(), name));
  if (!packing) return nullptr;
  if (!packing.is_none() && THPVariable_Check(t) && !is_in_transform()) {
    const auto* known = static_cast<Packing*>(PyCapsule_GetPointer(packing.ptr(), nullptr));
    if (known == nullptr) return nullptr;
    py::object packed = pack(*known, engine, THPVariable_Unpack(t));
    if (!packed.is_none()) return packed.release().ptr();
  }
  return engine.attr("pack")(py::handle(t)).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyObject* pack_class() {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_hook)},
      {Py_tp_dealloc, reinterpret_cast<void*>(forget_hook)},
      {Py_tp_call, reinterpret_cast<void*>(call_hook)},
      {0, nullptr},
  };
  static PyType_Spec spec{"lightning_memopt.native.engine.Pack", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  const py::handle object(packed);
  if (Py_TYPE(packed) == reinterpret_cast<PyTypeObject*>(kept_slots.type)) {
    PyObject* const value = kept_slots.t.get(packed);
    const int64_t counter = PyLong_AsLongLong(kept_slots.counter.get(packed));
    const bool unchanged = counter == constants.unknown || THPVariable_Unpack(value)._version() == counter;
    return unchanged ? Py_NewRef(value) : object.attr("get")().release().ptr();
  }
  if (Py_TYPE(packed) != reinterpret_cast<PyTypeObject*>(handle_slots.type)) return object.attr("get")().release().ptr();
  const py::handle engine(handle_slots.engine.get(packed));
  return engine.attr("unpacked")(object).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace memopt
