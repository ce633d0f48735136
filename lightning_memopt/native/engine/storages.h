// The version that each storage is on (`Recorder.of_storage`), as a class with those methods of a dictionary that are used. Keys are
// the storages' addresses. In a dictionary most of them collide, because their last bits are the same.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace memopt {

struct Storages {
  PyObject_HEAD
  ska::flat_hash_map<uintptr_t, PyObject*> versions;

  // The version; null if there is none. Borrowed.
  PyObject* at(uintptr_t address) const {
    const auto found = versions.find(address);
    return found == versions.end() ? nullptr : found->second;
  }
  PyObject* at(const at::Tensor& t) const { return at(reinterpret_cast<uintptr_t>(t.storage().unsafeGetStorageImpl())); }
  void put(uintptr_t address, PyObject* version);
};

// Adds the class `Storages` to the module. Returns false with an exception if it cannot be made.
bool add_storages(PyObject* module);

// Null, with an exception, if the object is not of this class.
Storages* storages_in(PyObject* object);

// exchange(t, other): the storages of two tensors exchange their memory. Both have as many bytes. Each keeps its device, so the
// memory of both must be readable from there.
PyObject* exchange(PyObject*, PyObject* const* args, Py_ssize_t n);

// lent(t, holders): whether NumPy has the address of t's memory. Torch says only that it once had (it then forbids to resize the
// storage); an array holds the storage, so it is gone when only `holders` hold it: then torch may resize it again.
PyObject* lent(PyObject*, PyObject* const* args, Py_ssize_t n);

}  // namespace memopt
