// What is in memory of a storage version: questions about its `Holding` (runtime/engine/holding.py).
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace memopt {

// The version that a tape has under an id; null if there is none. Borrowed.
PyObject* version_with(PyObject* versions, PyObject* id);
// The value; null if there is none, or if it is not an ordinary tensor.
const at::Tensor* value_of(PyObject* holding);
// `rebuildable`: whether the version's own call can make its bytes again.
bool is_rebuildable(PyObject* version);
// `can_make`, without parked bytes: whether the version's own call can make its bytes again, from what is in memory now.
bool can_make_from_memory(PyObject* versions, PyObject* version);
bool is_parked(PyObject* holding);
// `Holding.intact`.
bool is_intact(PyObject* holding, const at::Tensor& value);
// `Holding.drop`.
void drop(PyObject* holding);
// R11: the current stream waits until the value is made.
void put_in_order(PyObject* holding, const at::Tensor& value);
// Python's `in_order(holding)` and `current_stream(device)`, for tensors that are not on the CPU.
extern PyObject *in_order, *current_stream;

}  // namespace memopt
