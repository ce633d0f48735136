// Objects of Python's classes, made in C++. They are in no reference cycle, so they are hidden from the garbage collector,
// which would take longer to visit thousands of them a step than it takes to make them.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "prepared.h"

namespace memopt {

// The object, hidden from the garbage collector.
PyObject* hidden(PyObject* object);
// A `View` with this window on the version with this id.
PyObject* view_of(const Window& window, PyObject* version, bool conj, bool neg);
// A `Kept` of `t`. `about`: for messages.
pybind11::object kept(const at::Tensor& t, const pybind11::object& about);

}  // namespace memopt
