#include "guards.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>
#include <utility>

#include "making.h"
#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

struct Shared {
  c10::VariableVersion counter;
  c10::DispatchKeySet keys;
  c10::Device device;
  Window window;

  bool has(c10::DispatchKey key) const { return keys.has(key); }
};

struct VersionGuard {
  PyObject_HEAD
  Shared shared;
};

PyTypeObject* guard_type = nullptr;

const Shared& shared_by(PyObject* guard) { return reinterpret_cast<VersionGuard*>(guard)->shared; }

void destroy(PyObject* self) {
  reinterpret_cast<VersionGuard*>(self)->shared.~Shared();
  guard_type->tp_free(self);
  Py_DECREF(guard_type);  // an object of a class that was made at run time has a reference to the class
}

PyObject* version(PyObject* self, void*) { return PyLong_FromUnsignedLong(shared_by(self).counter.current_version()); }

PyObject* tensor(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  using c10::StorageImpl;
  const Shared& shared = shared_by(self);
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, shared.device), /*allocator=*/nullptr, /*resizable=*/false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), shared.keys, shared.window.dtype);
  made.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  made.unsafeGetTensorImpl()->set_version_counter(shared.counter);
  return wrapped(made).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* view(PyObject* self, PyObject* version) {
  HANDLE_TH_ERRORS
  const Shared& shared = shared_by(self);
  return view_of(shared.window, version, shared.has(c10::DispatchKey::Conjugate), shared.has(c10::DispatchKey::Negative));
  END_HANDLE_TH_ERRORS
}

}  // namespace

bool add_guards(PyObject* module) {
  static PyGetSetDef fields[] = {{"_version", version, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef methods[] = {{"tensor", tensor, METH_NOARGS, nullptr}, {"view", view, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_getset, fields},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static PyType_Spec spec{
      "lightning_memopt.native.engine.VersionGuard", sizeof(VersionGuard), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "VersionGuard", type) != 0) return false;
  guard_type = reinterpret_cast<PyTypeObject*>(type);
  return true;
}

py::object guard_of(const at::Tensor& t) {
  PyObject* const made = guard_type->tp_alloc(guard_type, 0);
  if (made == nullptr) throw py::error_already_set();
  new (&reinterpret_cast<VersionGuard*>(made)->shared)
      Shared{t.unsafeGetTensorImpl()->version_counter(), t.key_set(), t.device(), window_on(t)};
  return py::reinterpret_steal<py::object>(made);
}

const Window* window_in(PyObject* guard) {
  if (Py_TYPE(guard) != guard_type) return nullptr;
  const Shared& shared = shared_by(guard);
  return shared.has(c10::DispatchKey::Conjugate) || shared.has(c10::DispatchKey::Negative) ? nullptr : &shared.window;
}

int64_t version_at(PyObject* guard) {
  return Py_TYPE(guard) == guard_type ? shared_by(guard).counter.current_version() : THPVariable_Unpack(guard)._version();
}

}  // namespace memopt
