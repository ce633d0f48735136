#include "storages.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>
#include <utility>

namespace memopt {
namespace {

PyTypeObject* storages_type = nullptr;

Storages& storages_of(PyObject* self) { return *reinterpret_cast<Storages*>(self); }

// Returns false with an exception if the key is no address.
bool read_address(PyObject* key, uintptr_t* address) {
  *address = PyLong_AsSize_t(key);
  return !PyErr_Occurred();
}

PyObject* new_storages(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const made = type->tp_alloc(type, 0);
  if (made != nullptr) new (&storages_of(made).versions) decltype(Storages::versions)();
  return made;
}

PyObject* clear_storages(PyObject* self, PyObject*) {
  decltype(Storages::versions) before;
  std::swap(before, storages_of(self).versions);  // what is freed now may run code that asks for a version
  for (const auto& [address, version] : before) Py_DECREF(version);
  Py_RETURN_NONE;
}

void free_storages(PyObject* self) {
  Py_XDECREF(clear_storages(self, nullptr));
  storages_of(self).versions.~flat_hash_map();
  storages_type->tp_free(self);
  Py_DECREF(storages_type);  // an object of a class that was made at run time has a reference to the class
}

PyObject* get_version(PyObject* self, PyObject* key) {
  uintptr_t address;
  if (!read_address(key, &address)) return nullptr;
  PyObject* const version = storages_of(self).at(address);
  return Py_NewRef(version == nullptr ? Py_None : version);
}

PyObject* version_item(PyObject* self, PyObject* key) {
  uintptr_t address;
  if (!read_address(key, &address)) return nullptr;
  PyObject* const version = storages_of(self).at(address);
  if (version == nullptr) PyErr_SetObject(PyExc_KeyError, key);
  return Py_XNewRef(version);
}

int set_version(PyObject* self, PyObject* key, PyObject* version) {
  uintptr_t address;
  if (!read_address(key, &address)) return -1;
  if (version != nullptr) {
    storages_of(self).put(address, version);
    return 0;
  }
  PyObject* const before = storages_of(self).at(address);
  if (before == nullptr) {
    PyErr_SetObject(PyExc_KeyError, key);
    return -1;
  }
  storages_of(self).versions.erase(address);
  Py_DECREF(before);
  return 0;
}

int has_version(PyObject* self, PyObject* key) {
  uintptr_t address;
  return read_address(key, &address) ? storages_of(self).at(address) != nullptr : -1;
}

Py_ssize_t number_of_versions(PyObject* self) { return static_cast<Py_ssize_t>(storages_of(self).versions.size()); }

PyObject* version_items(PyObject* self, PyObject*) {
  PyObject* const list = PyList_New(0);
  if (list == nullptr) return nullptr;
  for (const auto& [address, version] : storages_of(self).versions) {
    PyObject* const pair = Py_BuildValue("NO", PyLong_FromSize_t(address), version);
    if (pair == nullptr || PyList_Append(list, pair) < 0) {
      Py_XDECREF(pair);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(pair);
  }
  return list;
}

}  // namespace

void Storages::put(uintptr_t address, PyObject* version) {
  PyObject*& at = versions[address];
  Py_XDECREF(std::exchange(at, Py_NewRef(version)));
}

bool add_storages(PyObject* module) {
  static PyMethodDef methods[] = {
      {"get", get_version, METH_O, nullptr},
      {"items", version_items, METH_NOARGS, nullptr},
      {"clear", clear_storages, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_storages)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_storages)},
      {Py_tp_methods, methods},
      {Py_mp_subscript, reinterpret_cast<void*>(version_item)},
      {Py_mp_ass_subscript, reinterpret_cast<void*>(set_version)},
      {Py_mp_length, reinterpret_cast<void*>(number_of_versions)},
      {Py_sq_contains, reinterpret_cast<void*>(has_version)},
      {0, nullptr},
  };
  static PyType_Spec spec{"lightning_memopt.native.engine.Storages", sizeof(Storages), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "Storages", type) != 0) return false;
  storages_type = reinterpret_cast<PyTypeObject*>(type);
  return true;
}

PyObject* exchange(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(n == 2 && THPVariable_Check(args[0]) && THPVariable_Check(args[1]), "exchange(t, other)");
  c10::StorageImpl& one = *THPVariable_Unpack(args[0]).storage().unsafeGetStorageImpl();
  c10::StorageImpl& other = *THPVariable_Unpack(args[1]).storage().unsafeGetStorageImpl();
  TORCH_CHECK_VALUE(one.nbytes() == other.nbytes(), one.nbytes(), " bytes cannot be exchanged with ", other.nbytes());
  const at::Device device = one.device(), others = other.device();
  at::DataPtr memory = other.set_data_ptr(at::DataPtr(nullptr, others));
  memory.unsafe_set_device(device);
  memory = one.set_data_ptr(std::move(memory));
  memory.unsafe_set_device(others);
  other.set_data_ptr_noswap(std::move(memory));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* lent(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(n == 2 && THPVariable_Check(args[0]) && PyLong_Check(args[1]), "lent(t, holders)");
  const c10::Storage& storage = THPVariable_Unpack(args[0]).storage();
  c10::StorageImpl& one = *storage.unsafeGetStorageImpl();
  if (one.resizable() || one.allocator() == nullptr) Py_RETURN_FALSE;  // without an allocator: it never was resizable
  if (storage.use_count() > PyLong_AsSize_t(args[1])) Py_RETURN_TRUE;
  one.set_resizable(true);
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

Storages* storages_in(PyObject* object) {
  if (Py_TYPE(object) == storages_type) return &storages_of(object);
  PyErr_SetString(PyExc_TypeError, "no Storages");
  return nullptr;
}

}  // namespace memopt
