// What autograd holds instead of a saved tensor. Python sees it as a `Handle` (runtime/engine/handles.py), which says what the fields
// mean. Instead of a tensor without memory, which takes ten times as long to make, it has the saved tensor's version counter itself.
#pragma once
#include <ATen/core/Tensor.h>

#include "prepared.h"
#include "version.h"

namespace memopt {

struct Handle {
  pybind11::object engine, of;  // `of`: the version; see `version()`
  int64_t save, counter, times;
  c10::VariableVersion shared;  // with the saved tensor
  c10::DispatchKeySet keys;
  c10::Device device;
  Window window;  // names no version

  Version& version() const { return value_of<Version>(of.ptr()); }
  // The present version counter of the saved tensor.
  int64_t now() const { return shared.current_version(); }
  bool is_lazy() const { return is_conj() || is_neg(); }
  bool is_conj() const { return keys.has(c10::DispatchKey::Conjugate); }
  bool is_neg() const { return keys.has(c10::DispatchKey::Negative); }
};

// Adds the class `Handle` to the module. Returns false with an exception if it cannot be made.
bool add_handle(PyObject* module);

// A handle of the engine on a version.
pybind11::object new_handle(const at::Tensor& t, pybind11::handle engine, int64_t save, Version& version);

}  // namespace memopt
