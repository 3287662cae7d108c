// A CUDA runtime (13.0 ABI) of one device that is this process's own memory. See README.md.
// Written from the public headers and documentation of CUDA only.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#undef cudaGetDeviceProperties
#define API extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;
std::recursive_mutex& mu() { static auto* m = new std::recursive_mutex; return *m; }
#define LOCK std::lock_guard<std::recursive_mutex> lock_(mu())

bool trace() { static bool t = getenv("CUDA_EMULATOR_TRACE"); return t; }
void note(const char* fmt, ...) {
  if (!trace()) return;
  va_list ap; va_start(ap, fmt); fputs("[cuda_emulator] ", stderr); vfprintf(stderr, fmt, ap); fputc('\n', stderr); va_end(ap);
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_now = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
int device_count() { static int n = getenv("CUDA_EMULATOR_DEVICES") ? atoi(getenv("CUDA_EMULATOR_DEVICES")) : 1; return n; }

cudaError_t set(cudaError_t e, const char* who = "") {
  if (e != cudaSuccess) { last_error = e; note("%s -> %d", who, (int)e); }
  return e;
}
#define RET(e) return set((e), __func__)

// ---- memory ------------------------------------------------------------------------------------------------------
struct Block { size_t bytes; int device; bool host; size_t mapped; };
std::map<uintptr_t, Block>& blocks() { static auto* b = new std::map<uintptr_t, Block>; return *b; }
size_t used_bytes[64] = {};
size_t total_bytes() { static size_t t = getenv("CUDA_EMULATOR_MEMORY") ? strtoull(getenv("CUDA_EMULATOR_MEMORY"), 0, 10) : (8ull << 30); return t; }
Block* find_block(const void* p) {
  auto it = blocks().upper_bound((uintptr_t)p);
  if (it == blocks().begin()) return nullptr;
  --it;
  return (uintptr_t)p < it->first + it->second.bytes ? &it->second : nullptr;
}
cudaError_t allocate(void** out, size_t n, bool host) {
  LOCK;
  if (!n) { *out = nullptr; return cudaSuccess; }
  if (!host && used_bytes[device_now] + n > total_bytes()) return cudaErrorMemoryAllocation;
  size_t mapped = (n + 0x1fffff) & ~size_t(0x1fffff);
  void* p = mmap(nullptr, mapped + 0x200000, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
  uintptr_t base = ((uintptr_t)p + 0x1fffff) & ~uintptr_t(0x1fffff);  // 2 MiB, as segments of the driver are
  if (base > (uintptr_t)p) munmap(p, base - (uintptr_t)p);
  uintptr_t end = (uintptr_t)p + mapped + 0x200000;
  if (end > base + mapped) munmap((void*)(base + mapped), end - base - mapped);
  blocks()[base] = {n, device_now, host, mapped};
  if (!host) used_bytes[device_now] += n;
  *out = (void*)base;
  return cudaSuccess;
}
cudaError_t release(void* p) {
  LOCK;
  if (!p) return cudaSuccess;
  auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end()) return cudaErrorInvalidValue;
  if (!it->second.host) used_bytes[it->second.device] -= it->second.bytes;
  munmap(p, it->second.mapped);  // a use after this is a segmentation fault: the device's illegal memory access
  blocks().erase(it);
  return cudaSuccess;
}

// ---- graphs, streams, events ---------------------------------------------------------------------------------------
struct Graph;
struct Node {
  CUgraphNodeType type; std::string name; std::function<void()> run; std::vector<Node*> deps; std::shared_ptr<Graph> child;
  dim3 grid{1, 1, 1}, block{1, 1, 1}; bool emulated = true; unsigned id = 0;
};
struct Graph : std::enable_shared_from_this<Graph> {
  std::vector<std::shared_ptr<Node>> nodes;
  Node* add(CUgraphNodeType type, std::string name, std::vector<Node*> deps, std::function<void()> run) {
    auto n = std::make_shared<Node>();
    n->type = type; n->name = std::move(name); n->deps = std::move(deps); n->run = std::move(run); n->id = nodes.size();
    nodes.push_back(n);
    return nodes.back().get();
  }
};
struct Exec { std::shared_ptr<Graph> graph; };
std::map<Graph*, std::shared_ptr<Graph>>& graph_refs() { static auto* g = new std::map<Graph*, std::shared_ptr<Graph>>; return *g; }

struct Stream;
struct Capture {
  unsigned long long id; std::shared_ptr<Graph> graph; cudaStreamCaptureMode mode; Stream* origin; std::thread::id thread;
  bool invalid = false; bool into_graph = false; std::set<Stream*> members;
};
struct Stream {
  int device; unsigned flags; int priority; std::shared_ptr<Capture> capture; std::vector<Node*> deps;
  std::vector<cudaGraphNode_t> shown;
};
struct Event { unsigned flags; bool recorded = false; Clock::time_point at; std::weak_ptr<Capture> capture; bool captured = false; std::vector<Node*> deps; };

std::set<Stream*>& streams() { static auto* s = new std::set<Stream*>; return *s; }
std::set<Event*>& events() { static auto* s = new std::set<Event*>; return *s; }
std::set<std::shared_ptr<Capture>>& captures() { static auto* s = new std::set<std::shared_ptr<Capture>>; return *s; }
Stream& legacy() { static auto* s = new Stream{0, 0, 0, nullptr, {}, {}}; return *s; }
Stream* of(cudaStream_t s) {
  if ((uintptr_t)s <= 2) return &legacy();
  auto* p = (Stream*)s;
  return streams().count(p) ? p : nullptr;
}
void invalidate(Capture& c) { c.invalid = true; note("capture %llu invalidated", c.id); }

// Rules of cudaThreadExchangeStreamCaptureMode for "potentially unsafe" calls.
cudaError_t unsafe(const char* who) {
  LOCK;
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool bad = false;
  for (auto& c : captures()) {
    bool mine = c->thread == std::this_thread::get_id() && c->mode != cudaStreamCaptureModeRelaxed;
    bool global = c->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (mine || global) { invalidate(*c); bad = true; }
  }
  if (bad) note("%s is unsafe during a capture", who);
  return bad ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
#define UNSAFE() do { cudaError_t e_ = unsafe(__func__); if (e_) RET(e_); } while (0)

// Work on the legacy stream would wait for blocking streams: refused while one of them captures.
cudaError_t implicit(Stream* s) {
  if (s != &legacy()) return cudaSuccess;
  bool bad = false;
  for (auto& c : captures())
    for (auto* m : c->members) if (!(m->flags & cudaStreamNonBlocking)) { invalidate(*c); bad = true; break; }
  return bad ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

size_t launches = 0, unknown_launches = 0;
std::map<std::string, size_t>& unknown() { static auto* u = new std::map<std::string, size_t>; return *u; }

// Put one piece of work on a stream: into the graph if it captures, else done at once.
cudaError_t submit(cudaStream_t stream, CUgraphNodeType type, std::string name, std::function<void()> run, dim3 grid = {1, 1, 1},
                   dim3 block = {1, 1, 1}, bool emulated = true, std::shared_ptr<Graph> child = nullptr) {
  std::unique_lock<std::recursive_mutex> lock(mu());
  Stream* s = of(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (auto e = implicit(s)) return e;
  if (s->capture) {
    if (s->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    Node* n = s->capture->graph->add(type, std::move(name), s->deps, std::move(run));
    n->grid = grid; n->block = block; n->emulated = emulated; n->child = child;
    s->deps = {n};
    return cudaSuccess;
  }
  lock.unlock();
  if (run) run();
  return cudaSuccess;
}

std::unordered_map<const void*, const char*>& kernels() { static auto* k = new std::unordered_map<const void*, const char*>; return *k; }
struct Var { size_t bytes; void* memory; };
std::unordered_map<const void*, Var>& vars() { static auto* v = new std::unordered_map<const void*, Var>; return *v; }

cudaError_t launch(const void* f, dim3 g, dim3 b, cudaStream_t stream) {
  const char* name;
  {
    LOCK;
    auto it = kernels().find(f);
    name = it == kernels().end() ? "?" : it->second;
    ++launches; ++unknown_launches; ++unknown()[name];
  }
  note("kernel not emulated: %s", name);
  return submit(stream, CU_GRAPH_NODE_TYPE_KERNEL, name, nullptr, g, b, false);
}

void run_graph(Graph& g) { for (auto& n : g.nodes) { if (n->child) run_graph(*n->child); else if (n->run) n->run(); } }
const char* dim_type(CUgraphNodeType t) {
  switch (t) { case CU_GRAPH_NODE_TYPE_KERNEL: return "KERNEL"; case CU_GRAPH_NODE_TYPE_MEMCPY: return "MEMCPY"; case CU_GRAPH_NODE_TYPE_MEMSET: return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST: return "HOST"; case CU_GRAPH_NODE_TYPE_GRAPH: return "GRAPH"; default: return "EMPTY"; }
}
struct Name { const char* name; const char* text; };
const std::map<int, Name>& error_names() {
  static auto* m = new std::map<int, Name>{
    {0, {"cudaSuccess", "no error"}}, {1, {"cudaErrorInvalidValue", "invalid argument"}}, {2, {"cudaErrorMemoryAllocation", "out of memory"}},
    {100, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}}, {101, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
    {400, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}}, {401, {"cudaErrorIllegalState", "the operation cannot be performed in the present state"}},
    {500, {"cudaErrorSymbolNotFound", "named symbol not found"}}, {600, {"cudaErrorNotReady", "device not ready"}}, {700, {"cudaErrorIllegalAddress", "an illegal memory access was encountered"}},
    {704, {"cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}}, {801, {"cudaErrorNotSupported", "operation not supported"}},
    {900, {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
    {901, {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
    {902, {"cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"}},
    {903, {"cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"}},
    {904, {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
    {905, {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
    {906, {"cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"}},
    {907, {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"}},
    {908, {"cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"}}};
  return *m;
}
}  // namespace

// ---- for the kernels that run on the host (native/operators) and for tests ---------------------------------------------
API int cuda_emulator_launch(cudaStream_t stream, const char* name, void (*run)(void*), void* data, void (*drop)(void*)) {
  std::shared_ptr<void> held(data, drop);
  { LOCK; ++launches; }
  return set(submit(stream, CU_GRAPH_NODE_TYPE_KERNEL, name, [held, run] { run(held.get()); }), name);
}
API size_t cuda_emulator_launches(void) { LOCK; return launches; }
API size_t cuda_emulator_unknown_launches(void) { LOCK; return unknown_launches; }
API size_t cuda_emulator_unknown_names(char* out, size_t n) {
  LOCK; std::string all;
  for (auto& [k, v] : unknown()) all += std::to_string(v) + " " + k + "\n";
  if (out && n) { size_t m = std::min(n - 1, all.size()); memcpy(out, all.data(), m); out[m] = 0; }
  return all.size();
}
API void cuda_emulator_count_call(const char* name) {
  LOCK; ++unknown_launches; ++unknown()[name]; note("library call not emulated: %s", name);
}
API size_t cuda_emulator_used_bytes(int device) { LOCK; return used_bytes[device]; }

// ---- devices -----------------------------------------------------------------------------------------------------------
API cudaError_t cudaGetDeviceCount(int* n) { *n = device_count(); return cudaSuccess; }
API cudaError_t cudaGetDevice(int* d) { *d = device_now; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= device_count()) RET(cudaErrorInvalidDevice); device_now = d; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= device_count()) RET(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Emulated CUDA device (host memory)");
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = (char)(i + d);
  p->totalGlobalMem = total_bytes(); p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = 9; p->minor = 0; p->textureAlignment = 512; p->multiProcessorCount = 132; p->canMapHostMemory = 1; p->concurrentKernels = 1;
  p->asyncEngineCount = 3; p->unifiedAddressing = 1; p->memoryBusWidth = 6144; p->l2CacheSize = 50 << 20; p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472; p->regsPerMultiprocessor = 65536; p->sharedMemPerBlockOptin = 232448; p->cooperativeLaunch = 1; p->managedMemory = 1;
  p->streamPrioritiesSupported = 1; p->maxBlocksPerMultiProcessor = 32; p->reservedSharedMemPerBlock = 1024; p->memoryPoolsSupported = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break; case cudaDevAttrWarpSize: *v = 32; break; case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break; case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break; case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrUnifiedAddressing: *v = 1; break; case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    default: *v = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* v, int a, int b) { *v = a != b; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) { if (low) *low = 0; if (high) *high = -5; return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  LOCK;
  if (captures().empty()) return cudaSuccess;
  bool any = false;  // it would wait for the stream that captures, whatever the mode
  for (auto& c : captures()) { invalidate(*c); any = true; }
  RET(any ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}
API cudaError_t cudaGetLastError() { auto e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t e) { auto& m = error_names(); auto i = m.find(e); return i == m.end() ? "cudaErrorUnknown" : i->second.name; }
API const char* cudaGetErrorString(cudaError_t e) { auto& m = error_names(); auto i = m.find(e); return i == m.end() ? "unknown error" : i->second.text; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory --------------------------------------------------------------------------------------------------------------
API cudaError_t cudaMalloc(void** p, size_t n) { UNSAFE(); RET(allocate(p, n, false)); }
API cudaError_t cudaFree(void* p) { if (p) UNSAFE(); RET(release(p)); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { UNSAFE(); RET(allocate(p, n, true)); }
API cudaError_t cudaFreeHost(void* p) { UNSAFE(); RET(release(p)); }
API cudaError_t cudaHostRegister(void*, size_t, unsigned) { UNSAFE(); return cudaSuccess; }
API cudaError_t cudaHostUnregister(void*) { UNSAFE(); return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { LOCK; *t = total_bytes(); *f = total_bytes() - used_bytes[device_now]; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCK; memset(a, 0, sizeof *a);
  auto* b = find_block(p);
  a->type = !b ? cudaMemoryTypeUnregistered : b->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = b ? b->device : 0; a->hostPointer = b && !b->host ? nullptr : (void*)p; a->devicePointer = b ? (void*)p : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) { UNSAFE(); { LOCK; if (auto e = implicit(&legacy())) RET(e); } memmove(d, s, n); return cudaSuccess; }
API cudaError_t cudaMemset(void* d, int v, size_t n) { UNSAFE(); memset(d, v, n); return cudaSuccess; }
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  RET(submit(st, CU_GRAPH_NODE_TYPE_MEMCPY, "memcpy", [=] { memmove(d, s, n); }));
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  RET(submit(st, CU_GRAPH_NODE_TYPE_MEMCPY, "memcpy", [=] { memmove(d, s, n); }));
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t st) {
  RET(submit(st, CU_GRAPH_NODE_TYPE_MEMCPY, "memcpy", [=] { for (size_t i = 0; i < h; ++i) memmove((char*)d + i * dp, (const char*)s + i * sp, w); }));
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) { RET(submit(st, CU_GRAPH_NODE_TYPE_MEMSET, "memset", [=] { memset(d, v, n); })); }
API cudaError_t cudaMemcpyToSymbol(const void* sym, const void* s, size_t n, size_t off, cudaMemcpyKind) {
  LOCK; auto it = vars().find(sym); if (it == vars().end()) RET(cudaErrorSymbolNotFound); memcpy((char*)it->second.memory + off, s, n); return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* sym) { LOCK; auto it = vars().find(sym); if (it == vars().end()) RET(cudaErrorSymbolNotFound); *p = it->second.memory; return cudaSuccess; }
#define NOT_SUPPORTED(name, ...) API cudaError_t name(__VA_ARGS__) { RET(cudaErrorNotSupported); }
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
NOT_SUPPORTED(cudaGraphAddNode, cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaGraphNodeParams*)
NOT_SUPPORTED(cudaStreamAddCallback, cudaStream_t, cudaStreamCallback_t, void*, unsigned)
NOT_SUPPORTED(cudaLibraryLoadData, cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned)
NOT_SUPPORTED(cudaLibraryUnload, cudaLibrary_t)
NOT_SUPPORTED(cudaLibraryGetKernel, cudaKernel_t*, cudaLibrary_t, const char*)

// ---- kernels ---------------------------------------------------------------------------------------------------------------
API void** __cudaRegisterFatBinary(void*) { static void* h; return &h; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) { LOCK; kernels()[host] = name; }
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t n, int, int) { LOCK; vars()[host] = {n, calloc(1, n ? n : 1)}; }
struct Config { dim3 g, b; size_t sh; cudaStream_t s; };
static thread_local std::vector<Config> configs;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sh, cudaStream_t s) { configs.push_back({g, b, sh, s}); return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sh, void* s) {
  auto c = configs.back(); configs.pop_back(); *g = c.g; *b = c.b; *sh = c.sh; *(cudaStream_t*)s = c.s; return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void**, size_t, cudaStream_t s) { RET(launch((const void*)k, g, b, s)); }
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t, cudaStream_t s) { RET(launch(f, g, b, s)); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) { RET(launch(f, c->gridDim, c->blockDim, c->stream)); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = 90; return cudaSuccess; }
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* d) { RET(submit(s, CU_GRAPH_NODE_TYPE_HOST, "host", [=] { f(d); })); }

// ---- streams ---------------------------------------------------------------------------------------------------------------
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  LOCK; auto* p = new Stream{device_now, flags, priority, nullptr, {}, {}}; streams().insert(p); *s = (cudaStream_t)p; return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { LOCK; auto* p = of(s); if (!p || p == &legacy()) RET(cudaErrorInvalidResourceHandle); streams().erase(p); delete p; return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* v) { LOCK; auto* p = of(s); if (!p) RET(cudaErrorInvalidResourceHandle); *v = p->priority; return cudaSuccess; }
static cudaError_t wait_for(cudaStream_t s) {
  LOCK; auto* p = of(s);
  if (!p) return cudaErrorInvalidResourceHandle;
  if (p->capture) { invalidate(*p->capture); return cudaErrorStreamCaptureUnsupported; }
  return implicit(p);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { RET(wait_for(s)); }
API cudaError_t cudaStreamQuery(cudaStream_t s) { RET(wait_for(s)); }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) { LOCK; auto* p = new Event; p->flags = flags; events().insert(p); *e = (cudaEvent_t)p; return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { LOCK; auto* p = (Event*)e; if (!events().erase(p)) RET(cudaErrorInvalidResourceHandle); delete p; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  LOCK; auto* p = (Event*)e; auto* st = of(s);
  if (!events().count(p) || !st) RET(cudaErrorInvalidResourceHandle);
  if (auto err = implicit(st)) RET(err);
  if (st->capture) {
    if (st->capture->invalid) RET(cudaErrorStreamCaptureInvalidated);
    if (flags & cudaEventRecordExternal) {
      Node* n = st->capture->graph->add(CU_GRAPH_NODE_TYPE_EVENT_RECORD, "event", st->deps, [p] { LOCK; if (events().count(p)) { p->recorded = true; p->captured = false; p->at = Clock::now(); } });
      st->deps = {n};
      return cudaSuccess;
    }
    p->captured = true; p->capture = st->capture; p->deps = st->deps;
    return cudaSuccess;
  }
  p->recorded = true; p->captured = false; p->capture.reset(); p->at = Clock::now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static cudaError_t ask_event(cudaEvent_t e, const char* who) {
  { LOCK; auto* p = (Event*)e;
    if (!events().count(p)) return cudaErrorInvalidResourceHandle;
    if (p->captured) { if (auto c = p->capture.lock()) invalidate(*c); return cudaErrorCapturedEvent; } }
  return unsafe(who);
}
API cudaError_t cudaEventQuery(cudaEvent_t e) { RET(ask_event(e, __func__)); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { RET(ask_event(e, __func__)); }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  LOCK; auto *x = (Event*)a, *y = (Event*)b;
  if (!events().count(x) || !events().count(y) || !x->recorded || !y->recorded || (x->flags & cudaEventDisableTiming) || (y->flags & cudaEventDisableTiming)) RET(cudaErrorInvalidResourceHandle);
  *ms = std::chrono::duration<float, std::milli>(y->at - x->at).count();
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  LOCK; auto* st = of(s); auto* p = (Event*)e;
  if (!st || !events().count(p)) RET(cudaErrorInvalidResourceHandle);
  auto c = p->captured ? p->capture.lock() : nullptr;
  if (p->captured && !c) RET(st->capture ? cudaErrorStreamCaptureIsolation : cudaErrorCapturedEvent);
  if (!c) {
    if (!st->capture || !p->recorded || (flags & cudaEventWaitExternal)) return cudaSuccess;
    if (st->capture->invalid) RET(cudaErrorStreamCaptureInvalidated);
    invalidate(*st->capture);
    RET(cudaErrorStreamCaptureIsolation);
  }
  if (c->invalid) RET(cudaErrorStreamCaptureInvalidated);
  if (st == &legacy()) { invalidate(*c); RET(cudaErrorStreamCaptureUnsupported); }
  if (st->capture && st->capture != c) { invalidate(*c); invalidate(*st->capture); RET(cudaErrorStreamCaptureMerge); }
  if (!st->capture) { st->capture = c; st->deps.clear(); c->members.insert(st); }
  for (auto* d : p->deps) if (std::find(st->deps.begin(), st->deps.end(), d) == st->deps.end()) st->deps.push_back(d);
  return cudaSuccess;
}

// ---- capture ---------------------------------------------------------------------------------------------------------------
static unsigned long long next_capture = 1;
static cudaError_t begin(cudaStream_t s, std::shared_ptr<Graph> g, std::vector<Node*> deps, cudaStreamCaptureMode mode, bool into) {
  LOCK; auto* st = of(s);
  if (!st) return cudaErrorInvalidResourceHandle;
  if (st == &legacy()) return cudaErrorStreamCaptureUnsupported;
  if (st->capture) return cudaErrorIllegalState;
  auto c = std::make_shared<Capture>(); c->id = next_capture++; c->graph = g; c->mode = mode; c->origin = st; c->thread = std::this_thread::get_id(); c->into_graph = into;
  c->members.insert(st); st->capture = c; st->deps = deps; captures().insert(c);
  note("capture %llu begins, mode %d", c->id, (int)mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) { RET(begin(s, std::make_shared<Graph>(), {}, mode, false)); }
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t g, const cudaGraphNode_t* d, const cudaGraphEdgeData*, size_t n, cudaStreamCaptureMode mode) {
  LOCK; auto it = graph_refs().find((Graph*)g); if (it == graph_refs().end()) RET(cudaErrorInvalidValue);
  std::vector<Node*> deps; for (size_t i = 0; i < n; ++i) deps.push_back((Node*)d[i]);
  RET(begin(s, it->second, deps, mode, true));
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* out) {
  LOCK; auto* st = of(s);
  if (out) *out = nullptr;
  if (!st) RET(cudaErrorInvalidResourceHandle);
  auto c = st->capture;
  if (!c) RET(cudaErrorIllegalState);
  if (c->origin != st) { invalidate(*c); RET(cudaErrorStreamCaptureUnmatched); }
  if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id()) RET(cudaErrorStreamCaptureWrongThread);
  std::set<Node*> joined; std::vector<Node*> walk = st->deps;
  while (!walk.empty()) { auto* n = walk.back(); walk.pop_back(); if (joined.insert(n).second) walk.insert(walk.end(), n->deps.begin(), n->deps.end()); }
  bool unjoined = false;
  for (auto* m : c->members) for (auto* d : m->deps) unjoined |= !joined.count(d);
  for (auto* m : c->members) { m->capture = nullptr; m->deps.clear(); }
  captures().erase(c);
  note("capture %llu ends: %zu nodes%s%s", c->id, c->graph->nodes.size(), c->invalid ? ", invalid" : "", unjoined ? ", unjoined" : "");
  if (c->invalid) RET(cudaErrorStreamCaptureInvalidated);
  if (unjoined) RET(cudaErrorStreamCaptureUnjoined);
  graph_refs()[c->graph.get()] = c->graph;
  if (out) *out = (cudaGraph_t)c->graph.get();
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* v) {
  LOCK; auto* st = of(s);
  if (!st) RET(cudaErrorInvalidResourceHandle);
  if (auto e = implicit(st)) { RET(e); }
  *v = !st->capture ? cudaStreamCaptureStatusNone : st->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* n) {
  LOCK; auto* st = of(s);
  if (!st) RET(cudaErrorInvalidResourceHandle);
  if (auto e = implicit(st)) { RET(e); }
  *v = !st->capture ? cudaStreamCaptureStatusNone : st->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  if (st->capture) {
    if (id) *id = st->capture->id;
    if (g) { graph_refs()[st->capture->graph.get()] = st->capture->graph; *g = (cudaGraph_t)st->capture->graph.get(); }
    st->shown.clear(); for (auto* d : st->deps) st->shown.push_back((cudaGraphNode_t)d);
    if (deps) *deps = st->shown.data();
    if (edges) *edges = nullptr;
    if (n) *n = st->shown.size();
  }
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t* d, const cudaGraphEdgeData*, size_t n, unsigned flags) {
  LOCK; auto* st = of(s);
  if (!st || !st->capture) RET(cudaErrorIllegalState);
  if (flags == cudaStreamSetCaptureDependencies) st->deps.clear();
  for (size_t i = 0; i < n; ++i) st->deps.push_back((Node*)d[i]);
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) { std::swap(*m, thread_mode); return cudaSuccess; }

// ---- graphs ----------------------------------------------------------------------------------------------------------------
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* out, size_t* n) {
  LOCK; auto it = graph_refs().find((Graph*)g); if (it == graph_refs().end()) RET(cudaErrorInvalidValue);
  auto& nodes = it->second->nodes;
  if (out) for (size_t i = 0; i < std::min(*n, nodes.size()); ++i) out[i] = (cudaGraphNode_t)nodes[i].get();
  *n = nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* out, cudaGraphEdgeData*, size_t* n) {
  LOCK; auto& d = ((Node*)node)->deps;
  if (out) for (size_t i = 0; i < std::min(*n, d.size()); ++i) out[i] = (cudaGraphNode_t)d[i];
  *n = d.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  LOCK; auto it = graph_refs().find((Graph*)g); if (it == graph_refs().end()) RET(cudaErrorInvalidValue);
  auto copy = std::make_shared<Graph>(*it->second);  // nodes are shared and never change
  *e = (cudaGraphExec_t) new Exec{copy};
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { LOCK; if (!graph_refs().erase((Graph*)g)) RET(cudaErrorInvalidValue); return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { auto* x = (Exec*)e; delete x; return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  auto g = ((Exec*)e)->graph;
  RET(submit(s, CU_GRAPH_NODE_TYPE_GRAPH, "graph", [g] { run_graph(*g); }, {1, 1, 1}, {1, 1, 1}, true, g));
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char* path, unsigned) {
  LOCK; auto it = graph_refs().find((Graph*)g); if (it == graph_refs().end()) RET(cudaErrorInvalidValue);
  FILE* f = fopen(path, "w"); if (!f) RET(cudaErrorInvalidValue);
  fputs("digraph dot {\n", f);
  for (auto& n : it->second->nodes) { fprintf(f, "\"node_%u\" [label=\"%s %s\"];\n", n->id, dim_type(n->type), n->name.c_str()); for (auto* d : n->deps) fprintf(f, "\"node_%u\" -> \"node_%u\";\n", d->id, n->id); }
  fputs("}\n", f); fclose(f);
  return cudaSuccess;
}

// ---- the driver's interface, as far as torch and the plugin ask --------------------------------------------------------------
#undef cuGraphKernelNodeGetParams
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* n) { *n = device_count(); return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { *c = (CUcontext)0x1000; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* c) { *c = (CUcontext)0x1000; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** s) { *s = "emulated driver error"; return CUDA_SUCCESS; }
API CUresult cuGraphGetNodes(CUgraph g, CUgraphNode* out, size_t* n) { return (CUresult)cudaGraphGetNodes((cudaGraph_t)g, (cudaGraphNode_t*)out, n); }
API CUresult cuGraphNodeGetType(CUgraphNode n, CUgraphNodeType* t) { *t = ((Node*)n)->type; return CUDA_SUCCESS; }
API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS* p) {
  auto* k = (Node*)n; memset(p, 0, sizeof *p);
  if (k->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  p->func = (CUfunction)k->name.c_str(); p->gridDimX = k->grid.x; p->gridDimY = k->grid.y; p->gridDimZ = k->grid.z; p->blockDimX = k->block.x; p->blockDimY = k->block.y; p->blockDimZ = k->block.z;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetName(const char** s, CUfunction f) { *s = (const char*)f; return CUDA_SUCCESS; }
API CUresult cuKernelGetName(const char** s, CUkernel f) { *s = (const char*)f; return CUDA_SUCCESS; }
API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode n, CUgraph* g) { auto c = ((Node*)n)->child; graph_refs()[c.get()] = c; *g = (CUgraph)c.get(); return CUDA_SUCCESS; }
API CUresult cuUnsupported() { return CUDA_ERROR_NOT_SUPPORTED; }
#define CU_UNSUPPORTED(name) API CUresult name() { return CUDA_ERROR_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void*)cuUnsupported;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void**, size_t, cudaStream_t s) { RET(launch(f, g, b, s)); }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return cudaSuccess; }
