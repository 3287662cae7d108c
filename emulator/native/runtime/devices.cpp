// Devices: how many there are, and what they say of themselves.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#undef cudaGetDeviceProperties

namespace emulator {

// How many devices the machine has.
static int installed() {
  static const int count = [] {
    const char* wanted = getenv("CUDA_EMULATOR_DEVICES");
    const int n = wanted ? atoi(wanted) : 1;
    return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : n;
  }();
  return count;
}
static std::string uuid_of(int number) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    snprintf(digits, sizeof digits, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", i + number);
    text += digits;
  }
  return text;
}
// The device that a word of CUDA_VISIBLE_DEVICES names by its number or by the beginning of its UUID, or -1.
static int named(const std::string& word) {
  int found = -1;
  for (int number = 0; number < installed(); ++number) {
    if (word == std::to_string(number)) return number;
    if (word.compare(0, 4, "GPU-") || uuid_of(number).compare(0, word.size(), word)) continue;
    if (found >= 0) return -1;
    found = number;
  }
  return found;
}
// The devices of this process: those of CUDA_VISIBLE_DEVICES up to the first word that names none. Read once.
static const std::vector<int>& visible() {
  static const std::vector<int> found = [] {
    std::vector<int> devices;
    const char* words = getenv("CUDA_VISIBLE_DEVICES");
    if (!words)
      for (int number = 0; number < installed(); ++number) devices.push_back(number);
    std::stringstream rest(words ? words : "");
    for (std::string word; std::getline(rest, word, ',');) {
      const int number = named(word);
      if (number < 0 || std::count(devices.begin(), devices.end(), number)) break;
      devices.push_back(number);
    }
    return devices;
  }();
  return found;
}
int device_count() { return (int)visible().size(); }
int& current_device() {
  thread_local int device = 0;
  return device;
}
static std::atomic<bool> initialized = false;
static std::atomic<bool> contexts[MAX_DEVICES] = {};
bool is_initialized() { return initialized; }
void initialize() { initialized = true; }
void make_context(int device) { initialized = contexts[device] = true; }
bool has_context(int device) { return device >= 0 && device < MAX_DEVICES && contexts[device]; }
static bool exists(int device) { return device >= 0 && device < device_count(); }

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaGetDeviceCount(int* count) {
  initialize();
  *count = device_count();
  RETURN(*count ? cudaSuccess : cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) RETURN(cudaErrorInvalidDevice);
  current_device() = device;
  make_context(device);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// For NVML, which knows nothing of CUDA_VISIBLE_DEVICES: its numbers are those of the machine.
API int cuda_emulator_installed() { return installed(); }
// The number of a device of the machine in this process, or -1.
API int cuda_emulator_visible_as(int number) {
  const auto found = std::find(visible().begin(), visible().end(), number);
  return found == visible().end() ? -1 : int(found - visible().begin());
}
// The figures are those of a large GPU of compute capability 9.0, so that torch takes the paths of one.
API void cuda_emulator_properties(cudaDeviceProp* properties, int number) {
  cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "Emulated CUDA device (host memory)");
  for (int i = 0; i < 16; ++i) p.uuid.bytes[i] = (char)(i + number);
  size_t free_bytes;
  cudaMemGetInfo(&free_bytes, &p.totalGlobalMem);
  p.major = 9;
  p.warpSize = 32;
  p.multiProcessorCount = 132;
  p.regsPerBlock = 65536;
  p.totalConstMem = 65536;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.reservedSharedMemPerBlock = 1024;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.textureAlignment = 512;
  p.memoryBusWidth = 6144;
  p.l2CacheSize = 50 << 20;
  p.asyncEngineCount = 3;
  p.pciBusID = number + 1;
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.managedMemory = 1;
  p.streamPrioritiesSupported = p.cooperativeLaunch = 1;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!exists(device)) RETURN(cudaErrorInvalidDevice);
  cuda_emulator_properties(properties, visible()[device]);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) RETURN(cudaErrorInvalidDevice);
  switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!exists(device)) RETURN(cudaErrorInvalidDevice);
  snprintf(text, size, "0000:%02x:00.0", visible()[device] + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  static std::set<std::pair<int, int>> enabled;
  Lock lock(state_mutex());
  if (!exists(peer) || peer == current_device()) RETURN(cudaErrorInvalidDevice);
  RETURN(enabled.insert({current_device(), peer}).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
// It waits for the streams of the device that capture too, in every mode: the captures are over.
API cudaError_t cudaDeviceSynchronize() {
  {
    Lock lock(state_mutex());
    bool is_refused = false;
    for (const auto& capture : captures()) {
      const auto& members = capture->members;
      const auto is_here = [](const StreamPtr& member) { return member->device == current_device(); };
      if (std::none_of(members.begin(), members.end(), is_here)) continue;
      invalidate(*capture);
      is_refused = true;
    }
    if (is_refused) RETURN(cudaErrorStreamCaptureUnsupported);
  }
  finish_device(current_device());
  RETURN(cudaSuccess);
}
