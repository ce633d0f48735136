#include "values.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>
#include <vector>

#include "objects.h"

namespace memopt {

PyObject *in_order, *current_stream;

namespace {

bool is_current_stream(PyObject* stream, c10::Device device) {
  if (!THPStream_Check(stream)) return false;
  const c10::Stream now = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto& seen = *reinterpret_cast<THPStream*>(stream);
  return seen.stream_id == now.id() && seen.device_index == now.device_index();
}

}  // namespace

PyObject* version_with(PyObject* versions, PyObject* id) {
  PyObject* const version = PyDict_GetItemWithError(versions, id);
  if (version == nullptr && PyErr_Occurred()) throw pybind11::error_already_set();
  return version;
}

const at::Tensor* value_of(PyObject* holding) {
  PyObject* const value = holding_slots.value.get(holding);
  if (value == nullptr || !THPVariable_CheckExact(value)) return nullptr;
  const at::Tensor& t = THPVariable_Unpack(value);
  const bool plain = t.has_storage() && t.layout() == at::kStrided && !t.is_conj() && !t.is_neg();
  return plain ? &t : nullptr;
}

bool is_rebuildable(PyObject* version) {
  PyObject* const holding = version_slots.holding.get(version);
  return version_slots.call.get(version) != Py_None && holding_slots.reachable.get(holding) == Py_True;
}

bool can_make_from_memory(PyObject* versions, PyObject* version) {
  std::vector<PyObject*> wanted{version};
  std::unordered_set<PyObject*> seen{version};
  while (!wanted.empty()) {
    PyObject* const made = wanted.back();
    PyObject* const call = version_slots.call.get(made);
    wanted.pop_back();
    const bool empty = version_slots.origin.get(made) == constants.empty;
    if (call == Py_None || call_slots.repeats.get(call) != Py_True || !(empty || is_rebuildable(made))) return false;
    PyObject* const reads = call_slots.reads.get(call);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(reads); ++i) {
      PyObject* const source = version_with(versions, PyTuple_GET_ITEM(reads, i));
      if (source == nullptr) return false;
      const bool held = holding_slots.value.get(version_slots.holding.get(source)) != Py_None;
      if (!held && seen.insert(source).second) wanted.push_back(source);
    }
  }
  return true;
}

bool is_parked(PyObject* holding) { return holding_slots.parked.get(holding) != Py_None; }

bool is_intact(PyObject* holding, const at::Tensor& value) {
  const int64_t expected = PyLong_AsLongLong(holding_slots.expected.get(holding));
  return expected == constants.unknown || value._version() <= expected;
}

void drop(PyObject* holding) { holding_slots.value.set(holding, Py_NewRef(Py_None)); }

void put_in_order(PyObject* holding, const at::Tensor& value) {
  if (value.is_cpu() || is_current_stream(holding_slots.stream.get(holding), value.device())) return;
  const pybind11::handle put{in_order};
  put(pybind11::handle(holding));
}

}  // namespace memopt
