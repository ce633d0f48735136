// Objects of the Python engine, made in C++. They are in no reference cycle, so they are hidden from the garbage collector,
// which would take longer to visit thousands of them a step than it takes to make them.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "prepared.h"

namespace memopt {

// The fields that a new storage version gets from its op.
struct NewVersion {
  pybind11::handle tensor;  // of the plan: its id, too
  size_t index;             // among the results of the call
  pybind11::handle call, origin, why;
  bool reachable;
};

// The object, hidden from the garbage collector.
PyObject* hidden(PyObject* object);
// A `StorageVersion` of the storage of `t`, with its `Holding`. `weak`: the tape's list of weak references.
pybind11::object version_of(const at::Tensor& t, const NewVersion& as, const pybind11::list& weak);
// A `View` with this window on the version with this id.
PyObject* view_of(const Window& window, PyObject* version, bool conj, bool neg);
// `Holding.hold`.
void hold(PyObject* holding, const at::Tensor& t);
// `Recorder._current`: whether a version is still the one that `t` is on. Also notes a counter that was not known yet, because
// autograd moves it after an op that writes in place. False: Python must decide.
bool is_current(PyObject* version, const at::Tensor& t);
// A `Kept` of `t`. `about`: for messages.
pybind11::object kept(const at::Tensor& t, const pybind11::object& about);
// A `Handle` of the engine on a version.
pybind11::object handle(const at::Tensor& t, pybind11::handle engine, int64_t save, PyObject* version);

}  // namespace memopt
