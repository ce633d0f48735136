// Runs a recorded call again (`run` in runtime/engine/rebuild.py).
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// Python functions for tensors on other devices than the CPU: `in_order(holding)` and `current_stream(device)`.
extern PyObject *in_order, *current_stream;

// Runs a call on the values of the versions that it reads, and sets those of the versions that it makes. Call it below autograd.
// Returns 1; 0 if the call must be run in Python, and nothing has been done; -1 with an exception.
int rerun(PyObject* call, PyObject* versions, PyObject* survives);

}  // namespace memopt
