// A window on a storage version, which a tape keeps instead of a tensor argument. Python sees it as a `View` (record/tape.py), which
// says what the fields mean.
#pragma once
#include "prepared.h"
#include "type.h"

namespace memopt {

struct View {
  Window window;
  bool conj, neg;
};

// Adds the class `View` to the module. Returns false with an exception if it cannot be made.
bool add_view(PyObject* module);

// The window of `t`, on the version with this id.
pybind11::object view_of(const at::Tensor& t, int64_t version);

}  // namespace memopt
