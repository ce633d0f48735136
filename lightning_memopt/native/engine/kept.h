// The tensor itself, as autograd holds it in a planned forward. Python sees it as a `Kept` (runtime/engine/handles.py), which says what
// the fields mean.
#pragma once
#include <ATen/core/Tensor.h>

#include "type.h"

namespace memopt {

struct Kept {
  at::Tensor t;
  int64_t counter;
  pybind11::object about;

  // Whether the tensor has not been written to since it was saved.
  bool is_unchanged() const;
};

// Adds the class `Kept` to the module. Returns false with an exception if it cannot be made.
bool add_kept(PyObject* module);

// A `Kept` of `t`. `about`: for messages.
pybind11::object keep(const at::Tensor& t, pybind11::object about);

}  // namespace memopt
