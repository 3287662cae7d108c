// What the device does not have answers "not supported", and the few calls to the driver that torch makes at its start.
#include "runtime.h"

#include <dlfcn.h>

using namespace emulator;

#define NOT_SUPPORTED(name, ...) \
  API cudaError_t name(__VA_ARGS__) { RETURN(cudaErrorNotSupported); }
NOT_SUPPORTED(cudaMallocAsync, void**, size_t, cudaStream_t)
NOT_SUPPORTED(cudaFreeAsync, void*, cudaStream_t)
NOT_SUPPORTED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
NOT_SUPPORTED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
NOT_SUPPORTED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
NOT_SUPPORTED(cudaIpcCloseMemHandle, void*)
NOT_SUPPORTED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
NOT_SUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NOT_SUPPORTED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
NOT_SUPPORTED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NOT_SUPPORTED(cudaGraphConditionalHandleCreate, cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned)
NOT_SUPPORTED(cudaGraphAddNode, cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
              cudaGraphNodeParams*)
NOT_SUPPORTED(cudaStreamAddCallback, cudaStream_t, cudaStreamCallback_t, void*, unsigned)
NOT_SUPPORTED(cudaLibraryLoadData, cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*,
              void**, unsigned)
NOT_SUPPORTED(cudaLibraryUnload, cudaLibrary_t)
NOT_SUPPORTED(cudaLibraryGetKernel, cudaKernel_t*, cudaLibrary_t, const char*)

API CUresult cuInit(unsigned) {
  initialize();
  return CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
  if (!is_initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  *count = device_count();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = has_context(device);
  return CUDA_SUCCESS;
}
static CUcontext only_context() {
  static int context;
  return (CUcontext)&context;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = only_context();
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = only_context();
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
