// What the mathematical libraries must answer: versions, sizes of workspaces, handles. Their kernels compute nothing (build.py has
// the list), and are not ops of a stream. Compiled once for each library, with PART_<library> defined.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))
using P = void*;

#ifdef PART_cublas
API int cublasGetMathMode(P, int* value) { return *value = 0; }
API int cublasGetPointerMode_v2(P, int* value) { return *value = 0; }
API int cublasGetVersion_v2(P, int* version) { return *version = 130100, 0; }
#endif

#ifdef PART_cublasLt
API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulAlgoGetHeuristic(P, P, P, P, P, P, P, int, P results, int* n) {
  memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t: success, without a workspace
  return *n = 1, 0;
}
#endif

#ifdef PART_cudnn
API size_t cudnnGetVersion() { return 92400; }
API size_t cudnnGetCudartVersion() { return 13000; }
API int cudnnGetProperty(int kind, int* value) { return *value = kind == 0 ? 9 : kind == 1 ? 24 : 0, 0; }
API int cudnnBackendCreateDescriptor(int, P* descriptor) { return *descriptor = calloc(1, 64), 0; }
API int cudnnBackendDestroyDescriptor(P descriptor) { return free(descriptor), 0; }
API int cudnnBackendGetAttribute(P, int name, int type, int64_t wanted, int64_t* n, P to) {
  constexpr int kInt64 = 3, kDescriptor = 15, kWorkspaceOfPlan = 402;  // cudnn_graph.h
  if (n) *n = type == kDescriptor || type == kInt64;
  const char* workspace = getenv("EMULATED_WORKSPACE");
  if (type == kInt64 && wanted > 0 && to)
    *static_cast<int64_t*>(to) = name == kWorkspaceOfPlan && workspace ? atoll(workspace) : 0;
  return 0;
}
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(P, int, int, P, P, P, P, P, size_t* n) { return *n = 0, 0; }
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(P, int, int, P, P, P, P, P, P, P, size_t* n) { return *n = 0, 0; }
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(P, int, int, P, P, size_t* n) { return *n = 0, 0; }
API int cudnnDropoutGetStatesSize(P, size_t* n) { return *n = 1 << 20, 0; }
API int cudnnGetRNNTempSpaceSizes(P, P, int, P, size_t* work, size_t* reserve) { return *work = *reserve = 1 << 16, 0; }
API int cudnnGetRNNWeightSpaceSize(P, P, size_t* n) { return *n = 1 << 16, 0; }
#endif

#ifdef PART_nccl
API int ncclGetVersion(int* version) { return *version = 23007, 0; }
#endif

#ifdef PART_nvrtc
API int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
API int nvrtcGetPTXSize(P, size_t* n) { return *n = 1, 0; }
API int nvrtcGetCUBINSize(P, size_t* n) { return *n = 1, 0; }
API int nvrtcGetProgramLogSize(P, size_t* n) { return *n = 1, 0; }
API int nvrtcGetLoweredName(P, const char*, const char** name) { return *name = "kernel", 0; }
#endif
