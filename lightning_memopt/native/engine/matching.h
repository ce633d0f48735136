// An op of a planned forward that is as its template says (runtime/engine/templates.py, matching.py) is run and recorded here.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "prepared.h"

namespace memopt {

// The fields of a Python `Template` that are asked for in every step.
struct Template {
  struct Made {
    size_t index;            // among the tensors returned
    pybind11::object tensor;  // of the plan
    int64_t nbytes;
  };
  struct Written {
    size_t argument;
    pybind11::object tensor;  // of the plan: what the op makes of the argument
  };
  std::unique_ptr<Prepared> given;  // the arguments
  bool compared;                    // whether the arguments matter
  bool grad, empty, random;
  bool unshared;                    // the results, which are views, have version counters of their own
  pybind11::object call, why;
  std::vector<Made> made;
  std::vector<Written> mutates;
  std::vector<size_t> writes;  // arguments with memory that the op writes, and that is not on the tape
};

// A template of a Python `Template` whose arguments are `args` and `kwargs`; null if the op must be matched in Python.
std::unique_ptr<Template> template_of(PyObject* python, PyObject* args, PyObject* kwargs);

// What the matcher of one forward works on; no reference to the matcher itself.
struct Forward {
  pybind11::dict of_storage, versions;
  pybind11::list weak;    // the tape's weak references to storages
  pybind11::dict beneath;  // versions that changed unseen
  pybind11::list unread;   // versions whose counters are to be read
  pybind11::object cursor, holds, unsaved, active, sized_by_data;
  pybind11::dict familiar;  // tensor of the plan that comes from outside -> (bytes, device) that fitted it before
  pybind11::bytes saving;  // for each position of the cursor: 0 if the hooks may rest there
};

// The version that a tensor is on; null if there is none. Borrowed: no Python code may run while it is in use.
PyObject* at_address(const Forward& forward, const at::Tensor& t);
// Its storage is on this version from now on.
void add(const Forward& forward, const pybind11::object& version);

// How many ops of planned forwards were run here, and how many were left to Python, in this process.
extern int64_t native_ops, python_ops;

// Runs the op if it is the op at the cursor, called as its template says, and notes what it made. Returns whether it did; if not,
// it must be dispatched to the matcher, a Python object. Call it without the interpreter's lock.
bool runs(PyObject* matcher, const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace memopt
