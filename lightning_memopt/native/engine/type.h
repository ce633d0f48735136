// Classes of Python whose objects are a C++ value. No garbage collector knows them: no object of theirs is in a reference cycle.
#pragma once
#include <pybind11/pybind11.h>
#include <structmember.h>
#include <torch/csrc/python_headers.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace memopt {

// An optional number that Python sees as an int or None.
constexpr int64_t kNone = INT64_MIN;

// The number of an int. Throws if it is none, or does not fit.
inline int64_t number_in(PyObject* object) {
  const int64_t number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred()) throw pybind11::error_already_set();
  return number;
}

template <typename T>
struct Object {
  PyObject_HEAD
  T value;
};

template <typename T>
inline PyTypeObject* type_of = nullptr;

// The value of an object that is known to be of this class, or of one derived from it.
template <typename T>
T& value_of(PyObject* self) {
  return reinterpret_cast<Object<T>*>(self)->value;
}

// The value of an object; null if there is no object, or it is of another class.
template <typename T>
T* value_in(PyObject* object) {
  return object != nullptr && Py_TYPE(object) == type_of<T> ? &value_of<T>(object) : nullptr;
}

// As `value_in`. Throws if it is of another class.
template <typename T>
T& expect(PyObject* object) {
  if (T* const value = value_in<T>(object)) return *value;
  throw pybind11::type_error(std::string("expected a ") + type_of<T>->tp_name);
}

// The object with this value. Borrowed.
template <typename T>
PyObject* object_of(const T& value) {
  const auto* const bytes = reinterpret_cast<const char*>(&value) - offsetof(Object<T>, value);
  return reinterpret_cast<PyObject*>(const_cast<char*>(bytes));
}

// An object with the value T{fields...}.
template <typename T, typename... Fields>
pybind11::object make(Fields&&... fields) {
  auto* const made = PyObject_New(Object<T>, type_of<T>);
  if (made == nullptr) throw pybind11::error_already_set();
  new (&made->value) T{std::forward<Fields>(fields)...};
  return pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(made));
}

// `__new__` of a class whose objects begin with the value T().
template <typename T>
PyObject* make_empty(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const made = type->tp_alloc(type, 0);
  if (made != nullptr) new (&value_of<T>(made)) T();
  return made;
}

template <typename T>
void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  value_of<T>(self).~T();
  type->tp_free(self);
  Py_DECREF(type);  // an object of a class that was made at run time has a reference to the class
}

// Adds a class to the module. `flags`: besides the default ones. Returns false with an exception if it cannot be made.
template <typename T>
bool add_type(PyObject* module, const char* name, std::vector<PyType_Slot> slots, unsigned long flags = 0) {
  bool is_made_by_python = false, has_destructor = false;
  for (const PyType_Slot& slot : slots) {
    is_made_by_python = is_made_by_python || slot.slot == Py_tp_new;
    has_destructor = has_destructor || slot.slot == Py_tp_dealloc;
  }
  if (!has_destructor) slots.push_back({Py_tp_dealloc, reinterpret_cast<void*>(&destroy<T>)});
  if (!is_made_by_python && (flags & Py_TPFLAGS_BASETYPE) == 0) flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  slots.push_back({0, nullptr});
  const std::string whole = std::string("lightning_memopt.native.engine.") + name;
  PyType_Spec spec{whole.c_str(), sizeof(Object<T>), 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT | flags), slots.data()};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return false;
  type_of<T> = reinterpret_cast<PyTypeObject*>(type);
  return PyModule_AddObjectRef(module, name, type) == 0;
}

// A field of the value, as an entry of a list that ends with `kLastField`.
#define MEMOPT_FIELD(T, type, name, flags) {#name, type, offsetof(Object<T>, value.name), flags, nullptr}
constexpr PyMemberDef kLastField{nullptr, 0, 0, 0, nullptr};
constexpr PyGetSetDef kLastComputed{nullptr, nullptr, nullptr, nullptr, nullptr};
constexpr PyMethodDef kLastMethod{nullptr, nullptr, 0, nullptr};

// A field that is an optional number.
template <typename T, int64_t T::*field>
PyObject* get_number(PyObject* self, void*) {
  const int64_t number = value_of<T>(self).*field;
  return number == kNone ? Py_NewRef(Py_None) : PyLong_FromLongLong(number);
}

template <typename T, int64_t T::*field>
int set_number(PyObject* self, PyObject* value, void*) {
  const int64_t number = value == Py_None ? kNone : PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  value_of<T>(self).*field = number;
  return 0;
}

#define MEMOPT_NUMBER(T, name) {#name, get_number<T, &T::name>, set_number<T, &T::name>, nullptr, nullptr}

}  // namespace memopt
