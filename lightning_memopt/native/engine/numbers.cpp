#include "numbers.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>

namespace memopt {
namespace {

namespace py = pybind11;

PyObject* add_number(PyObject* self, PyObject* number) {
  HANDLE_TH_ERRORS
  value_of<Numbers>(self).add(number_in(number));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* discard_number(PyObject* self, PyObject* number) {
  HANDLE_TH_ERRORS
  value_of<Numbers>(self).discard(number_in(number));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* update_numbers(PyObject* self, PyObject* numbers) {
  HANDLE_TH_ERRORS
  for (const py::handle number : py::handle(numbers)) value_of<Numbers>(self).add(number_in(number.ptr()));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* is_disjoint(PyObject* self, PyObject* numbers) {
  HANDLE_TH_ERRORS
  for (const py::handle number : py::handle(numbers))
    if (value_of<Numbers>(self).has(number_in(number.ptr()))) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* iterate(PyObject* self) {
  HANDLE_TH_ERRORS
  py::list members;
  for (int64_t number = -1; number < value_of<Numbers>(self).end(); ++number)
    if (value_of<Numbers>(self).has(number)) members.append(number);
  return PyObject_GetIter(members.ptr());
  END_HANDLE_TH_ERRORS
}

Py_ssize_t number_of_numbers(PyObject* self) { return static_cast<Py_ssize_t>(value_of<Numbers>(self).size()); }

// None is no member, as in a set.
int has_number(PyObject* self, PyObject* number) {
  if (number == Py_None) return 0;
  const int64_t asked = PyLong_AsLongLong(number);
  return asked == -1 && PyErr_Occurred() ? -1 : value_of<Numbers>(self).has(asked);
}

}  // namespace

void Numbers::add(int64_t number) {
  constexpr int64_t kMost = int64_t{1} << 31;
  TORCH_CHECK_VALUE(number >= -1 && number < kMost, "a member of Numbers is from -1 on, and below 2^31: ", number);
  const auto place = static_cast<size_t>(number + 1);
  if (place >= members_.size()) members_.resize(std::max(place + 1, 2 * members_.size()));
  size_ += !members_[place];
  members_[place] = true;
}

void Numbers::discard(int64_t number) {
  if (!has(number)) return;
  members_[number + 1] = false;
  --size_;
}

bool add_numbers(PyObject* module) {
  static PyMethodDef methods[] = {
      {"add", add_number, METH_O, nullptr},
      {"discard", discard_number, METH_O, nullptr},
      {"update", update_numbers, METH_O, nullptr},
      {"isdisjoint", is_disjoint, METH_O, nullptr},
      kLastMethod,
  };
  return add_type<Numbers>(
      module, "Numbers",
      {{Py_tp_new, reinterpret_cast<void*>(make_empty<Numbers>)},
       {Py_tp_methods, methods},
       {Py_tp_iter, reinterpret_cast<void*>(iterate)},
       {Py_mp_length, reinterpret_cast<void*>(number_of_numbers)},
       {Py_sq_contains, reinterpret_cast<void*>(has_number)}});
}

}  // namespace memopt
