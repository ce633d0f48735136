// Parts of an observed step that run for each op: what an op reads and makes (record/arguments.py, record/recorder.py), which
// storages only the engine holds (trace/user_held.py), and the bytes of gradients to come (session/observation.py). Each
// function handles the usual case, and returns None if Python must do it.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// captured(values, of_storage, capturing, reads): the values with views instead of ordinary tensors, whose versions are
// appended to `reads`; True if nothing is captured.
PyObject* captured(PyObject*, PyObject* const* args, Py_ssize_t n);

// version(id, t, origin, weak references of the tape): the version of a new storage.
PyObject* make_version(PyObject*, PyObject* const* args, Py_ssize_t n);

// fresh(result of an op, of_storage): [(position, tensor)] of the ordinary tensors among the results that are on new storages.
PyObject* fresh(PyObject*, PyObject* const* args, Py_ssize_t n);

// row(class, values...): an object of a dataclass with slots, hidden from the garbage collector. All values, in order.
PyObject* row(PyObject*, PyObject* const* args, Py_ssize_t n);

// handle(t, engine, save, version).
PyObject* make_handle(PyObject*, PyObject* const* args, Py_ssize_t n);

// alias(t): an alias without history that shares the version counter of `t`.
PyObject* alias(PyObject*, PyObject* t);

// untrack(object): the object, hidden from the garbage collector. Only for objects that cannot be part of a reference cycle.
PyObject* untrack(PyObject*, PyObject* object);

// lonely(versions by id, count): ids of the held versions whose storages have at most `count` users.
PyObject* lonely(PyObject*, PyObject* const* args, Py_ssize_t n);

// ungraded_nbytes([(parameter, bytes)]): the bytes of the parameters that have no gradient.
PyObject* ungraded_nbytes(PyObject*, PyObject* parameters);

}  // namespace memopt
