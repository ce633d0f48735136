// Ops that write in place: what becomes of the bytes that they write over, and of those that they write (`_overwrites` and
// `_overwritten` of the recorders, and what the holdings of a plan do then). For versions that are neither parked nor from outside.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "matching.h"

namespace memopt {

// An op is about to write to `t`. Returns false, and has done nothing, if Python must be told.
bool overwrites(const Forward& forward, const at::Tensor& t);

// An op has written to `t`, and made this tensor of the plan, by `call`. `startable`: a rebuild can have all that the op reads.
// Returns the new version; null, and has done nothing, if Python must be told.
pybind11::object overwritten(
    const Forward& forward, const at::Tensor& t, const pybind11::object& call, bool startable, const pybind11::object& tensor);

}  // namespace memopt
