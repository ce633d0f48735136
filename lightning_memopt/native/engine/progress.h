// How far a planned step has come (runtime/engine/cursor.py). These fields belong to C++, so that an op is compared with the plan
// without the interpreter's lock. Python reads and writes them as attributes.
#pragma once
#include "type.h"

namespace memopt {

struct Progress {
  int64_t position, furthest, point, fence, turn;
  char lost, asked, on_plan, out_of_order;
};

// Adds the class `Progress` to the module. Returns false with an exception if it cannot be made.
bool add_progress(PyObject* module);

}  // namespace memopt
