// Objects of the Python engine, made in C++. Nothing refers back to them, so they are hidden from the garbage collector: looking
// through thousands of them a step would take longer than to make them.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace memopt {

// What is new in a storage version.
struct NewVersion {
  pybind11::handle tensor;  // of the plan: its id, too
  size_t index;             // among the results of the call
  pybind11::handle call, origin, why;
  bool reachable;
};

// The object, which the garbage collector no longer looks through.
PyObject* hidden(PyObject* object);
// A `StorageVersion` of the storage of `t`, with its `Holding`. `weak`: the tape's list of weak references.
pybind11::object version_of(const at::Tensor& t, const NewVersion& as, const pybind11::list& weak);
// A `View` of `t` on the version with this id.
PyObject* view_of(const at::Tensor& t, PyObject* version);
// `Holding.hold`.
void hold(PyObject* holding, const at::Tensor& t);
// `Recorder._current`: whether a version is still the one that `t` is on. It notes a counter that was unknown, because autograd
// has moved it after an op that wrote in place. False: Python must be asked.
bool is_current(PyObject* version, const at::Tensor& t);
// A `Kept` of `t`. `about`: for messages.
pybind11::object kept(const at::Tensor& t, const pybind11::object& about);
// A `Handle` on a version, of the engine.
pybind11::object handle(const at::Tensor& t, pybind11::handle engine, int64_t save, PyObject* version);

}  // namespace memopt
