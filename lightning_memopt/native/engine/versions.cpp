#include "versions.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace memopt {
namespace {

namespace py = pybind11;

PyObject* get_version(PyObject* self, PyObject* key) {
  HANDLE_TH_ERRORS
  const Version* const version = value_of<Versions>(self).at(number_in(key));
  return Py_NewRef(version == nullptr ? Py_None : object_of(*version));
  END_HANDLE_TH_ERRORS
}

PyObject* version_item(PyObject* self, PyObject* key) {
  HANDLE_TH_ERRORS
  const Version* const version = value_of<Versions>(self).at(number_in(key));
  if (version == nullptr) PyErr_SetObject(PyExc_KeyError, key);
  return version == nullptr ? nullptr : Py_NewRef(object_of(*version));
  END_HANDLE_TH_ERRORS
}

int set_version(PyObject* self, PyObject* key, PyObject* version) {
  try {
    if (version != nullptr) {
      expect<Version>(version);
      value_of<Versions>(self).put(number_in(key), py::reinterpret_borrow<py::object>(version));
    } else if (!value_of<Versions>(self).remove(number_in(key))) {
      PyErr_SetObject(PyExc_KeyError, key);
      return -1;
    }
    return 0;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::type_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
  return -1;
}

int has_version(PyObject* self, PyObject* key) {
  const int64_t number = PyLong_AsLongLong(key);
  return number == -1 && PyErr_Occurred() ? -1 : value_of<Versions>(self).at(number) != nullptr;
}

Py_ssize_t number_of_versions(PyObject* self) { return static_cast<Py_ssize_t>(value_of<Versions>(self).size()); }

PyObject* clear_versions(PyObject* self, PyObject*) {
  value_of<Versions>(self).clear();
  Py_RETURN_NONE;
}

PyObject* version_items(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  py::list list;
  for (const auto& [number, version] : value_of<Versions>(self).entries())
    if (version) list.append(py::make_tuple(number, version));
  return list.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* version_values(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  py::list list;
  for (const auto& [number, version] : value_of<Versions>(self).entries())
    if (version) list.append(version);
  return list.release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

void Versions::put(int64_t number, const py::object& version) {
  const size_t place = place_of(number);
  if (place != kNowhere) {
    const py::object before = std::exchange(entries_[place].second, version);  // freed last: that may run code
    return;
  }
  if (!is_near(number)) {
    far_.emplace(number, entries_.size());
  } else {
    const auto at = static_cast<size_t>(number);
    if (at >= near_.size()) near_.resize(std::max(at + 1, 2 * near_.size()), kNowhere);
    near_[at] = entries_.size();
  }
  entries_.emplace_back(number, version);
  ++size_;
}

bool Versions::remove(int64_t number) {
  const size_t place = place_of(number);
  if (place == kNowhere) return false;
  if (is_near(number)) {
    near_[number] = kNowhere;
  } else {
    far_.erase(number);
  }
  --size_;
  const py::object before = std::exchange(entries_[place].second, py::object());
  return true;
}

void Versions::clear() {
  near_.clear();
  far_.clear();
  size_ = 0;
  const Entries before = std::exchange(entries_, {});  // what is freed now may run code that asks for a version
}

bool add_versions(PyObject* module) {
  static PyMethodDef methods[] = {
      {"get", get_version, METH_O, nullptr},
      {"items", version_items, METH_NOARGS, nullptr},
      {"values", version_values, METH_NOARGS, nullptr},
      {"clear", clear_versions, METH_NOARGS, nullptr},
      kLastMethod,
  };
  return add_type<Versions>(
      module, "Versions",
      {{Py_tp_new, reinterpret_cast<void*>(make_empty<Versions>)},
       {Py_tp_methods, methods},
       {Py_mp_subscript, reinterpret_cast<void*>(version_item)},
       {Py_mp_ass_subscript, reinterpret_cast<void*>(set_version)},
       {Py_mp_length, reinterpret_cast<void*>(number_of_versions)},
       {Py_sq_contains, reinterpret_cast<void*>(has_version)}});
}

}  // namespace memopt
