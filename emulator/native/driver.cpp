// libcuda.so.1: what is not in native/runtime and libcaffe2_nvrtc.so links to. Everything answers "not supported" (801).
#define U(name) extern "C" int name() { return 801; }
U(cuDeviceGetAttribute) U(cuFuncGetAttribute) U(cuFuncSetAttribute) U(cuFuncSetCacheConfig) U(cuLaunchCooperativeKernel) U(cuLaunchKernel)
U(cuLinkAddData_v2) U(cuLinkComplete) U(cuLinkCreate_v2) U(cuModuleGetFunction) U(cuModuleLoad) U(cuModuleLoadData) U(cuModuleLoadDataEx)
U(cuModuleUnload) U(cuOccupancyMaxActiveBlocksPerMultiprocessor) U(cuPointerGetAttribute) U(cuTensorMapEncodeTiled)
