// Hollow tensors: sizes, strides and dtype like any tensor's, on a storage without bytes (runtime/tiles). The storage owns a
// recipe, a Python object, until it is freed or filled. The recipe's attribute `address` is that of the storage, or None.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

namespace memopt {

bool is_hollow(const at::Tensor& t);

// can_be_hollow(): whether this torch has what hollow tensors need.
PyObject* can_be_hollow(PyObject*, PyObject*);

// hollow(like, device, message, recipe): a hollow tensor with the sizes, strides and dtype of `like`. Whoever reads its memory gets
// a RuntimeError with `message`.
PyObject* hollow(PyObject*, PyObject* const* args, Py_ssize_t n);

// hollow_view(hollow, like, offset): a view of a hollow tensor, with the sizes and strides of `like`.
PyObject* hollow_view(PyObject*, PyObject* const* args, Py_ssize_t n);

// recipe(t): the recipe of the storage of `t`; None if it has none.
PyObject* recipe(PyObject*, PyObject* t);

// set_recipe(hollow, recipe): the storage of a hollow tensor owns this recipe instead of its own.
PyObject* set_recipe(PyObject*, PyObject* const* args, Py_ssize_t n);

// fill(recipe, value): the storage at the recipe's address gets the bytes of the storage of `value`, which has none afterwards.
// Returns a weak reference to the storage, as UntypedStorage._weak_ref() does.
PyObject* fill(PyObject*, PyObject* const* args, Py_ssize_t n);

}  // namespace memopt
