#include "tensors.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memopt {
bool is_ordinary(const at::Tensor& t) {
  if (!t.defined() || t.key_set().has(c10::DispatchKey::Python) || t.is_nested()) return false;
  if (t.layout() != at::kStrided || !t.has_storage()) return false;
  PyObject* const object = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object == nullptr || THPVariable_CheckExact(object);
}

bool is_plain(const at::Tensor& t) {
  return is_ordinary(t) && !t.is_quantized() && !t.is_inference() && !t._is_zerotensor() && !t.is_meta();
}

Tensors tensors_in(c10::ArrayRef<c10::IValue> results) {
  Tensors tensors;
  for (const c10::IValue& result : results)
    if (result.isTensor()) {
      if (result.toTensor().defined()) tensors.push_back(result.toTensor());
    } else if (result.isTensorList()) {
      for (const c10::IValue& each : result.toListRef()) tensors.push_back(each.toTensor());
    }
  return tensors;
}

pybind11::object wrapped(const at::Tensor& t) { return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t)); }

pybind11::object wrapped(c10::Device device) {
  static PyObject* const cpu = THPDevice_New(at::Device(at::kCPU));
  if (device == at::Device(at::kCPU)) return pybind11::reinterpret_borrow<pybind11::object>(cpu);
  return pybind11::reinterpret_steal<pybind11::object>(THPDevice_New(device));
}

c10::intrusive_ptr<c10::TensorImpl> alias_of(const c10::TensorImpl& t) {
  const c10::impl::ExcludeDispatchKeyGuard unseen(kModes);  // a mode would see it as an op
  return t.shallow_copy_and_detach(t.version_counter(), t.allow_tensor_metadata_change());
}

at::Tensor alias_of(const at::Tensor& t) { return at::Tensor(alias_of(*t.unsafeGetTensorImpl())); }

}  // namespace memopt
