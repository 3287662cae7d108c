// libnvidia-ml.so.1 of the emulated device, written from NVML's public documentation. It has what torch and monitors
// ask of a driver. Other functions are absent, as in an older driver.
// Readings are constants, or what cuda_emulator/nvml.py wrote to the file that CUDA_EMULATOR_NVML names.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#undef cudaGetDeviceProperties
#define API extern "C" __attribute__((visibility("default")))

extern "C" size_t cuda_emulator_used_bytes(int device);
extern "C" int cuda_emulator_has_context(int device);
extern "C" int cuda_emulator_installed();
extern "C" int cuda_emulator_visible_as(int number);
extern "C" void cuda_emulator_properties(cudaDeviceProp* properties, int number);

namespace {

using std::string;

enum Code {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NO_PERMISSION = 4,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  GPU_IS_LOST = 15
};

struct Device {};
using Handle = Device*;
Device devices[64];
std::mutex starts_mutex;
int starts = 0;

#define RETURN_ERROR(code) \
  if (int error = (code)) return error

int device_count() { return cuda_emulator_installed(); }
int index_of(Handle device) { return int(device - devices); }

int check_started() {
  std::lock_guard<std::mutex> lock(starts_mutex);
  return starts > 0 ? SUCCESS : UNINITIALIZED;
}
int check(Handle device) {
  RETURN_ERROR(check_started());
  return device >= devices && device < devices + device_count() ? SUCCESS : INVALID_ARGUMENT;
}

cudaDeviceProp properties(int index) {
  cudaDeviceProp found;
  cuda_emulator_properties(&found, index);
  return found;
}

// Without the file there are no lines.
std::map<string, string> lines() {
  std::map<string, string> found;
  const char* path = getenv("CUDA_EMULATOR_NVML");
  std::ifstream file(path ? path : "");
  for (string line; std::getline(file, line);) {
    const size_t space = line.find(' ');
    if (space != string::npos) found[line.substr(0, space)] = line.substr(space + 1);
  }
  return found;
}

// What the file says of one function of NVML. The most specific line counts: "1:function.0" is for device 1, argument 0.
class Line {
 public:
  Line(Handle device, const string& function, int argument = -1) {
    const string specific = function + "." + std::to_string(argument);
    const string own = std::to_string(index_of(device)) + ":";
    const auto all = lines();
    for (const string& name : {own + specific, own + function, specific, function}) {
      auto line = all.find(name);
      if (line == all.end()) continue;
      is_there = true;
      value = line->second;
      break;
    }
  }
  // "error 4" is NVML's code for what the function answers instead.
  int error() const { return value.rfind("error ", 0) == 0 ? atoi(value.c_str() + 6) : SUCCESS; }

  bool is_there = false;
  string value;
};

template <class T>
int read(Handle device, const char* function, T* out, unsigned long long usual, int argument = -1) {
  RETURN_ERROR(check(device));
  const Line line(device, function, argument);
  RETURN_ERROR(line.error());
  if (!out) return INVALID_ARGUMENT;
  *out = T(line.is_there ? strtoull(line.value.c_str(), nullptr, 0) : usual);
  return SUCCESS;
}

int write_text(const string& from, char* to, unsigned size) {
  if (!to) return INVALID_ARGUMENT;
  if (size <= from.size()) return INSUFFICIENT_SIZE;
  memcpy(to, from.c_str(), from.size() + 1);
  return SUCCESS;
}

string uuid_text(int index) {
  const cudaUUID_t uuid = properties(index).uuid;
  string found = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[3];
    snprintf(digits, sizeof digits, "%02x", (unsigned char)uuid.bytes[i]);
    found += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + string(digits);
  }
  return found;
}

struct Process {
  unsigned pid;
  unsigned long long used_bytes;
};
struct InstanceProcess {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance = ~0u, compute_instance = ~0u;
};

// This process, once it has used the device, and those of the file ("pid:bytes pid:bytes").
std::vector<Process> processes(Handle device, const Line& line) {
  std::vector<Process> found;
  const int here = cuda_emulator_visible_as(index_of(device));
  if (cuda_emulator_has_context(here)) found.push_back({unsigned(getpid()), cuda_emulator_used_bytes(here)});
  std::istringstream words(line.value);
  Process other;
  for (char colon; words >> other.pid >> colon >> other.used_bytes;) found.push_back(other);
  return found;
}

template <class Info>
int list_processes(Handle device, unsigned* count, Info* infos) {
  RETURN_ERROR(check(device));
  const Line line(device, "nvmlDeviceGetComputeRunningProcesses");
  RETURN_ERROR(line.error());
  if (!count) return INVALID_ARGUMENT;
  const auto found = processes(device, line);
  const unsigned room = *count;
  *count = unsigned(found.size());
  if (room < found.size()) return INSUFFICIENT_SIZE;
  for (size_t i = 0; i < found.size(); ++i) infos[i] = Info{found[i].pid, found[i].used_bytes};
  return SUCCESS;
}

template <class Memory>
int read_memory(Handle device, Memory* out) {
  RETURN_ERROR(check(device));
  RETURN_ERROR(Line(device, "nvmlDeviceGetMemoryInfo").error());
  if (!out) return INVALID_ARGUMENT;
  out->total = properties(index_of(device)).totalGlobalMem;
  out->used = 0;
  for (auto& process : processes(device, Line(device, "nvmlDeviceGetComputeRunningProcesses")))
    out->used += process.used_bytes;
  out->free = out->total > out->used ? out->total - out->used : 0;
  return SUCCESS;
}

}  // namespace

// The start, and the system

API int nvmlInitWithFlags(unsigned) {
  std::lock_guard<std::mutex> lock(starts_mutex);
  ++starts;
  return SUCCESS;
}
API int nvmlInit_v2() { return nvmlInitWithFlags(0); }
API int nvmlInit() { return nvmlInitWithFlags(0); }  // torch.cuda asks for this one by ctypes
API int nvmlDeviceGetCudaComputeCapability(Handle device, int* major, int* minor) {
  RETURN_ERROR(check(device));
  const auto found = properties(index_of(device));
  *major = found.major;
  *minor = found.minor;
  return SUCCESS;
}
API int nvmlDeviceGetIndex(Handle device, unsigned* index) {
  RETURN_ERROR(check(device));
  *index = index_of(device);
  return SUCCESS;
}
// Whether one device reaches the memory of another, as cudaDeviceCanAccessPeer answers.
API int nvmlDeviceGetP2PStatus(Handle device, Handle peer, int, int* status) {
  constexpr int OK = 0, NOT_SUPPORTED_BY_PAIR = 5;
  RETURN_ERROR(check(device));
  RETURN_ERROR(check(peer));
  *status = device == peer ? NOT_SUPPORTED_BY_PAIR : OK;
  return SUCCESS;
}
API int nvmlShutdown() {
  std::lock_guard<std::mutex> lock(starts_mutex);
  if (!starts) return UNINITIALIZED;
  --starts;
  return SUCCESS;
}
API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  RETURN_ERROR(check_started());
  return write_text("0.0-emulated", text, size);
}
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { return cudaDriverGetVersion(version); }
API int nvmlSystemGetCudaDriverVersion(int* version) { return cudaDriverGetVersion(version); }
API const char* nvmlErrorString(int code) {
  static const std::map<int, const char*> texts = {
      {SUCCESS, "Success"},
      {UNINITIALIZED, "Uninitialized"},
      {INVALID_ARGUMENT, "Invalid Argument"},
      {NOT_SUPPORTED, "Not Supported"},
      {NO_PERMISSION, "Insufficient Permissions"},
      {NOT_FOUND, "Not Found"},
      {INSUFFICIENT_SIZE, "Insufficient Size"},
      {GPU_IS_LOST, "GPU is lost"},
  };
  auto found = texts.find(code);
  return found == texts.end() ? "Unknown Error" : found->second;
}

// Which device

API int nvmlDeviceGetCount_v2(unsigned* count) {
  RETURN_ERROR(check_started());
  *count = unsigned(device_count());
  return SUCCESS;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* out) {
  RETURN_ERROR(check_started());
  if (index >= unsigned(device_count())) return INVALID_ARGUMENT;
  *out = &devices[index];
  return SUCCESS;
}
API int nvmlDeviceGetHandleByUUID(const char* uuid, Handle* out) {
  RETURN_ERROR(check_started());
  for (int i = 0; i < device_count(); ++i) {
    if (uuid_text(i) != uuid) continue;
    *out = &devices[i];
    return SUCCESS;
  }
  return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, Handle* out) {
  RETURN_ERROR(check_started());
  int domain, bus, slot;
  if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_ARGUMENT;
  for (int i = 0; i < device_count(); ++i) {
    const auto found = properties(i);
    if (found.pciDomainID != domain || found.pciBusID != bus || found.pciDeviceID != slot) continue;
    *out = &devices[i];
    return SUCCESS;
  }
  return NOT_FOUND;
}
API int nvmlDeviceGetName(Handle device, char* text, unsigned size) {
  RETURN_ERROR(check(device));
  return write_text(properties(index_of(device)).name, text, size);
}
API int nvmlDeviceGetUUID(Handle device, char* text, unsigned size) {
  RETURN_ERROR(check(device));
  return write_text(uuid_text(index_of(device)), text, size);
}
struct PciInfo {
  char legacy_bus_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
API int nvmlDeviceGetPciInfo_v3(Handle device, PciInfo* out) {
  RETURN_ERROR(check(device));
  const auto found = properties(index_of(device));
  memset(out, 0, sizeof *out);
  out->domain = unsigned(found.pciDomainID);
  out->bus = unsigned(found.pciBusID);
  out->device = unsigned(found.pciDeviceID);
  snprintf(out->bus_id, sizeof out->bus_id, "%08x:%02x:%02x.0", out->domain, out->bus, out->device);
  snprintf(out->legacy_bus_id, sizeof out->legacy_bus_id, "%s", out->bus_id + 4);
  return SUCCESS;
}

// Readings that are one number

#define READING(name, type, usual) \
  API int name(Handle device, type* out) { return read(device, #name, out, usual); }
#define READING_OF(name, usual)                                   \
  API int name(Handle device, unsigned argument, unsigned* out) { \
    return read(device, #name, out, usual, int(argument));        \
  }
READING_OF(nvmlDeviceGetClockInfo, 1000)
READING_OF(nvmlDeviceGetMaxClockInfo, 1000)
READING_OF(nvmlDeviceGetApplicationsClock, 1000)
READING_OF(nvmlDeviceGetDefaultApplicationsClock, 1000)
READING_OF(nvmlDeviceGetTemperature, 40)
READING(nvmlDeviceGetPowerUsage, unsigned, 100'000)
READING(nvmlDeviceGetEnforcedPowerLimit, unsigned, 500'000)
READING(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, 500'000)
READING(nvmlDeviceGetPersistenceMode, unsigned, 1)
READING(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 0)
READING(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 0)

API int nvmlDeviceGetMigMode(Handle device, unsigned* now, unsigned* pending) {
  RETURN_ERROR(read(device, __func__, now, 0));
  *pending = *now;
  return SUCCESS;
}
API int nvmlDeviceGetTotalEccErrors(Handle device, unsigned, unsigned, unsigned long long* out) {
  return read(device, __func__, out, 0);
}
struct Utilization {
  unsigned gpu_percent, memory_percent;
};
API int nvmlDeviceGetUtilizationRates(Handle device, Utilization* out) {
  RETURN_ERROR(read(device, __func__, &out->gpu_percent, 0));
  out->memory_percent = out->gpu_percent;
  return SUCCESS;
}
struct Violation {
  unsigned long long reference_us, violation_ns;
};
API int nvmlDeviceGetViolationStatus(Handle device, unsigned policy, Violation* out) {
  using namespace std::chrono;
  out->reference_us = (unsigned long long)duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
  return read(device, __func__, &out->violation_ns, 0, int(policy));
}

// Memory and processes

struct Memory {
  unsigned long long total, free, used;
};
API int nvmlDeviceGetMemoryInfo(Handle device, Memory* out) { return read_memory(device, out); }
struct MemoryWithReserve {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
API int nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryWithReserve* out) {
  RETURN_ERROR(read_memory(device, out));
  out->reserved = 0;
  return SUCCESS;
}
API int nvmlDeviceGetComputeRunningProcesses(Handle device, unsigned* count, Process* infos) {
  return list_processes(device, count, infos);
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned* count, InstanceProcess* infos) {
  return list_processes(device, count, infos);
}

// Torch looks these up when it starts NVML.
API int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
API int nvmlDeviceGetGpuFabricInfoV() { return NOT_SUPPORTED; }
