#include "hollow.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <type_traits>
#include <utility>

#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

constexpr const char* kAddress = "address";

// The error for whoever reads memory that is not there. Torch 2.11 can begin it, and not end it.
template <typename Storage, typename = void>
struct Guarding {
  static constexpr bool kEnds = false;
  static void end(Storage&) {}
};
template <typename Storage>
struct Guarding<Storage, std::void_t<decltype(std::declval<Storage&>().clear_data_ptr_access_error_msg_())>> {
  static constexpr bool kEnds = true;
  static void end(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); }
};

const at::Tensor& tensor_at(PyObject* const* args, Py_ssize_t i) {
  if (!THPVariable_Check(args[i])) throw py::type_error("no tensor");
  return THPVariable_Unpack(args[i]);
}

c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// The storage is freed or filled: it no longer owns its recipe.
void disown(void* recipe) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire locked;
  PyObject* const object = static_cast<PyObject*>(recipe);
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);  // a storage may be freed while an exception is on its way
  if (PyObject_SetAttrString(object, kAddress, Py_None) < 0) PyErr_WriteUnraisable(object);
  Py_DECREF(object);
  PyErr_Restore(type, value, trace);
}

// The storage owns this recipe from now on, and no other one.
void own(c10::StorageImpl& storage, PyObject* recipe) {
  py::setattr(recipe, kAddress, py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(&storage)));
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, Py_NewRef(recipe), &disown, storage.device()));
}

// The recipe that a storage owns; null if there is none. Borrowed.
PyObject* recipe_in(c10::StorageImpl* storage) {
  if (storage == nullptr || storage->nbytes() != 0) return nullptr;
  const at::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &disown ? static_cast<PyObject*>(data.get_context()) : nullptr;
}

}  // namespace

bool is_hollow(const at::Tensor& t) { return recipe_in(storage_of(t)) != nullptr; }

PyObject* can_be_hollow(PyObject*, PyObject*) { return PyBool_FromLong(Guarding<c10::StorageImpl>::kEnds); }

PyObject* hollow(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 4 || !THPDevice_Check(args[1])) throw py::type_error("hollow(like, device, message, recipe)");
  const at::Tensor& like = tensor_at(args, 0);
  const at::Device device = reinterpret_cast<THPDevice*>(args[1])->device;
  auto message = py::handle(args[2]).cast<std::string>();
  const c10::impl::ExcludeDispatchKeyGuard unseen(kModes);
  at::Tensor made = at::empty({0}, at::TensorOptions().dtype(like.dtype()).device(device));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  c10::StorageImpl* const storage = storage_of(made);
  own(*storage, args[3]);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  return wrapped(made).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* hollow_view(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 3) throw py::type_error("hollow_view(hollow, like, offset)");
  at::Tensor made = alias_of(tensor_at(args, 0));
  const at::Tensor& like = tensor_at(args, 1);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), PyLong_AsLongLong(args[2]));
  return wrapped(made).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* recipe(PyObject*, PyObject* t) {
  HANDLE_TH_ERRORS
  PyObject* const found = recipe_in(storage_of(tensor_at(&t, 0)));
  return Py_NewRef(found == nullptr ? Py_None : found);
  END_HANDLE_TH_ERRORS
}

PyObject* set_recipe(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 2) throw py::type_error("set_recipe(hollow, recipe)");
  c10::StorageImpl* const storage = storage_of(tensor_at(args, 0));
  if (recipe_in(storage) == nullptr) throw py::value_error("no hollow tensor");
  own(*storage, args[1]);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* fill(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 2) throw py::type_error("fill(recipe, value)");
  const py::object address = py::getattr(args[0], kAddress);
  if (address.is_none()) throw py::value_error("the hollow tensor was freed, or has its bytes");
  auto* const to = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address.ptr()));
  c10::StorageImpl* const from = storage_of(tensor_at(args, 1));
  const size_t nbytes = from->nbytes();
  Guarding<c10::StorageImpl>::end(*to);
  to->set_data_ptr_noswap(from->set_data_ptr(at::DataPtr(nullptr, from->device())));  // disowns the recipe
  to->set_nbytes(nbytes);
  from->set_nbytes(0);
  return PyLong_FromVoidPtr(c10::raw::intrusive_ptr::make_weak(to));
  END_HANDLE_TH_ERRORS
}

}  // namespace memopt
