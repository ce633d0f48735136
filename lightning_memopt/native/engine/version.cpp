#include "version.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>
#include <vector>

#include "call.h"
#include "objects.h"
#include "tensors.h"
#include "versions.h"

namespace memopt {

PyObject *in_order, *current_stream;

namespace {

namespace py = pybind11;

PyObject* get_holding(PyObject* self, void*) { return Py_NewRef(self); }

PyObject* get_device(PyObject* self, void*) { return wrapped(value_of<Version>(self).device).release().ptr(); }

// The storage's address, which is also torch's weak reference to it.
PyObject* get_weak(PyObject* self, void*) {
  return PyLong_FromVoidPtr(value_of<Version>(self).storage._unsafe_get_target());
}

PyObject* get_value(PyObject* self, void*) {
  const at::Tensor& value = value_of<Version>(self).value;
  return value.defined() ? wrapped(value).release().ptr() : Py_NewRef(Py_None);
}

int set_value(PyObject* self, PyObject* value, void*) {
  if (value == Py_None) {
    value_of<Version>(self).drop();
  } else if (value != nullptr && THPVariable_Check(value)) {
    value_of<Version>(self).value = THPVariable_Unpack(value);
  } else {
    PyErr_SetString(PyExc_TypeError, "a value is a tensor or None");
    return -1;
  }
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
#define FIELD(type, name, flags) MEMOPT_FIELD(Version, type, name, flags)
  static PyMemberDef fields[] = {
      FIELD(T_LONGLONG, id, READONLY), FIELD(T_OBJECT, call, 0), FIELD(T_OBJECT, origin, 0), FIELD(T_OBJECT, why, 0),
      FIELD(T_OBJECT, claim, 0), FIELD(T_OBJECT, stream, 0), FIELD(T_OBJECT, parked, 0), FIELD(T_LONGLONG, nbytes, 0),
      FIELD(T_LONGLONG, index, 0), FIELD(T_LONGLONG, counter, 0), FIELD(T_LONGLONG, expected, 0), FIELD(T_LONGLONG, handles, 0),
      FIELD(T_BOOL, reachable, 0), FIELD(T_BOOL, parameter, 0), FIELD(T_BOOL, exposed, 0), FIELD(T_BOOL, read, 0), kLastField,
  };
#undef FIELD
  static PyGetSetDef computed[] = {
      {"holding", get_holding, nullptr, nullptr, nullptr},
      {"device", get_device, nullptr, nullptr, nullptr},
      {"weak", get_weak, nullptr, nullptr, nullptr},
      {"value", get_value, set_value, nullptr, nullptr},
      MEMOPT_NUMBER(Version, tensor),
      MEMOPT_NUMBER(Version, next),
      MEMOPT_NUMBER(Version, counter_in_op),
      kLastComputed,
  };
  return add_type<Version>(module, "StorageVersion", {{Py_tp_members, fields}, {Py_tp_getset, computed}});
}

py::object new_version(const at::Tensor& t, const NewVersion& as) {
  const c10::Storage& storage = t.storage();
  const auto ref = [](py::handle object) { return py::reinterpret_borrow<py::object>(object); };
  return make<Version>(
      as.id, ref(as.call), ref(as.origin), ref(as.why), ref(constants.no_claim), py::none(), py::none(), at::Tensor(), as.tensor, kNone, kNone,
      static_cast<int64_t>(storage.nbytes()), static_cast<int64_t>(as.index), t._version(), constants.unknown, /*handles=*/int64_t{0},
      storage.getWeakStorageImpl(), storage.device(), as.reachable, /*parameter=*/false, /*exposed=*/false, /*read=*/false);
}

bool Version::is_external() const { return origin.ptr() == constants.external; }

bool Version::is_empty() const { return origin.ptr() == constants.empty; }

bool Version::is_intact() const { return expected == constants.unknown || value._version() <= expected; }

bool Version::has_ordinary_value() const { return is_ordinary(value) && !value.is_conj() && !value.is_neg(); }

bool Version::is_current(const at::Tensor& t) {
  const int64_t now = t._version();
  if (counter == now || counter == constants.unshared) return true;
  if (counter != constants.unknown || (counter_in_op != kNone && now > counter_in_op + 1)) return false;
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
  put(py::handle(object_of(*this)));
}

bool can_make_from_memory(const Versions& versions, Version& version) {
  std::vector<Version*> wanted{&version};
  std::unordered_set<Version*> seen{&version};
  while (!wanted.empty()) {
    const Version& made = *wanted.back();
    const Call* const call = value_in<Call>(made.call.ptr());
    wanted.pop_back();
    if (call == nullptr || !call->repeats || !(made.is_empty() || made.is_rebuildable())) return false;
    for (const int64_t id : numbers_in(call->reads)) {
      Version* const source = versions.at(id);
      if (source == nullptr) return false;
      if (!source->is_held() && seen.insert(source).second) wanted.push_back(source);
    }
  }
  return true;
}

}  // namespace memopt
