// Launches: of operators that the host computes, and of kernels that nothing computes, which are counted by name.
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <unordered_map>

namespace emulator {
namespace {

size_t launch_count = 0;
std::map<std::string, size_t>& unknown_counts() {
  static auto* counts = new std::map<std::string, size_t>;
  return *counts;
}
// What torch's libraries register when they are loaded.
std::unordered_map<const void*, const char*>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, const char*>;
  return *names;
}
struct Variable {
  size_t bytes;
  void* memory;
};
std::unordered_map<const void*, Variable>& variables() {
  static auto* variables = new std::unordered_map<const void*, Variable>;
  return *variables;
}
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

const char* name_of(const void* function) {
  Lock lock(state_mutex());
  auto found = kernel_names().find(function);
  return found == kernel_names().end() ? "a kernel without a name" : found->second;
}

// The kernel of torch.cuda._sleep: its argument is a number of cycles, and a cycle is a nanosecond here.
std::optional<std::chrono::nanoseconds> sleep_of(const char* name, void** arguments) {
  if (!arguments || !strstr(name, "spin_kernel")) return std::nullopt;
  return std::chrono::nanoseconds(*(const int64_t*)arguments[0]);
}

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, void** arguments, cudaStream_t stream) {
  const char* name = name_of(function);
  count_launch();
  Node node{CU_GRAPH_NODE_TYPE_KERNEL, name, nullptr, {}, nullptr, grid, block};
  if (const auto duration = sleep_of(name, arguments)) node.duration = *duration;
  else count_unknown(name);
  return submit(stream, std::move(node));
}

}  // namespace

void count_launch() {
  Lock lock(state_mutex());
  ++launch_count;
}
void count_unknown(const char* name) {
  Lock lock(state_mutex());
  ++unknown_counts()[name];
  trace("not emulated: %s", name);
}

}  // namespace emulator

using namespace emulator;

// For the operators: launches a kernel that `run(data)` computes. `drop(data)` frees it.
API int cuda_emulator_launch(cudaStream_t stream, const char* name, void (*run)(void*), void* data,
                             void (*drop)(void*)) {
  std::shared_ptr<void> held(data, drop);
  count_launch();
  Node node{CU_GRAPH_NODE_TYPE_KERNEL, name, [held = std::move(held), run] { run(held.get()); }};
  return set_error(submit(stream, std::move(node)), name);
}
// For the libraries that this device does not have.
API void cuda_emulator_count_call(const char* name) { count_unknown(name); }
API size_t cuda_emulator_launches(void) {
  Lock lock(state_mutex());
  return launch_count;
}
// "COUNT NAME" lines of what computed nothing; returns the length of the whole text.
API size_t cuda_emulator_unknown_names(char* out, size_t size) {
  Lock lock(state_mutex());
  std::string text;
  for (auto& [name, count] : unknown_counts()) text += std::to_string(count) + " " + name + "\n";
  if (out && size) {
    const size_t length = std::min(size - 1, text.size());
    memcpy(out, text.data(), length);
    out[length] = 0;
  }
  return text.size();
}

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  Lock lock(state_mutex());
  kernel_names()[host] = name;
}
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t bytes, int, int) {
  Lock lock(state_mutex());
  variables()[host] = {bytes, calloc(1, std::max<size_t>(bytes, 1))};
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  const auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t,
                                   cudaStream_t stream) {
  RETURN(launch_kernel((const void*)kernel, grid, block, arguments, stream));
}
API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                                 cudaStream_t stream) {
  RETURN(launch_kernel(function, grid, block, arguments, stream));
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                                            cudaStream_t stream) {
  RETURN(launch_kernel(function, grid, block, arguments, stream));
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  RETURN(launch_kernel(function, config->gridDim, config->blockDim, arguments, config->stream));
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  RETURN(submit(stream, {CU_GRAPH_NODE_TYPE_HOST, "host", [=] { function(data); }}));
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
  Lock lock(state_mutex());
  auto found = variables().find(symbol);
  if (found == variables().end()) RETURN(cudaErrorSymbolNotFound);
  memcpy((char*)found->second.memory + offset, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  Lock lock(state_mutex());
  auto found = variables().find(symbol);
  if (found == variables().end()) RETURN(cudaErrorSymbolNotFound);
  *address = found->second.memory;
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
