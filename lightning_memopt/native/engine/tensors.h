// Which tensors the engine handles (record/tensors.py), and Python objects for tensors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

namespace memopt {

// The keys by which torch dispatches to modes.
constexpr c10::DispatchKeySet kModes{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};

// Whether an object is a tensor of torch's own classes, strided and not nested (`PLAIN` in record/tensors.py).
bool is_ordinary(const at::Tensor& t);
// `is_plain` in record/tensors.py.
bool is_plain(const at::Tensor& t);

using Tensors = c10::SmallVector<at::Tensor, 4>;

// The tensors among the results of an op, in their order (`tensors_in`).
Tensors tensors_in(c10::ArrayRef<c10::IValue> results);

pybind11::object wrapped(const at::Tensor& t);
pybind11::object wrapped(c10::Device device);
// An alias without history that shares the version counter (`detached` in record/tensors.py).
at::Tensor alias_of(const at::Tensor& t);
c10::intrusive_ptr<c10::TensorImpl> alias_of(const c10::TensorImpl& t);

}  // namespace memopt
