// What a handle keeps of the saved tensor: its version counter. A tensor without memory, which Python uses for this
// (`version_guard` in runtime/engine/handles.py), takes ten times as long to make.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace memopt {

// Adds the class `VersionGuard` to the module. Returns false with an exception if it cannot be made. It has `_version`, as a
// tensor has, and `tensor()`: a tensor without memory that shares the counter.
bool add_guards(PyObject* module);

pybind11::object guard_of(const at::Tensor& t);

// The present version counter. `guard`: an object of this class, or a tensor.
int64_t version_at(PyObject* guard);

}  // namespace memopt
