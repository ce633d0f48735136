// The driver: contexts, and the virtual memory that torch's expandable segments are made of.
#include <cuda.h>
#include <sys/mman.h>

#include "emulated.h"

#undef cuMemGetAddressRange

using namespace emulated;

namespace {
struct Physical {
  size_t nbytes;
  int device;
};
Immortal<std::map<CUmemGenericAllocationHandle, Physical>> made;
Immortal<std::map<CUdeviceptr, size_t>> mapped;
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(device) + 0x2000); }
}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int i) { return *device = i, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* n) { return *n = settings().devices, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device));  // the numbers are the same
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  return *flags = 0, *is_active = has_context(device), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return opens_context(device), *context = context_of(device), CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) { return *context = context_of(current_device()), CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return opens_context(current_device()), CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the emulated device", CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr p) {
  LOCK;
  const int device = device_of(reinterpret_cast<void*>(p));
  if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *static_cast<CUcontext*>(value) = context_of(device);
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *static_cast<int*>(value) = device;
  else return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* nbytes, CUdeviceptr p) {
  LOCK;
  auto it = mapped->upper_bound(p);
  if (it == mapped->begin()) return CUDA_ERROR_NOT_FOUND;
  --it;
  return *base = it->first, *nbytes = it->second, CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t* nbytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *nbytes = 2u << 20, CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp* p, unsigned long long) {
  LOCK;
  count("cuMemCreate");
  static CUmemGenericAllocationHandle last = 0;
  if (!take(p->location.id, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  (*made)[*handle = ++last] = {nbytes, p->location.id};
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  LOCK;
  count("cuMemRelease");
  auto it = made->find(handle);
  if (it == made->end()) return CUDA_ERROR_INVALID_VALUE;
  give_back(it->second.device, it->second.nbytes);
  return made->erase(it), CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* p, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  void* at = reserve_addresses(nbytes);
  return *p = reinterpret_cast<CUdeviceptr>(at), at ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t nbytes) {
  return munmap(reinterpret_cast<void*>(p), nbytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t nbytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  LOCK;
  count("cuMemMap");
  auto it = made->find(handle);
  if (it == made->end()) return CUDA_ERROR_INVALID_VALUE;
  (*mapped)[p] = nbytes;
  return add_range(reinterpret_cast<void*>(p), nbytes, it->second.device), CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr p, size_t nbytes) {
  LOCK;
  count("cuMemUnmap");
  synchronize_all();
  for (auto it = mapped->lower_bound(p); it != mapped->end() && it->first < p + nbytes; it = mapped->erase(it))
    remove_range(reinterpret_cast<void*>(it->first));
  return mprotect(reinterpret_cast<void*>(p), nbytes, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr p, size_t nbytes, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(p), nbytes, protection()) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
