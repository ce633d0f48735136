#include "handle.h"

#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <new>
#include <utility>

#include "backward.h"
#include "making.h"
#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

PyTypeObject* handle_type = nullptr;

Handle& handle_of(PyObject* self) { return reinterpret_cast<HandleObject*>(self)->handle; }

void destroy_handle(PyObject* self) {
  if (PyObject_CallFinalizerFromDealloc(self) < 0) return;  // it lives on
  handle_of(self).~Handle();
  handle_type->tp_free(self);
  Py_DECREF(handle_type);
}

PyObject* get_now(PyObject* self, void*) { return PyLong_FromLongLong(handle_of(self).now()); }

PyObject* get_view(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const Handle& handle = handle_of(self);
  return view_of(handle.window, handle.version().id.ptr(), handle.is_conj(), handle.is_neg());
  END_HANDLE_TH_ERRORS
}

// A tensor without memory that shares the counter.
PyObject* counted(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  using c10::StorageImpl;
  const Handle& handle = handle_of(self);
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, handle.device), /*allocator=*/nullptr, /*resizable=*/false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), handle.keys, handle.window.dtype);
  made.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  made.unsafeGetTensorImpl()->set_version_counter(handle.shared);
  return wrapped(made).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

bool add_handle(PyObject* module) {
  static PyMemberDef fields[] = {
      {"engine", T_OBJECT, offsetof(HandleObject, handle.engine), READONLY, nullptr},
      {"version", T_OBJECT, offsetof(HandleObject, handle.of), READONLY, nullptr},
      {"save", T_LONGLONG, offsetof(HandleObject, handle.save), READONLY, nullptr},
      {"counter", T_LONGLONG, offsetof(HandleObject, handle.counter), READONLY, nullptr},
      {"times", T_LONGLONG, offsetof(HandleObject, handle.times), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"now", get_now, nullptr, nullptr, nullptr},
      {"view", get_view, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {{"counted", counted, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy_handle)},
      {Py_tp_finalize, reinterpret_cast<void*>(release)},
      {Py_tp_members, fields},
      {Py_tp_getset, computed},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static PyType_Spec spec{
      "lightning_memopt.native.engine.Handle", sizeof(HandleObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "Handle", type) != 0) return false;
  handle_type = reinterpret_cast<PyTypeObject*>(type);
  return true;
}

Handle* handle_in(PyObject* object) { return Py_TYPE(object) == handle_type ? &handle_of(object) : nullptr; }

py::object new_handle(const at::Tensor& t, py::handle engine, int64_t save, Version& version) {
  HandleObject* const made = PyObject_New(HandleObject, handle_type);
  if (made == nullptr) throw py::error_already_set();
  new (&made->handle) Handle{
      py::reinterpret_borrow<py::object>(engine), py::reinterpret_borrow<py::object>(version.object()), save, t._version(),
      /*times=*/0, t.unsafeGetTensorImpl()->version_counter(), t.key_set(), t.device(), window_on(t)};
  ++version.handles;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace memopt
