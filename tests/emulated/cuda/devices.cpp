// The devices: their number, their properties, errors, and what was called.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unordered_set>

#include "emulated.h"

namespace emulated {

std::recursive_mutex lock;

static const char* text_of(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}
static size_t number_of(const char* name, const char* otherwise) { return strtoull(text_of(name, otherwise), nullptr, 10); }

const Settings& settings() {
  static const Settings all = [] {
    Settings s{};
    const std::string mode = text_of("EMULATED_MODE", "bytes");
    if (mode != "bits" && mode != "bytes") {
      fprintf(stderr, "emulated CUDA: EMULATED_MODE is \"bytes\" or \"bits\", not \"%s\"\n", mode.c_str());
      exit(2);
    }
    s.bits = mode == "bits";
    s.races = number_of("EMULATED_RACES", "0");
    s.devices = int(number_of("EMULATED_DEVICES", "1"));
    s.memory = number_of("EMULATED_MEMORY", "85899345920");
    s.capability = int(number_of("EMULATED_CAPABILITY", "90"));
    s.polls = int(number_of("EMULATED_POLLS", "4"));
    s.pinnable = number_of("EMULATED_PINNABLE", "18446744073709551615");
    s.link = double(number_of("EMULATED_LINK", "0"));
    return s;
  }();
  return all;
}

static thread_local int current = 0;
int current_device() { return current; }

static Immortal<std::map<int, bool>> contexts;
void opens_context(int device) { (*contexts)[device] = true; }
bool has_context(int device) { return (*contexts)[device]; }

static thread_local cudaError_t last_error = cudaSuccess;
static thread_local std::string last_why;
cudaError_t failed(cudaError_t error, const std::string& why) {
  last_why = why;
  return last_error = error;
}
cudaError_t failed(cudaError_t error) { return failed(error, ""); }
cudaError_t take_last_error() {
  const cudaError_t error = last_error;
  return last_error = cudaSuccess, error;
}

static Immortal<std::map<std::string, uint64_t>> counts;
void count(const std::string& what) { ++(*counts)[what]; }

static struct Statistics {
  ~Statistics() {
    if (!getenv("EMULATED_STATISTICS")) return;
    std::vector<std::pair<uint64_t, std::string>> sorted;
    for (auto& [what, n] : *counts) sorted.push_back({n, what});
    std::sort(sorted.rbegin(), sorted.rend());
    for (auto& [n, what] : sorted) fprintf(stderr, "emulated CUDA: %8llu %.160s\n", (unsigned long long)n, what.c_str());
  }
} at_exit;

}  // namespace emulated
using namespace emulated;

// Whether anything was asked of a device.
API int emulated_has_context(int device) {
  LOCK;
  return has_context(device);
}

// A function that is on build.py's list of those that may do nothing was called.
API void emulated_nothing(const char* name) {
  LOCK;
  count(std::string("nothing done: ") + name);
}
// A function that nobody wrote was called: its caller gets an error, and its user a line.
API void emulated_unknown(const char* name) {
  LOCK;
  static std::unordered_set<std::string> said;
  if (said.insert(name).second) fprintf(stderr, "emulated CUDA: %s is not emulated (tests/emulated/README.md)\n", name);
  if (!strncmp(name, "cuda", 4)) failed(cudaErrorNotSupported, std::string(name) + " is not emulated");
}

API cudaError_t cudaGetDeviceCount(int* n) { return *n = settings().devices, cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return failed(cudaErrorInvalidDevice);
  LOCK;
  return opens_context(device), current = device, cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

// An H100's, by CUDA's documentation; its memory and its capability are the environment's.
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "emulated CUDA device");
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = char(0xE0 + device);
  p->totalGlobalMem = settings().memory;
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->memPitch = 2147483647, p->totalConstMem = 65536;
  p->textureAlignment = p->surfaceAlignment = 512, p->texturePitchAlignment = 32;
  p->major = settings().capability / 10, p->minor = settings().capability % 10;
  p->multiProcessorCount = 132, p->l2CacheSize = 50 << 20, p->persistingL2CacheMaxSize = 32 << 20;
  p->memoryBusWidth = 5120, p->asyncEngineCount = 3, p->concurrentKernels = 1, p->unifiedAddressing = 1;
  p->managedMemory = p->concurrentManagedAccess = 1, p->canMapHostMemory = 1, p->streamPrioritiesSupported = 1;
  p->cooperativeLaunch = 1, p->memoryPoolsSupported = 1, p->ECCEnabled = 1, p->hostRegisterSupported = 1;
  p->pciBusID = device + 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = int(p.reservedSharedMemPerBlock); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1700000; break;
    case cudaDevAttrMemoryClockRate: *value = 2600000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
    default: *value = 0;  // no such feature
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int device) {
  return snprintf(text, n, "0000:%02x:00.0", device + 1), cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  LOCK;
  opens_context(current);
  return synchronize_device(current), cudaSuccess;
}

API cudaError_t cudaGetLastError() { return take_last_error(); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return last_why.empty() ? "operation not supported" : last_why.c_str();
    default: return "an error of the emulated device";
  }
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : failed(cudaErrorNotSupported, std::string(name) + " is not emulated");
}
