// A storage version and what an engine holds of it, as one object. Python sees it as a `StorageVersion` (record/tape.py) that is also
// its own `Holding` (runtime/engine/holding.py): these say what the fields mean, and give it their methods (runtime/engine/native.py).
// It is in no reference cycle, so the garbage collector does not know it.
#pragma once
#include <ATen/core/Tensor.h>

#include "type.h"

namespace memopt {

// A weak reference to a storage: while it exists, no other storage has the same address.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

class Versions;

struct Version {
  int64_t id;
  pybind11::object call, origin, why, claim, stream, parked;
  at::Tensor value;  // undefined if none is held
  int64_t tensor, next, counter_in_op;  // `kNone` if there is none
  int64_t nbytes, index, counter, expected, handles;
  WeakStorage storage;
  c10::Device device;
  bool reachable, parameter, exposed, read;

  bool is_external() const;
  bool is_empty() const;
  bool is_stale() const { return next != kNone; }
  bool is_held() const { return value.defined(); }
  bool is_parked() const { return !parked.is_none(); }
  // Whether its own call can make its bytes again (`rebuildable`).
  bool is_rebuildable() const { return reachable && !call.is_none(); }
  // `Holding.intact`, for a version that is held.
  bool is_intact() const;
  // Whether a value is held that is an ordinary tensor.
  bool has_ordinary_value() const;
  // `Recorder._current`: whether it is still the version that `t` is on. Also notes a counter that was not known yet, because
  // autograd moves it after an op that writes in place. False: Python must decide.
  bool is_current(const at::Tensor& t);

  // The methods of `Holding`.
  void hold(const at::Tensor& t);
  void rebuilt(const at::Tensor& t, const pybind11::object& made_on);
  void drop() { value = at::Tensor(); }
  bool has_claim(PyObject* that) const { return claim.ptr() == that; }
  void set_claim(PyObject* now) { claim = pybind11::reinterpret_borrow<pybind11::object>(now); }
  // R11: the current stream waits until the value is made.
  void put_in_order() const;
};

// Adds the class `StorageVersion` to the module. Returns false with an exception if it cannot be made.
bool add_version(PyObject* module);

// The fields that a new storage version gets from its op.
struct NewVersion {
  int64_t id, tensor;  // the tensor of the plan, or `kNone`
  size_t index;        // among the results of the call
  pybind11::handle call, origin, why;
  bool reachable;
};

// A version of the storage of `t`.
pybind11::object new_version(const at::Tensor& t, const NewVersion& as);
// `can_make`, without parked bytes: whether the version's own call can make its bytes again, from what is in memory now.
bool can_make_from_memory(const Versions& versions, Version& version);

// Python's `in_order(holding)` and `current_stream(device)`, for tensors that are not on the CPU.
extern PyObject *in_order, *current_stream;

}  // namespace memopt
