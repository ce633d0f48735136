// Kernels are registered and launched, and compute nothing: in bytes mode there are no values, and in bits mode operators.cpp
// computes each operator of ATen on the CPU. A launch in bits mode is an operator that it does not know.
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "emulated.h"

namespace emulated {

static constexpr double kSeconds = 4e-6;  // of a kernel, by the device's clock
static constexpr double kClockRate = 1.7e9;
static Immortal<std::unordered_map<const void*, std::string>> kernels;  // function of the host -> name
struct Variable {
  size_t nbytes;
  void* at;
};
static Immortal<std::unordered_map<const void*, Variable>> variables;

static std::string readable(const std::string& mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  const std::string name = text ? text : mangled;
  free(text);
  return name.compare(0, 5, "void ") == 0 ? name.substr(5) : name;
}

static cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  LOCK;
  auto it = kernels->find(function);
  const std::string name = it == kernels->end() ? "a kernel" : readable(it->second);
  count(name);
  const bool spins = name.find("spin_kernel") != std::string::npos;  // torch.cuda._sleep
  if (settings().bits && !spins) {
    fprintf(stderr, "emulated CUDA: %.300s was launched; in bits mode nothing computes it (tests/emulated/README.md)\n", name.c_str());
    return failed(cudaErrorNotSupported, "no kernel runs on the emulated device: " + name);
  }
  const double seconds = spins ? double(*static_cast<int64_t*>(arguments[0])) / kClockRate : kSeconds;
  return enqueue(stream_of(stream), {}, seconds, {}, name), cudaSuccess;
}

}  // namespace emulated
using namespace emulated;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  LOCK;
  (*kernels)[host] = name;
}
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t nbytes, int, int) {
  LOCK;
  (*variables)[host] = {nbytes, nullptr};
}
API char __cudaInitModule(void**) { return 1; }

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;
}  // namespace
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared, *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void** arguments) {
  return launch(function, arguments, c->stream);
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  LOCK;
  Variable& v = (*variables)[symbol];
  if (!v.at) v.at = allocate(current_device(), std::max<size_t>(v.nbytes, 1));
  return *p = v.at, v.at ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->numRegs = 32, a->maxThreadsPerBlock = 1024, a->ptxVersion = a->binaryVersion = settings().capability;
  a->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int block, size_t shared, unsigned) {
  const int by_threads = 2048 / std::max(1, block), by_shared = shared ? int((228u << 10) / shared) : 32;
  *n = std::clamp(std::min(by_threads, by_shared), 1, 32);
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* function, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, function, block, shared, 0);
}
