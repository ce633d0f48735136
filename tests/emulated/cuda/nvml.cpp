// NVML, as far as torch's allocator and the plugin ask it. There is no fabric, and nothing measures energy.
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))
#define NOT_SUPPORTED(name) \
  API int name() { return 3; }
namespace {
void* const kDevice = reinterpret_cast<void*>(uintptr_t(0x5000));
}
API int nvmlInit_v2() { return 0; }
API int nvmlShutdown() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = kDevice, 0; }
API int nvmlDeviceGetHandleByUUID(const char*, void** device) { return *device = kDevice, 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return *device = kDevice, 0; }
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) { return *n = 0, 0; }
API int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* n, void*) { return *n = 0, 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
API const char* nvmlErrorString(int) { return "not supported by the emulated device"; }
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlDeviceGetTotalEnergyConsumption)
NOT_SUPPORTED(nvmlDeviceGetPowerUsage)
NOT_SUPPORTED(nvmlDeviceGetSamples)
NOT_SUPPORTED(nvmlDeviceGetFieldValues)
