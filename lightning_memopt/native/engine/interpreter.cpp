#include "interpreter.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include <unordered_set>
#include <utility>

#include "hooks.h"
#include "matching.h"
#include "tensors.h"

namespace memopt {
namespace {

using c10::TensorImpl;
using c10::impl::PyInterpreterVTable;
using c10::impl::TorchDispatchModeTLS;

const PyInterpreterVTable* torchs = nullptr;
std::unordered_set<PyObject*>& forwards = *new std::unordered_set<PyObject*>;  // under way; under the interpreter's lock

// The matcher that would see an op first; null if there is none.
PyObject* innermost() {
  const int64_t n = TorchDispatchModeTLS::stack_len();
  if (n == 0) return nullptr;
  PyObject* const mode = TorchDispatchModeTLS::get_stack_at(n - 1)->ptr(getPyInterpreter());
  return PyType_IsSubtype(Py_TYPE(mode), type_of<Matching>) != 0 ? mode : nullptr;
}

class Table final : public PyInterpreterVTable {
 public:
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    PyObject* const matcher = innermost();
    if (matcher == nullptr || !runs(matcher, op, stack)) torchs->dispatch(op, stack);
  }

  std::string name() const override { return torchs->name(); }
  void incref(PyObject* o) const override {
    if (!is_hook(o)) torchs->incref(o);
  }
  void decref(PyObject* o) const override {
    if (!is_hook(o)) torchs->decref(o);
  }
  bool try_incref(const c10::impl::PyObjectSlot& slot) const override { return torchs->try_incref(slot); }
  size_t refcnt(PyObject* o) const override { return torchs->refcnt(o); }
  // While hooks are off, torch saves results itself, as aliases, which are not ops of the forward. (Hooks are on at `detach`
  // ops.)
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* t) const override {
    if (!hooks_rest() || innermost() == nullptr || t->key_set().has(c10::DispatchKey::Python)) return torchs->detach(t);
    return alias_of(*t);
  }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const override { torchs->reportErrorCallback(callback, key); }
  void python_op_registration_trampoline(
      const c10::OperatorHandle& op, c10::DispatchKey key, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool with_keyset,
      bool with_op) const override {
    torchs->python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op, const char* module, const char* context) const override {
    torchs->throw_abstract_impl_not_imported_error(std::move(op), module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const override {
    torchs->python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const TensorImpl* t, at::MemoryFormat format) const override { return torchs->is_contiguous(t, format); }
  c10::SymBool sym_is_contiguous(const TensorImpl* t, at::MemoryFormat format) const override {
    return torchs->sym_is_contiguous(t, format);
  }
  bool is_strides_like(const TensorImpl* t, at::MemoryFormat format) const override { return torchs->is_strides_like(t, format); }
  bool is_non_overlapping_and_dense(const TensorImpl* t) const override { return torchs->is_non_overlapping_and_dense(t); }
  c10::Device device(const TensorImpl* t) const override { return torchs->device(t); }
  int64_t dim(const TensorImpl* t) const override { return torchs->dim(t); }
  c10::IntArrayRef strides(const TensorImpl* t) const override { return torchs->strides(t); }
  c10::IntArrayRef sizes(const TensorImpl* t) const override { return torchs->sizes(t); }
  c10::SymIntArrayRef sym_sizes(const TensorImpl* t) const override { return torchs->sym_sizes(t); }
  c10::Layout layout(const TensorImpl* t) const override { return torchs->layout(t); }
  int64_t numel(const TensorImpl* t) const override { return torchs->numel(t); }
  c10::SymInt sym_numel(const TensorImpl* t) const override { return torchs->sym_numel(t); }
  c10::SymIntArrayRef sym_strides(const TensorImpl* t) const override { return torchs->sym_strides(t); }
  c10::SymInt sym_storage_offset(const TensorImpl* t) const override { return torchs->sym_storage_offset(t); }
  void trace_gpu_event_creation(c10::DeviceType d, uintptr_t e) const override { torchs->trace_gpu_event_creation(d, e); }
  void trace_gpu_event_deletion(c10::DeviceType d, uintptr_t e) const override { torchs->trace_gpu_event_deletion(d, e); }
  void trace_gpu_event_record(c10::DeviceType d, uintptr_t e, uintptr_t s) const override {
    torchs->trace_gpu_event_record(d, e, s);
  }
  void trace_gpu_event_wait(c10::DeviceType d, uintptr_t e, uintptr_t s) const override { torchs->trace_gpu_event_wait(d, e, s); }
  void trace_gpu_memory_allocation(c10::DeviceType d, uintptr_t p) const override { torchs->trace_gpu_memory_allocation(d, p); }
  void trace_gpu_memory_deallocation(c10::DeviceType d, uintptr_t p) const override {
    torchs->trace_gpu_memory_deallocation(d, p);
  }
  void trace_gpu_stream_creation(c10::DeviceType d, uintptr_t s) const override { torchs->trace_gpu_stream_creation(d, s); }
  void trace_gpu_device_synchronization(c10::DeviceType d) const override { torchs->trace_gpu_device_synchronization(d); }
  void trace_gpu_stream_synchronization(c10::DeviceType d, uintptr_t s) const override {
    torchs->trace_gpu_stream_synchronization(d, s);
  }
  void trace_gpu_event_synchronization(c10::DeviceType d, uintptr_t e) const override {
    torchs->trace_gpu_event_synchronization(d, e);
  }
  void reset_backward_hooks(const TensorImpl* t) const override { torchs->reset_backward_hooks(t); }
};

const Table& table = *new Table;  // never destroyed, because another thread may be using it

}  // namespace

void begin_forward(PyObject* forward) {
  auto& vtable = getPyInterpreter()->vtable_;
  forwards.insert(forward);
  if (forwards.size() > 1) return;
  if (vtable != &table) torchs = vtable;
  vtable = &table;
}

void end_forward(PyObject* forward) {
  auto& vtable = getPyInterpreter()->vtable_;
  if (forwards.erase(forward) == 1 && forwards.empty() && vtable == &table) vtable = torchs;
}

size_t forwards_under_way() { return forwards.size(); }

}  // namespace memopt
