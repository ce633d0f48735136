// How far a planned step has come (runtime/engine/cursor.py). These fields belong to C++, so that an op is compared with the plan
// without the interpreter's lock. Python reads and writes them as attributes.
#pragma once
#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace memopt {

struct Progress {
  PyObject_HEAD
  int64_t position, furthest, point, fence, turn;
  char lost, asked, on_plan, out_of_order;
};

// Adds the class `Progress` to the module. Returns false with an exception if it cannot be made.
bool add_progress(PyObject* module);

// `cursor` is an object of a class that derives from `Progress`.
inline Progress& progress_of(PyObject* cursor) { return *reinterpret_cast<Progress*>(cursor); }

}  // namespace memopt
