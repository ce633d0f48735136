// A recorded call. Python sees it as a `Call` (record/tape.py), which says what the fields mean.
#pragma once
#include <c10/util/SmallVector.h>

#include <utility>

#include "type.h"

namespace memopt {

struct Call {
  int64_t op;
  pybind11::object func, args, kwargs, reads, rng, made, mutates, prepared;
  bool grad, repeats;
};

// Adds the class `Call` to the module. Returns false with an exception if it cannot be made.
bool add_call(PyObject* module);

// The ids in `Call.reads`.
c10::SmallVector<int64_t, 4> numbers_in(const pybind11::object& ids);
// The pairs in `Call.made` or `Call.mutates`.
c10::SmallVector<std::pair<int64_t, int64_t>, 2> pairs_in(const pybind11::object& pairs);

}  // namespace memopt
