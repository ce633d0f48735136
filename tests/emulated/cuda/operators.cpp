// ATen's operators on the emulated device.
//
// Bits mode: each operator that has a kernel for CUDA is computed by the CPU's kernel, on the same addresses. Its tensors are
// given to the CPU as tensors of the CPU over the same memory; what the CPU made anew is copied into memory of CUDA's allocator.
// An operator is done when it is called, after all that was asked for in its stream before, and it is an access to the memory of
// its tensors for the checker of races.
//
// Bytes mode: kernels compute nothing, and `equal` is true: values that nobody computed do not differ.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

extern "C" {
cudaError_t emulated_operator_begins(cudaStream_t stream);
void emulated_operator_ran(cudaStream_t stream, const char* name, size_t n, const uintptr_t* begins, const uintptr_t* ends,
                           const bool* writes);
}

namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

// These work with sizes, storages and streams alone, or they only allocate: CUDA's own are right.
const std::unordered_set<std::string> kOfTheHost = {
    "aten::empty", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
    "aten::resize_", "aten::set_", "aten::is_set_to", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::_efficientzerotensor", "aten::_fused_sdp_choice", "aten::_pin_memory", "aten::is_pinned", "aten::view_as_real",
    "aten::view_as_complex",
};
// These have one kernel for all devices, which asks for kernels that the CPU lacks.
const char* const kMore[] = {"aten::convolution", "aten::convolution_backward"};

// The bytes that a tensor may touch, from its first element to its last.
struct Accesses {
  std::vector<uintptr_t> begins, ends;
  std::vector<char> writes;

  void add(const at::Tensor& t, bool write) {
    if (t.numel() == 0) return;
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    begins.push_back(begin);
    ends.push_back(begin + (last + 1) * t.itemsize());
    writes.push_back(write);
  }
  void note(cudaStream_t stream, const std::string& name) const {
    const bool* writes_of = reinterpret_cast<const bool*>(writes.data());
    emulated_operator_ran(stream, name.c_str(), begins.size(), begins.data(), ends.data(), writes_of);
  }
};

// The tensors of one call, as the CPU sees them.
class Call {
 public:
  Accesses accesses;

  at::Tensor on_cpu(const at::Tensor& t, bool write) {
    if (!t.defined() || !t.is_cuda()) return t;
    if (t.layout() != at::kStrided) return t.cpu();  // its parts are copied: none is written to
    if (t._is_zerotensor()) return at::_efficientzerotensor(t.sizes(), t.options().device(c10::kCPU));  // it has no memory
    accesses.add(t, write);
    auto [it, is_new] = by_impl_.try_emplace(t.unsafeGetTensorImpl());
    if (is_new) {
      auto impl = c10::make_intrusive<c10::TensorImpl>(storage_of(t), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
      impl->set_storage_offset(t.storage_offset());
      impl->set_sizes_and_strides(t.sizes(), t.strides());
      it->second = {t, at::Tensor(std::move(impl))};
      if (t.is_conj()) it->second.cpu._set_conj(true);
      if (t.is_neg()) it->second.cpu._set_neg(true);
    }
    return it->second.cpu;
  }

  // What the caller gets for a tensor that the CPU's kernel returned.
  at::Tensor on_cuda(const at::Tensor& t, c10::Device device) {
    if (!t.defined() || !t.is_cpu()) return t;
    if (t.layout() != at::kStrided) return t.to(device);
    if (t._is_zerotensor()) return at::_efficientzerotensor(t.sizes(), t.options().device(device));
    for (auto& [_, known] : by_impl_)
      if (known.cpu.is_same(t)) return known.cuda;
    const auto options = t.options().device(device);
    auto shared = by_storage_.find(t.storage().unsafeGetStorageImpl());
    if (shared != by_storage_.end()) {
      at::Tensor view = at::empty({0}, options);
      return view.set_(shared->second, t.storage_offset(), t.sizes(), t.strides());
    }
    at::Tensor made = at::empty_strided(t.sizes(), t.strides(), options);
    if (t.numel()) memcpy(made.mutable_data_ptr(), t.const_data_ptr(), made.storage().nbytes());
    accesses.add(made, true);
    return made;
  }

  // Tensors whose size or memory the CPU's kernel changed: those of `out=`.
  void resize_changed() {
    for (auto& [_, known] : by_impl_) {
      auto& [cuda, cpu] = known;
      const bool moved = cpu.storage().data() != cuda.storage().data();
      if (!moved && cpu.sizes() == cuda.sizes() && cpu.strides() == cuda.strides()) continue;
      cuda.resize_(cpu.sizes());
      cuda.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
      if (moved && cpu.numel()) memcpy(cuda.mutable_data_ptr(), cpu.const_data_ptr(), cpu.numel() * cpu.itemsize());
    }
  }

 private:
  struct Known {
    at::Tensor cuda, cpu;
  };
  std::unordered_map<c10::TensorImpl*, Known> by_impl_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_of_;      // CUDA's storage -> the CPU's over the same memory
  std::unordered_map<c10::StorageImpl*, c10::Storage> by_storage_;  // the CPU's -> CUDA's

  c10::Storage storage_of(const at::Tensor& t) {
    c10::Storage& cpu = cpu_of_[t.storage().unsafeGetStorageImpl()];
    if (!cpu) {
      at::DataPtr memory(t.storage().mutable_data(), c10::Device(c10::kCPU));
      cpu = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(memory), c10::GetCPUAllocator(),
                         /*resizable=*/true);
      by_storage_[cpu.unsafeGetStorageImpl()] = t.storage();
    }
    return cpu;
  }
};

// While it lives, the CPU's default generator draws what the CUDA generator of a call says, and that one moves on.
class Random {
 public:
  Random(const OperatorHandle& op, const c10::optional<at::Generator>& given, c10::Device device) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    cpu_ = at::detail::getDefaultCPUGenerator();
    at::Generator cuda = given.has_value() ? *given : at::cuda::detail::getDefaultCUDAGenerator(device.index());
    std::lock_guard<std::mutex> of_cuda(cuda.mutex()), of_cpu(cpu_.mutex());
    const auto [seed, offset] = cuda.get<at::CUDAGeneratorImpl>()->philox_engine_inputs(4);
    before_ = cpu_.get_state();
    cpu_.set_current_seed(seed * 0x9E3779B97F4A7C15ull + offset);
  }
  ~Random() {
    if (!cpu_.defined()) return;
    std::lock_guard<std::mutex> held(cpu_.mutex());
    cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_;
  at::Tensor before_;
};

template <class Each>
c10::List<at::Tensor> mapped(const c10::IValue& tensors, Each each) {
  c10::List<at::Tensor> made;
  for (const at::Tensor& t : tensors.toTensorVector()) made.push_back(each(t));
  return made;
}

c10::Device device_of(const Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) return value.toTensor().device();
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector())
        if (t.defined() && t.is_cuda()) return t.device();
    if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) return value.toDevice();
  }
  return c10::Device(c10::kCUDA, c10::cuda::current_device());
}

void compute(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const c10::Device device = device_of(*stack, first);
  const c10::cuda::CUDAGuard on_device(device);  // as CUDA's own kernels have it: a default stream is that of the current device
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  C10_CUDA_CHECK(emulated_operator_begins(stream));
  Call call;
  c10::optional<at::Generator> generator;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    const auto* alias = schema.arguments()[i - first].alias_info();
    const bool write = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.on_cpu(value.toTensor(), write);
    } else if (value.isTensorList()) {
      value = mapped(value, [&](const at::Tensor& t) { return call.on_cpu(t, write); });
    } else if (value.isOptionalTensorList()) {
      c10::List<c10::optional<at::Tensor>> tensors;
      for (const c10::optional<at::Tensor>& t : value.toOptionalTensorVector())
        tensors.push_back(t.has_value() ? c10::optional<at::Tensor>(call.on_cpu(*t, write)) : c10::nullopt);
      value = std::move(tensors);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();
    }
  }
  {
    const Random random(op, generator, device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  call.resize_changed();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.on_cuda(value.toTensor(), device);
    } else if (value.isTensorList()) {
      value = mapped(value, [&](const at::Tensor& t) { return call.on_cuda(t, device); });
    }
  }
  call.accesses.note(stream, schema.name());
}

// Copies on one device are computed; those between the host and a device are the runtime's, which are late.
void copy(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor to = (*stack)[stack->size() - 3].toTensor(), from = (*stack)[stack->size() - 2].toTensor();
  if (to.device() == from.device()) return compute(op, keys, stack);
  at::Tensor written = to;
  const bool non_blocking = stack->back().toBool();
  at::native::copy_(written, from, non_blocking);
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, to);
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = c10::optional<at::Tensor>;
// The fused cell of an LSTM, which has no kernel for the CPU: the gates of both products are added up, in the order input,
// forget, cell, output; torch.nn.LSTMCell has the equations. The workspace holds the four gates.
Three lstm_cell(const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& cx, const MaybeTensor& input_bias,
                const MaybeTensor& hidden_bias) {
  at::Tensor gates = of_input + of_hidden;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias.has_value() && bias->defined()) gates = gates + *bias;
  const auto parts = gates.chunk(4, 1);
  const at::Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const at::Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}
Three lstm_cell_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy, const at::Tensor& cx, const at::Tensor& cy,
                         const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const at::Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3], tanh = cy.tanh();
  at::Tensor grad = grad_cy.has_value() && grad_cy->defined() ? *grad_cy : at::zeros_like(cy), of_output = at::zeros_like(cy);
  if (grad_hy.has_value() && grad_hy->defined()) {
    of_output = *grad_hy * tanh;
    grad = grad + *grad_hy * o * (1 - tanh * tanh);
  }
  const at::Tensor of_i = grad * g * i * (1 - i), of_f = grad * cx * f * (1 - f), of_g = grad * i * (1 - g * g);
  const at::Tensor gates = at::cat({of_i, of_f, of_g, of_output * o * (1 - o)}, 1);
  return {gates, grad * f, has_bias ? gates.sum(0) : at::Tensor()};
}
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

void always_equal(const OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor a = (*stack)[stack->size() - 2].toTensor(), b = (*stack)[stack->size() - 1].toTensor();
  const bool equal = a.sizes() == b.sizes() && a.dtype() == b.dtype();
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, equal);
}

using Boxed = void (*)(const OperatorHandle&, c10::DispatchKeySet, Stack*);
template <Boxed function>
void override(const c10::OperatorName& name) {
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  auto kernel = c10::KernelFunction::makeFromBoxedFunction<function>();
  kept.push_back(c10::Dispatcher::singleton().registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel), c10::nullopt, nullptr,
                                                           "emulated CUDA"));
}

class Silent : public c10::WarningHandler {  // that kernels are overridden is what we are here for
  void process(const c10::Warning&) override {}
};

}  // namespace

// Takes the operators over, when the process first asks for memory of the device (memory.cpp).
extern "C" void emulated_install(bool bits) {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  at::Context& context = at::globalContext();
  context.setSDPUseCuDNN(false);  // libraries.cpp has no plans of cuDNN for attention
  if (!bits) return override<always_equal>({"aten::equal", ""});
  context.setUserEnabledCuDNN(false);  // the operators of libraries have no kernels for the CPU
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA))
    if (!kOfTheHost.count(name.name) && name.name.compare(0, 6, "aten::") == 0) override<compute>(name);
  for (const char* name : kMore) override<compute>({name, ""});
  override<copy>({"aten::copy_", ""});
}
