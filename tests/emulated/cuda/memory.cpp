// Memory of the devices, and page-locked memory of the host.
//
// A device's memory is address space of the process. In bytes mode nobody can touch it, so that it takes none of the host's; in
// bits mode it holds the values.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "emulated.h"

namespace emulated {

static constexpr size_t kPage = 2u << 20;  // of the driver's memory
struct Extent {
  size_t nbytes;
  int device;
};
using Extents = std::map<uintptr_t, Extent>;  // by their first byte
static Immortal<Extents> of_devices, pinned;
static Immortal<Extents> made;                 // by `allocate`
static Immortal<std::map<int, size_t>> used;  // device -> bytes

static const Extent* find(const Extents& in, const void* p) {
  auto it = in.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (it == in.begin()) return nullptr;
  --it;
  return reinterpret_cast<uintptr_t>(p) < it->first + it->second.nbytes ? &it->second : nullptr;
}
bool is_device(const void* p) { return find(*of_devices, p) != nullptr; }
bool is_pinned(const void* p) { return find(*pinned, p) != nullptr; }
int device_of(const void* p) {
  const Extent* extent = find(*of_devices, p);
  return extent ? extent->device : current_device();
}
Range range(const void* p, size_t nbytes, bool write) {
  return {reinterpret_cast<uintptr_t>(p), reinterpret_cast<uintptr_t>(p) + nbytes, write};
}

// operators.cpp is in a library of its own: it needs torch's, which need this one.
static void install_operators() {
  static bool done = false;
  if (done) return;
  done = true;
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&install_operators), &own);
  const std::string folder = std::string(own.dli_fname).substr(0, std::string(own.dli_fname).rfind('/'));
  void* library = dlopen((folder + "/operators.so").c_str(), RTLD_NOW);
  auto install = library ? reinterpret_cast<void (*)(bool)>(dlsym(library, "emulated_install")) : nullptr;
  if (install) return install(settings().bits);
  fprintf(stderr, "emulated CUDA: %s\n", dlerror());
  abort();
}

bool take(int device, size_t nbytes) {
  install_operators();
  if (nbytes > settings().memory - (*used)[device]) return false;
  (*used)[device] += nbytes;
  return true;
}
void give_back(int device, size_t nbytes) { (*used)[device] -= nbytes; }

int protection() { return settings().bits ? PROT_READ | PROT_WRITE : PROT_NONE; }
void* reserve_addresses(size_t nbytes) {
  void* raw = mmap(nullptr, nbytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(raw);
  char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kPage - 1) & ~uintptr_t(kPage - 1));
  if (at != begin) munmap(begin, at - begin);
  munmap(at + nbytes, begin + kPage - at);
  return at;
}
void add_range(void* p, size_t nbytes, int device) { (*of_devices)[reinterpret_cast<uintptr_t>(p)] = {nbytes, device}; }
void remove_range(void* p) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  auto it = of_devices->find(at);
  if (it == of_devices->end()) return;
  forget(at, at + it->second.nbytes);
  of_devices->erase(it);
}

void* allocate(int device, size_t nbytes) {
  const size_t whole = (nbytes + kPage - 1) & ~(kPage - 1);
  if (!take(device, whole)) return nullptr;
  void* at = reserve_addresses(whole);
  if (!at || mprotect(at, whole, protection())) return give_back(device, whole), nullptr;
  add_range(at, whole, device);
  (*made)[reinterpret_cast<uintptr_t>(at)] = {whole, device};
  return at;
}

}  // namespace emulated
using namespace emulated;

API cudaError_t cudaMalloc(void** p, size_t nbytes) {
  LOCK;
  count("cudaMalloc");
  opens_context(current_device());
  if (nbytes == 0) return *p = nullptr, cudaSuccess;
  *p = allocate(current_device(), nbytes);
  return *p ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* p) {
  LOCK;
  count("cudaFree");
  if (p == nullptr) return cudaSuccess;
  auto it = made->find(reinterpret_cast<uintptr_t>(p));
  if (it == made->end()) return failed(cudaErrorInvalidValue);
  synchronize_all();  // as CUDA's does
  remove_range(p);
  munmap(p, it->second.nbytes);
  give_back(it->second.device, it->second.nbytes);
  made->erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** p, size_t nbytes, cudaStream_t) { return cudaMalloc(p, nbytes); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(device) + 1), cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  LOCK;
  return *static_cast<uint64_t*>(value) = (*used)[int(reinterpret_cast<uintptr_t>(pool)) - 1], cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
  LOCK;
  opens_context(current_device());
  return *left = settings().memory - (*used)[current_device()], *all = settings().memory, cudaSuccess;
}

static cudaError_t pin(void* p, size_t nbytes) {
  size_t locked = 0;
  for (auto& [_, extent] : *pinned) locked += extent.nbytes;
  if (locked + nbytes > settings().pinnable) return failed(cudaErrorMemoryAllocation);  // as where `ulimit -l` forbids it
  (*pinned)[reinterpret_cast<uintptr_t>(p)] = {nbytes, current_device()};
  return cudaSuccess;
}
static bool unpin(void* p) {
  auto it = pinned->find(reinterpret_cast<uintptr_t>(p));
  if (it == pinned->end()) return false;
  forget(it->first, it->first + it->second.nbytes);
  pinned->erase(it);
  return true;
}
API cudaError_t cudaHostAlloc(void** p, size_t nbytes, unsigned) {
  LOCK;
  count("cudaHostAlloc");
  opens_context(current_device());
  if (nbytes == 0) return *p = nullptr, cudaSuccess;
  *p = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  const cudaError_t error = pin(*p, nbytes);
  if (error != cudaSuccess) munmap(*p, nbytes);
  return error;
}
API cudaError_t cudaFreeHost(void* p) {
  LOCK;
  if (p == nullptr) return cudaSuccess;
  const Extent* extent = find(*pinned, p);
  if (!extent) return failed(cudaErrorInvalidValue);
  synchronize_all();
  munmap(p, extent->nbytes);
  unpin(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t nbytes, unsigned) {
  LOCK;
  count("cudaHostRegister");
  opens_context(current_device());
  return is_pinned(p) ? failed(cudaErrorHostMemoryAlreadyRegistered) : pin(p, nbytes);
}
API cudaError_t cudaHostUnregister(void* p) {
  LOCK;
  count("cudaHostUnregister");
  synchronize_all();
  return unpin(p) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCK;
  memset(a, 0, sizeof *a);
  const Extent *device = find(*of_devices, p), *host = find(*pinned, p);
  a->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = device ? device->device : host ? host->device : cudaInvalidDeviceId;
  if (device || host) a->devicePointer = const_cast<void*>(p);
  if (host) a->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}
