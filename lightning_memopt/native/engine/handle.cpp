#include "handle.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "backward.h"
#include "tensors.h"
#include "view.h"

namespace memopt {
namespace {

namespace py = pybind11;

void destroy_handle(PyObject* self) {
  if (PyObject_CallFinalizerFromDealloc(self) == 0) destroy<Handle>(self);  // else it lives on
}

PyObject* get_now(PyObject* self, void*) { return PyLong_FromLongLong(value_of<Handle>(self).now()); }

PyObject* get_view(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const Handle& handle = value_of<Handle>(self);
  Window window = handle.window;
  window.version = handle.version().id;
  return make<View>(std::move(window), handle.is_conj(), handle.is_neg()).release().ptr();
  END_HANDLE_TH_ERRORS
}

// A tensor without memory that shares the counter.
PyObject* counted(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  using c10::StorageImpl;
  const Handle& handle = value_of<Handle>(self);
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
      MEMOPT_FIELD(Handle, T_OBJECT, engine, READONLY),
      {"version", T_OBJECT, offsetof(Object<Handle>, value.of), READONLY, nullptr},
      MEMOPT_FIELD(Handle, T_LONGLONG, save, READONLY),
      MEMOPT_FIELD(Handle, T_LONGLONG, counter, READONLY),
      MEMOPT_FIELD(Handle, T_LONGLONG, times, 0),
      kLastField,
  };
  static PyGetSetDef computed[] = {
      {"now", get_now, nullptr, nullptr, nullptr},
      {"view", get_view, nullptr, nullptr, nullptr},
      kLastComputed,
  };
  static PyMethodDef methods[] = {{"counted", counted, METH_NOARGS, nullptr}, kLastMethod};
  return add_type<Handle>(
      module, "Handle",
      {{Py_tp_dealloc, reinterpret_cast<void*>(destroy_handle)},
       {Py_tp_finalize, reinterpret_cast<void*>(release)},
       {Py_tp_members, fields},
       {Py_tp_getset, computed},
       {Py_tp_methods, methods}});
}

py::object new_handle(const at::Tensor& t, py::handle engine, int64_t save, Version& version) {
  const auto ref = [](py::handle object) { return py::reinterpret_borrow<py::object>(object); };
  py::object made = make<Handle>(
      ref(engine), ref(object_of(version)), save, int64_t{t._version()}, /*times=*/int64_t{0}, t.unsafeGetTensorImpl()->version_counter(),
      t.key_set(), t.device(), window_on(t));
  ++version.handles;
  return made;
}

}  // namespace memopt
