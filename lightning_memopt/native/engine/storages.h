// What is done to the storages of tensors.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// exchange(t, other): the storages of two tensors exchange their memory. Both have as many bytes. Each keeps its device, so the
// memory of both must be readable from there.
PyObject* exchange(PyObject*, PyObject* const* args, Py_ssize_t n);

// lent(t, holders): whether NumPy has the address of t's memory. Torch says only that it once had (it then forbids to resize the
// storage); an array holds the storage, so it is gone when only `holders` hold it: then torch may resize it again.
PyObject* lent(PyObject*, PyObject* const* args, Py_ssize_t n);

}  // namespace memopt
