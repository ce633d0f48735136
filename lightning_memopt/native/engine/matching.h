// Run and record an op of a planned forward that matches its template (runtime/engine/templates.py, matching.py).
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"
#include "prepared.h"
#include "progress.h"
#include "versions.h"

namespace memopt {

// An op of the plan's forward as it was when it was first matched.
struct Template {
  struct Made {
    size_t index;    // among the tensors returned
    int64_t tensor;  // of the plan
    int64_t nbytes;
    bool again;  // whether the call makes it again
  };
  struct Written {
    size_t argument;
    int64_t tensor;  // of the plan: what the op makes of the argument
  };
  std::unique_ptr<Prepared> given;  // the arguments
  bool compared;                    // whether the arguments are compared
  bool grad, empty, random;
  bool unshared;                    // whether the results are views with their own version counters
  pybind11::object call, why;
  std::vector<Made> made;
  std::vector<Written> mutates;
  std::vector<size_t> writes;  // arguments with memory that the op writes, and that is not on the tape
};

// Makes a template of its fields by name, and of the overload `func` and its arguments `args` and `kwargs` in terms of the
// plan's tensors (`...` instead of an argument that is not compared; `args` is None if none is compared). Null if the op must be
// recorded in every step.
std::unique_ptr<Template> template_of(const pybind11::dict& fields);

// The templates of the ops of a plan's forward, and what the plan does with its tensors.
class Templates {
 public:
  // The tensors that the plan holds from their birth, those of them that no forward saves, and those of which the data give the size.
  struct Sets {
    Numbers held, unsaved, sized_by_data;
  };

  Templates(size_t ops, Sets sets) : sets(std::move(sets)), passing_(ops), templates_(ops) {}

  const Sets sets;

  // `entry`: a capsule of a `Template`, the overload of an op on which nothing depends, or None.
  void learn(size_t position, PyObject* entry);
  size_t size() const { return passing_.size(); }
  // The op at a position if nothing depends on it; else null. Without the interpreter's lock.
  const c10::OperatorHandle* passing(size_t position) const { return passing_[position].load(std::memory_order_acquire); }
  // The capsule at a position; none if there is no template. With the interpreter's lock.
  const pybind11::object& at(size_t position) const { return templates_[position]; }

 private:
  std::vector<std::atomic<const c10::OperatorHandle*>> passing_;
  std::vector<pybind11::object> templates_;
};

// The data of the matcher of one forward. It has no reference to the matcher itself.
struct Forward {
  pybind11::object owners;  // of what is referred to
  Versions &of_storage, &versions;
  Numbers& active;
  Progress& cursor;
  pybind11::dict beneath;  // versions that changed unseen
  pybind11::list unread;   // versions whose counters are to be read
  pybind11::dict familiar;  // tensor of the plan that comes from outside -> (bytes, device) that fitted it before
  pybind11::bytes saving;  // for each position of the cursor: 0 if the hooks may be off there
};

// What the engine knows of a matcher, whose class derives from this one's (`matcher_for` in runtime/engine/matching.py).
struct Matching {
  pybind11::object native, templates;  // capsules of a `Forward` and of `Templates`; null or None where there are none
  bool capturing;
};

// Adds the class `Matching` to the module. Returns false with an exception if it cannot be made.
bool add_matching(PyObject* module);

// From now on the storage of `t` is on this version.
void add(const Forward& forward, const at::Tensor& t, const pybind11::object& version);

// The ops of torch of which a kernel is Python code (name, overload), so that it may enter modes.
void set_in_python(const std::vector<std::pair<std::string, std::string>>& names);

// Number of ops of planned forwards that were run here, and that were left to Python, in this process.
extern std::atomic<int64_t> native_ops, python_ops;

// Runs the op if it is the op at the cursor and matches its template, and notes what it made. Returns whether it did. If not,
// the op must be dispatched to the Python matcher. Call it without the interpreter's lock.
bool runs(PyObject* matcher, const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace memopt
