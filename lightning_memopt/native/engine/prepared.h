// A recorded call with its arguments as torch's own values. Only the tensors change from step to step.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/python_headers.h>

#include <vector>

namespace memopt {

// A window on the bytes of a storage version (`View`).
struct Window {
  int64_t version;  // its id
  c10::DimVector size, stride;
  int64_t offset;
  caffe2::TypeMeta dtype;

  bool is_all_of(const at::Tensor& base) const;
  // This window on `base`, without a dispatch.
  at::Tensor on(const at::Tensor& base) const;
};

// The window of a tensor. It names no version.
Window window_on(const at::Tensor& t);

struct Input {
  size_t argument;
  int64_t element;  // of a list of tensors; -1: the argument is the tensor
  Window window;
};

// A number given instead of a tensor. The tensor is made only when the op runs, because it would count as memory in between.
struct Number {
  size_t argument;
  at::Scalar value;

  at::Tensor tensor() const;
  bool is(const at::Tensor& t) const;
};

struct Prepared {
  c10::OperatorHandle op;
  std::vector<c10::IValue> stack;  // all arguments, with a gap for each of `inputs`
  std::vector<Input> inputs;
  std::vector<Number> numbers;
  int64_t generator = -1;  // the argument that is a generator; -1: there is none
  std::vector<size_t> ignored;  // arguments that are not compared, because `...` was given

  bool is_ignored(size_t argument) const;
  const Number* number_at(size_t argument) const;
};

// Prepares a call. Null, without an exception, if there is an argument that is not one of those below: numbers, strings, types,
// devices, layouts, formats, generators, tensors, and lists of numbers and tensors.
Prepared* prepare(const char* name, const char* overload, PyObject* args, PyObject* kwargs);

}  // namespace memopt
