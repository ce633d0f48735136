// Ops that write in place: handle the bytes that they overwrite, and those that they write (`_overwrites` and `_overwritten` of
// the recorders and of a plan's holdings), for versions that are neither parked nor from outside.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "matching.h"

namespace memopt {

// An op is about to write to `t`. Returns false, and does nothing, if Python must handle it.
bool overwrites(const Forward& forward, const at::Tensor& t);

// An op has written to `t`, and made this tensor of the plan, by `call`. `startable`: a rebuild can use all that the op reads.
// Returns the new version, or null, and does nothing, if Python must handle it.
pybind11::object overwritten(
    const Forward& forward, const at::Tensor& t, const pybind11::object& call, bool startable, int64_t tensor);

}  // namespace memopt
