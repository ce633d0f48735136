#include "rerun.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <utility>
#include <vector>

#include "lock.h"
#include "prepared.h"
#include "tensors.h"
#include "version.h"

namespace memopt {
namespace {

using c10::IValue;

struct Overwritten {
  int64_t old_id, new_id;  // of versions
  Version& old;
  at::Tensor fresh;  // the memory that the call writes to
};

// The value of a version with this id; null if it has none that is an ordinary tensor.
const at::Tensor* value_with(const Versions& versions, int64_t id) {
  const Version* const version = versions.at(id);
  return version != nullptr && version->has_ordinary_value() ? &version->value : nullptr;
}

// A copy of the whole storage of a tensor, flat.
at::Tensor copy_of(const at::Tensor& t) {
  const auto bytes = t.options().dtype(at::kByte);
  const int64_t nbytes = static_cast<int64_t>(t.storage().nbytes()), size = nbytes / static_cast<int64_t>(t.element_size());
  const at::Tensor copied = at::empty({0}, bytes).set_(t.storage(), 0, {nbytes}, {1}).clone();
  return at::empty({0}, t.options()).set_(copied.storage(), 0, {size}, {1});
}

// A new generator with a state.
at::Generator generator_with(const at::Generator& like, const at::Tensor& state) {
  const c10::Device device = like.device();
  at::Generator own = device.is_cpu() ? at::detail::createCPUGenerator()
                                      : at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
  own.set_state(state);
  return own;
}

// While it exists, a generator has another state.
class State {
 public:
  State(at::Generator generator, const at::Tensor& state) : generator_(std::move(generator)) {
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_state(state);
  }
  ~State() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

void call_boxed(const c10::OperatorHandle& op, std::vector<IValue>* stack) {
  const Unlocked unlocked;
  op.callBoxed(stack);
}

// The arguments of a call, with new lists of tensors, because those of `prepared` are shared, and tensors in them would outlive
// this step.
std::vector<IValue> arguments_of(const Prepared& prepared) {
  std::vector<IValue> stack = prepared.stack;
  for (IValue& argument : stack) {
    if (argument.isTensorList()) {
      argument = argument.toTensorList().copy();
    } else if (argument.isOptionalTensorList()) {
      argument = argument.toOptionalTensorList().copy();
    }
  }
  return stack;
}

void run_op(const Prepared& prepared, PyObject* rng, std::vector<IValue>* stack) {
  if (rng == Py_None) return call_boxed(prepared.op, stack);
  const at::Generator& generator = reinterpret_cast<THPGenerator*>(PyTuple_GET_ITEM(rng, 0))->cdata;
  const at::Tensor& state = THPVariable_Unpack(PyTuple_GET_ITEM(rng, 1));
  if (prepared.generator >= 0) {
    (*stack)[prepared.generator] = generator_with(generator, state);
    return call_boxed(prepared.op, stack);
  }
  const State recorded(generator, state);
  call_boxed(prepared.op, stack);
}

}  // namespace

bool rerun(const Call& call, const Versions& versions, const std::function<bool(const Version&)>& survives) {
  const auto* prepared = static_cast<Prepared*>(PyCapsule_GetPointer(call.prepared.ptr(), nullptr));
  if (prepared == nullptr) throw pybind11::error_already_set();
  if (call.rng.is_none() && prepared->generator >= 0) return false;
  const auto reads = numbers_in(call.reads);
  for (const int64_t id : reads)
    if (value_with(versions, id) == nullptr) return false;

  for (const int64_t id : reads) versions.at(id)->put_in_order();
  std::vector<Overwritten> overwritten;
  for (const auto& [old_id, new_id] : pairs_in(call.mutates)) {
    Version& old = *versions.at(old_id);
    overwritten.push_back({old_id, new_id, old, survives(old) ? copy_of(old.value) : old.value});
  }

  std::vector<IValue> stack = arguments_of(*prepared);
  for (const Input& input : prepared->inputs) {
    const at::Tensor* base = nullptr;
    for (const Overwritten& each : overwritten)
      if (each.old_id == input.window.version) base = &each.fresh;
    if (base == nullptr) base = value_with(versions, input.window.version);
    if (base == nullptr) return false;
    at::Tensor t = input.window.on(*base);
    IValue& argument = stack[input.argument];
    if (input.element < 0) {
      argument = std::move(t);
    } else if (argument.isTensorList()) {
      argument.toTensorList().set(input.element, std::move(t));
    } else {
      argument.toOptionalTensorList().set(input.element, std::move(t));
    }
  }
  for (const Number& number : prepared->numbers) stack[number.argument] = number.tensor();
  c10::GradMode::set_enabled(call.grad);
  run_op(*prepared, call.rng.ptr(), &stack);

  const auto results = tensors_in(stack);
  for (const auto& [index, id] : pairs_in(call.made)) {
    Version* const version = versions.at(id);
    if (version == nullptr || version->is_held()) continue;
    const at::Tensor& t = results.at(index);
    pybind11::object stream = pybind11::none();
    if (!t.is_cpu()) stream = pybind11::handle(current_stream)(wrapped(t.device()));
    version->rebuilt(t, stream);
  }
  for (const Overwritten& each : overwritten) {
    Version* const after = versions.at(each.new_id);
    const bool same = each.fresh.is_same(each.old.value);
    if (after != nullptr) after->rebuilt(each.fresh, each.old.stream);
    if (same) each.old.drop();
  }
  return true;
}

}  // namespace memopt
