#include "recording.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_map>
#include <vector>

#include "handle.h"
#include "objects.h"
#include "tensors.h"
#include "versions.h"
#include "view.h"

namespace memopt {
namespace {

namespace py = pybind11;

// The object, hidden from the garbage collector, which would take longer to visit thousands of objects a step than it takes to make
// them.
PyObject* hidden(PyObject* object) {
  if (PyObject_GC_IsTracked(object)) PyObject_GC_UnTrack(object);
  return object;
}

// The arguments of one op.
struct Arguments {
  const Versions& of_storage;
  PyObject* reads;
  bool capturing;

  // The version that `t` is on (`Recorder.version_of`); null if Python must find it. Borrowed.
  Version* version_read(const at::Tensor& t) const {
    if (!is_plain(t)) return nullptr;
    Version* const version = of_storage.at(t);
    if (version == nullptr) return nullptr;
    if (capturing && version->is_external() && !version->is_held()) version->hold(t);
    return version->is_current(t) || !capturing ? version : nullptr;
  }

  // Puts a new reference into `to`. False: Python must do this.
  bool capture(PyObject* value, PyObject** to) const {
    *to = nullptr;
    if (THPVariable_Check(value)) {
      const at::Tensor& t = THPVariable_Unpack(value);
      Version* const version = version_read(t);
      if (version == nullptr) return false;
      if (PyList_Append(reads, object_of(*version)) < 0) throw py::error_already_set();
      if (capturing) *to = view_of(t, version->id).release().ptr();
      return true;
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
      auto list = py::reinterpret_steal<py::object>(capturing ? PyList_New(size) : Py_NewRef(Py_None));
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* each;
        if (!capture(PySequence_Fast_GET_ITEM(value, i), &each)) return false;
        if (capturing) PyList_SET_ITEM(list.ptr(), i, each);
      }
      if (capturing) *to = hidden(list.release().ptr());
      return true;
    }
    if (capturing) *to = Py_NewRef(value);
    return true;
  }
};

const at::Tensor& tensor(PyObject* object) {
  if (!THPVariable_Check(object)) throw py::type_error("no tensor");
  return THPVariable_Unpack(object);
}

// Appends the fresh tensors of a result to `to`, with positions from `*position` on (`tensors_in` in record/tensors.py).
void add_fresh(PyObject* result, const Versions& of_storage, Py_ssize_t* position, PyObject* to) {
  if (THPVariable_Check(result)) {
    const at::Tensor& t = THPVariable_Unpack(result);
    const Py_ssize_t at = (*position)++;
    if (!is_plain(t)) return;
    if (of_storage.at(t) != nullptr) return;
    const auto entry = py::reinterpret_steal<py::object>(Py_BuildValue("nO", at, result));
    if (!entry || PyList_Append(to, entry.ptr()) < 0) throw py::error_already_set();
  } else if (PyList_Check(result) || PyTuple_Check(result)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); ++i)
      add_fresh(PySequence_Fast_GET_ITEM(result, i), of_storage, position, to);
  }
}

// A field of a Python class that has `__slots__`. It is written directly, which takes a few nanoseconds.
class Slot {
 public:
  // Returns whether the class has it; if not, with an exception.
  bool find(PyObject* type, const char* name);
  // Takes the reference to `value`.
  void set(PyObject* object, PyObject* value) const {
    PyObject* const before = *at(object);
    *at(object) = value;
    Py_XDECREF(before);
  }

 private:
  PyObject** at(PyObject* object) const { return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_); }
  Py_ssize_t offset_ = 0;
};

bool Slot::find(PyObject* type, const char* name) {
  PyObject* const descriptor = PyObject_GetAttrString(type, name);
  if (descriptor == nullptr) return false;
  const PyMemberDef* const member =
      Py_TYPE(descriptor) == &PyMemberDescr_Type ? reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member : nullptr;
  const bool is_slot = member != nullptr && member->type == T_OBJECT_EX;
  if (is_slot) offset_ = member->offset;
  Py_DECREF(descriptor);  // its class keeps it alive
  if (!is_slot) PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
  return is_slot;
}

// The slots of a dataclass, in the order of its fields.
const std::vector<Slot>& slots_of(PyObject* type) {
  static auto& known = *new std::unordered_map<PyObject*, std::vector<Slot>>;
  auto at = known.find(type);
  if (at != known.end()) return at->second;
  std::vector<Slot> slots;
  for (const py::handle name : py::handle(type).attr("__dataclass_fields__")) {
    Slot slot;
    if (!slot.find(type, name.cast<std::string>().c_str())) throw py::error_already_set();
    slots.push_back(slot);
  }
  return known.emplace(Py_NewRef(type), std::move(slots)).first->second;
}

}  // namespace

PyObject* fresh(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  const Versions* const of_storage = n == 2 ? value_in<Versions>(args[1]) : nullptr;
  if (of_storage == nullptr) throw py::type_error("fresh(result, Versions)");
  auto made = py::reinterpret_steal<py::object>(PyList_New(0));
  Py_ssize_t position = 0;
  add_fresh(args[0], *of_storage, &position, made.ptr());
  return made.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* row(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  const auto& slots = slots_of(args[0]);
  if (static_cast<size_t>(n - 1) != slots.size()) throw py::type_error("row: a value for each field");
  auto* const type = reinterpret_cast<PyTypeObject*>(args[0]);
  PyObject* const made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  for (size_t i = 0; i < slots.size(); ++i) slots[i].set(made, Py_NewRef(args[i + 1]));
  return hidden(made);
  END_HANDLE_TH_ERRORS
}

PyObject* captured(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  const Versions* const of_storage = n == 4 ? value_in<Versions>(args[1]) : nullptr;
  if (of_storage == nullptr || !PyTuple_CheckExact(args[0]) || !PyList_CheckExact(args[3]))
    throw py::type_error("captured(tuple, Versions, bool, list)");
  const Arguments arguments{*of_storage, args[3], args[2] == Py_True};
  const Py_ssize_t size = PyTuple_GET_SIZE(args[0]), before = PyList_GET_SIZE(args[3]);
  auto made = py::reinterpret_steal<py::object>(arguments.capturing ? PyTuple_New(size) : Py_NewRef(Py_True));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* each;
    if (!arguments.capture(PyTuple_GET_ITEM(args[0], i), &each)) {
      if (PyList_SetSlice(args[3], before, PyList_GET_SIZE(args[3]), nullptr) < 0) return nullptr;
      Py_RETURN_NONE;
    }
    if (arguments.capturing) PyTuple_SET_ITEM(made.ptr(), i, each);
  }
  return arguments.capturing ? hidden(made.release().ptr()) : made.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* make_version(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 3) throw py::type_error("version(id, t, origin)");
  const NewVersion as{PyLong_AsLongLong(args[0]), kNone, 0, py::none(), args[2], py::str(), false};
  return new_version(tensor(args[1]), as).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* make_handle(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 4) throw py::type_error("handle(t, engine, save, version)");
  return new_handle(tensor(args[0]), args[1], PyLong_AsLongLong(args[2]), expect<Version>(args[3])).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* alias(PyObject*, PyObject* t) {
  HANDLE_TH_ERRORS
  return wrapped(alias_of(tensor(t))).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* untrack(PyObject*, PyObject* object) { return hidden(Py_NewRef(object)); }

PyObject* lonely(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 2 || !PyDict_CheckExact(args[0])) throw py::type_error("lonely(dict, count)");
  const size_t most = PyLong_AsSize_t(args[1]);
  PyObject* const ids = PyList_New(0);
  PyObject *id, *object;
  Py_ssize_t at = 0;
  while (PyDict_Next(args[0], &at, &id, &object)) {
    const Version& version = expect<Version>(object);
    if (version.is_held() && version.storage.use_count() <= most) PyList_Append(ids, id);
  }
  return ids;
  END_HANDLE_TH_ERRORS
}

PyObject* ungraded_nbytes(PyObject*, PyObject* parameters) {
  HANDLE_TH_ERRORS
  if (!PyList_CheckExact(parameters)) throw py::type_error("ungraded_nbytes(list)");
  int64_t sum = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); ++i) {
    PyObject* const pair = PyList_GET_ITEM(parameters, i);
    if (tensor(PyTuple_GET_ITEM(pair, 0)).unsafeGetTensorImpl()->grad().defined()) continue;
    const int64_t nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(pair, 1));
    if (nbytes == 0) Py_RETURN_NONE;  // a lazy parameter had no bytes when the forward began
    sum += nbytes;
  }
  return PyLong_FromLongLong(sum);
  END_HANDLE_TH_ERRORS
}

}  // namespace memopt
