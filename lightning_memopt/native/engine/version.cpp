#include "version.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <new>
#include <unordered_set>
#include <vector>

#include "objects.h"
#include "tensors.h"

namespace memopt {

PyTypeObject* version_type = nullptr;
PyObject *in_order, *current_stream;

namespace {

namespace py = pybind11;

Version& version_of(PyObject* self) { return reinterpret_cast<VersionObject*>(self)->version; }

void destroy(PyObject* self) {
  version_of(self).~Version();
  version_type->tp_free(self);
  Py_DECREF(version_type);  // an object of a class that was made at run time has a reference to the class
}

PyObject* get_holding(PyObject* self, void*) { return Py_NewRef(self); }

PyObject* get_device(PyObject* self, void*) { return wrapped(version_of(self).device).release().ptr(); }

PyObject* get_value(PyObject* self, void*) {
  const at::Tensor& value = version_of(self).value;
  return value.defined() ? wrapped(value).release().ptr() : Py_NewRef(Py_None);
}

int set_value(PyObject* self, PyObject* value, void*) {
  if (value == Py_None) {
    version_of(self).drop();
  } else if (value != nullptr && THPVariable_Check(value)) {
    version_of(self).value = THPVariable_Unpack(value);
  } else {
    PyErr_SetString(PyExc_TypeError, "a value is a tensor or None");
    return -1;
  }
  return 0;
}

PyObject* get_counter_in_op(PyObject* self, void*) {
  const int64_t counter = version_of(self).counter_in_op;
  return counter == Version::kNever ? Py_NewRef(Py_None) : PyLong_FromLongLong(counter);
}

int set_counter_in_op(PyObject* self, PyObject* value, void*) {
  const int64_t counter = value == Py_None ? Version::kNever : PyLong_AsLongLong(value);
  if (PyErr_Occurred()) return -1;
  version_of(self).counter_in_op = counter;
  return 0;
}

bool is_current_stream(PyObject* stream, c10::Device device) {
  if (!THPStream_Check(stream)) return false;
  const c10::Stream now = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto& seen = *reinterpret_cast<THPStream*>(stream);
  return seen.stream_id == now.id() && seen.device_index == now.device_index();
}

}  // namespace

bool add_version(PyObject* module) {
#define FIELD(type, name, flags) {#name, type, offsetof(VersionObject, version.name), flags, nullptr}
  static PyMemberDef fields[] = {
      FIELD(T_OBJECT, id, READONLY), FIELD(T_OBJECT, call, 0), FIELD(T_OBJECT, origin, 0), FIELD(T_OBJECT, why, 0),
      FIELD(T_OBJECT, claim, 0), FIELD(T_OBJECT, tensor, 0), FIELD(T_OBJECT, next, 0), FIELD(T_OBJECT, stream, 0),
      FIELD(T_OBJECT, parked, 0), FIELD(T_LONGLONG, nbytes, 0), FIELD(T_LONGLONG, index, 0), FIELD(T_LONGLONG, counter, 0),
      FIELD(T_LONGLONG, expected, 0), FIELD(T_LONGLONG, handles, 0), FIELD(T_ULONGLONG, weak, READONLY),
      FIELD(T_BOOL, reachable, 0), FIELD(T_BOOL, parameter, 0), FIELD(T_BOOL, exposed, 0), FIELD(T_BOOL, read, 0),
      {nullptr, 0, 0, 0, nullptr},
  };
#undef FIELD
  static PyGetSetDef computed[] = {
      {"holding", get_holding, nullptr, nullptr, nullptr},
      {"device", get_device, nullptr, nullptr, nullptr},
      {"value", get_value, set_value, nullptr, nullptr},
      {"counter_in_op", get_counter_in_op, set_counter_in_op, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_members, fields},
      {Py_tp_getset, computed},
      {0, nullptr},
  };
  static PyType_Spec spec{
      "lightning_memopt.native.engine.StorageVersion", sizeof(VersionObject), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "StorageVersion", type) != 0) return false;
  version_type = reinterpret_cast<PyTypeObject*>(type);
  return true;
}

py::object new_version(const at::Tensor& t, const NewVersion& as, const py::list& weak) {
  const c10::Storage& storage = t.storage();
  const auto reference = py::reinterpret_steal<py::object>(
      PyLong_FromVoidPtr(c10::raw::intrusive_ptr::make_weak(storage.unsafeGetStorageImpl())));
  PyList_Append(weak.ptr(), reference.ptr());
  VersionObject* const made = PyObject_New(VersionObject, version_type);
  if (made == nullptr) throw py::error_already_set();
  const auto ref = [](py::handle object) { return py::reinterpret_steal<py::object>(Py_NewRef(object.ptr())); };
  new (&made->version) Version{
      ref(as.id), ref(as.call), ref(as.origin), ref(as.why), ref(constants.no_claim), ref(as.tensor), ref(Py_None), ref(Py_None), ref(Py_None), {},
      Version::kNever, static_cast<int64_t>(storage.nbytes()), static_cast<int64_t>(as.index), t._version(), constants.unknown,
      /*handles=*/0, reinterpret_cast<uintptr_t>(storage.unsafeGetStorageImpl()), storage.device(), as.reachable,
      /*parameter=*/false, /*exposed=*/false, /*read=*/false};
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

PyObject* Version::object() const {
  const auto* const bytes = reinterpret_cast<const char*>(this) - offsetof(VersionObject, version);
  return reinterpret_cast<PyObject*>(const_cast<char*>(bytes));
}

bool Version::is_external() const { return origin.ptr() == constants.external; }

bool Version::is_empty() const { return origin.ptr() == constants.empty; }

bool Version::is_intact() const { return expected == constants.unknown || value._version() <= expected; }

bool Version::has_ordinary_value() const { return is_ordinary(value) && !value.is_conj() && !value.is_neg(); }

bool Version::is_current(const at::Tensor& t) {
  const int64_t now = t._version();
  if (counter == now || counter == constants.unshared) return true;
  if (counter != constants.unknown || (counter_in_op != kNever && now > counter_in_op + 1)) return false;
  counter = now;
  if (is_held()) hold(t);  // with the counter that was read
  return true;
}

void Version::hold(const at::Tensor& t) {
  value = alias_of(t);
  expected = constants.unknown;
  stream = py::none();
}

void Version::rebuilt(const at::Tensor& t, const py::object& made_on) {
  value = t;
  expected = t._version();
  stream = made_on;
}

void Version::put_in_order() const {
  if (value.is_cpu() || is_current_stream(stream.ptr(), value.device())) return;
  const py::handle put{in_order};
  put(py::handle(object()));
}

Version* version_with(const py::handle& versions, py::handle id) {
  PyObject* const version = PyDict_GetItemWithError(versions.ptr(), id.ptr());
  if (version == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return version_in(version);
}

bool can_make_from_memory(const py::handle& versions, Version& version) {
  std::vector<Version*> wanted{&version};
  std::unordered_set<Version*> seen{&version};
  while (!wanted.empty()) {
    const Version& made = *wanted.back();
    PyObject* const call = made.call.ptr();
    wanted.pop_back();
    if (call == Py_None || call_slots.repeats.get(call) != Py_True || !(made.is_empty() || made.is_rebuildable())) return false;
    PyObject* const reads = call_slots.reads.get(call);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(reads); ++i) {
      Version* const source = version_with(versions, PyTuple_GET_ITEM(reads, i));
      if (source == nullptr) return false;
      if (!source->is_held() && seen.insert(source).second) wanted.push_back(source);
    }
  }
  return true;
}

}  // namespace memopt
