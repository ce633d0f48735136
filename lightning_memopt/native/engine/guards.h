// What a handle keeps of the saved tensor: its version counter, and its window. A tensor without memory, which Python uses for the
// counter (`version_guard` in runtime/engine/handles.py), takes ten times as long to make, and a `View` five times.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>

#include "prepared.h"

namespace memopt {

// Adds the class `VersionGuard` to the module. Returns false with an exception if it cannot be made. It has `_version`, as a
// tensor has, `tensor()`: a tensor without memory that shares the counter, and `view(id)`: the `View` on the version with this id.
bool add_guards(PyObject* module);

pybind11::object guard_of(const at::Tensor& t);

// The window of a guard of this class; null if it is conjugate or negative, or the guard is a tensor. It names no version.
const Window* window_in(PyObject* guard);

// The present version counter. `guard`: an object of this class, or a tensor.
int64_t version_at(PyObject* guard);

}  // namespace memopt
