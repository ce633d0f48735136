#include "storages.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace memopt {

PyObject* exchange(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(n == 2 && THPVariable_Check(args[0]) && THPVariable_Check(args[1]), "exchange(t, other)");
  c10::StorageImpl& one = *THPVariable_Unpack(args[0]).storage().unsafeGetStorageImpl();
  c10::StorageImpl& other = *THPVariable_Unpack(args[1]).storage().unsafeGetStorageImpl();
  TORCH_CHECK_VALUE(one.nbytes() == other.nbytes(), one.nbytes(), " bytes cannot be exchanged with ", other.nbytes());
  const at::Device device = one.device(), others = other.device();
  at::DataPtr memory = other.set_data_ptr(at::DataPtr(nullptr, others));
  memory.unsafe_set_device(device);
  memory = one.set_data_ptr(std::move(memory));
  memory.unsafe_set_device(others);
  other.set_data_ptr_noswap(std::move(memory));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* lent(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(n == 2 && THPVariable_Check(args[0]) && PyLong_Check(args[1]), "lent(t, holders)");
  const c10::Storage& storage = THPVariable_Unpack(args[0]).storage();
  c10::StorageImpl& one = *storage.unsafeGetStorageImpl();
  if (one.resizable() || one.allocator() == nullptr) Py_RETURN_FALSE;  // without an allocator: it never was resizable
  if (storage.use_count() > PyLong_AsSize_t(args[1])) Py_RETURN_TRUE;
  one.set_resizable(true);
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

}  // namespace memopt
