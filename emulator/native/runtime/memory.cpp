// Device memory and pinned memory: mappings of this process, which are unmapped when they are freed. A use after that is
// a segmentation fault, where a GPU reports an illegal memory access.
#include "runtime.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

constexpr size_t PAGE_BYTES = 2 << 20;  // as large as the driver's

struct Block {
  size_t bytes, mapped_bytes;
  int device;
  bool is_pinned;
};
std::map<uintptr_t, Block>& blocks() {
  static auto* blocks = new std::map<uintptr_t, Block>;
  return *blocks;
}
size_t used_bytes[MAX_DEVICES] = {};
std::atomic<size_t>& total_bytes() {
  static auto* total = [] {
    const char* wanted = getenv("CUDA_EMULATOR_MEMORY");
    return new std::atomic<size_t>(wanted ? strtoull(wanted, nullptr, 0) : size_t(8) << 30);
  }();
  return *total;
}
long long allocations_until_failure = -1, failures_wanted = 0;

bool fails_on_request() {
  if (allocations_until_failure < 0 || allocations_until_failure-- > 0) return false;
  allocations_until_failure = --failures_wanted > 0 ? 0 : -1;
  return true;
}

const Block* find_block(const void* address) {
  auto after = blocks().upper_bound((uintptr_t)address);
  if (after == blocks().begin()) return nullptr;
  --after;
  return (uintptr_t)address < after->first + after->second.bytes ? &after->second : nullptr;
}

void* map_aligned(size_t bytes) {
  void* mapped =
      mmap(nullptr, bytes + PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const uintptr_t begin = (uintptr_t)mapped, end = begin + bytes + PAGE_BYTES;
  const uintptr_t base = (begin + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
  if (base > begin) munmap(mapped, base - begin);
  if (end > base + bytes) munmap((void*)(base + bytes), end - base - bytes);
  return (void*)base;
}

cudaError_t allocate(void** out, size_t bytes, bool is_pinned) {
  Lock lock(state_mutex());
  *out = nullptr;
  if (!bytes) return cudaSuccess;
  const int device = current_device();
  if (!is_pinned && (fails_on_request() || used_bytes[device] + bytes > total_bytes()))
    return cudaErrorMemoryAllocation;
  const size_t mapped_bytes = (bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
  *out = map_aligned(mapped_bytes);
  if (!*out) return cudaErrorMemoryAllocation;
  blocks()[(uintptr_t)*out] = {bytes, mapped_bytes, device, is_pinned};
  if (!is_pinned) used_bytes[device] += bytes;
  make_context(device);
  return cudaSuccess;
}

// Waits for the devices first, as cudaFree and cudaFreeHost do.
cudaError_t release(void* address) {
  if (!address) return cudaSuccess;
  finish_all();
  Lock lock(state_mutex());
  auto found = blocks().find((uintptr_t)address);
  if (found == blocks().end()) return cudaErrorInvalidValue;
  if (!found->second.is_pinned) used_bytes[found->second.device] -= found->second.bytes;
  munmap(address, found->second.mapped_bytes);
  blocks().erase(found);
  return cudaSuccess;
}

Node copy_node(std::function<void()> run) { return {CU_GRAPH_NODE_TYPE_MEMCPY, "memcpy", std::move(run)}; }

bool is_capturing(cudaStream_t stream) {
  Lock lock(state_mutex());
  const auto found = find_stream(stream);
  return found && found->capture;
}

// A copy of `bytes` that `move(to, from)` does. Pageable memory is read before the call returns, and a copy into it is
// complete when the call returns; pinned memory and the device's are read and written when the stream comes to it.
cudaError_t copy_async(void* to, const void* from, size_t bytes, cudaStream_t stream,
                       std::function<void(void*, const void*)> move) {
  WorkPtr queued;
  const bool is_queued = is_asynchronous() && !is_capturing(stream);
  if (is_queued && kind_of(from) == MemoryKind::pageable) {
    auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    return submit(stream, copy_node([=] { move(to, staged->data()); }));
  }
  if (auto error = submit(stream, copy_node([=] { move(to, from); }), &queued)) return error;
  if (is_queued && kind_of(to) == MemoryKind::pageable) finish(queued);
  return cudaSuccess;
}

}  // namespace

MemoryKind kind_of(const void* address) {
  Lock lock(state_mutex());
  const Block* block = find_block(address);
  return !block ? MemoryKind::pageable : block->is_pinned ? MemoryKind::pinned : MemoryKind::device;
}

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaMalloc(void** out, size_t bytes) {
  REFUSE_UNSAFE();
  RETURN(allocate(out, bytes, false));
}
API cudaError_t cudaFree(void* address) {
  if (address) REFUSE_UNSAFE();
  RETURN(release(address));
}
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  REFUSE_UNSAFE();
  RETURN(allocate(out, bytes, true));
}
API cudaError_t cudaFreeHost(void* address) {
  REFUSE_UNSAFE();
  RETURN(release(address));
}
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  REFUSE_UNSAFE();
  Lock lock(state_mutex());
  if (find_block(address)) RETURN(cudaErrorHostMemoryAlreadyRegistered);
  blocks()[(uintptr_t)address] = {bytes, 0, current_device(), true};
  RETURN(cudaSuccess);
}
API cudaError_t cudaHostUnregister(void* address) {
  REFUSE_UNSAFE();
  finish_all();
  Lock lock(state_mutex());
  RETURN(blocks().erase((uintptr_t)address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* bytes) {
  Lock lock(state_mutex());
  const size_t used = used_bytes[current_device()];
  *bytes = total_bytes();
  *free_bytes = *bytes > used ? *bytes - used : 0;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock(state_mutex());
  const Block* block = find_block(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = !block ? cudaMemoryTypeUnregistered : block->is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = block ? block->device : 0;
  attributes->hostPointer = block && !block->is_pinned ? nullptr : (void*)address;
  attributes->devicePointer = block ? (void*)address : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  RETURN(copy_async(to, from, bytes, stream, [bytes](void* to, const void* from) { memmove(to, from, bytes); }));
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  RETURN(copy_async(to, from, bytes, stream, [bytes](void* to, const void* from) { memmove(to, from, bytes); }));
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
  auto move = [=](void* to, const void* from) {
    for (size_t i = 0; i < height; ++i) memmove((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
  };
  RETURN(copy_async(to, from, height ? from_pitch * (height - 1) + width : 0, stream, move));
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  REFUSE_UNSAFE();
  WorkPtr queued;
  auto error = submit(nullptr, copy_node([=] { memmove(to, from, bytes); }), &queued);
  finish(queued);
  RETURN(error);
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  RETURN(submit(stream, {CU_GRAPH_NODE_TYPE_MEMSET, "memset", [=] { memset(to, value, bytes); }}));
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  REFUSE_UNSAFE();
  RETURN(cudaMemsetAsync(to, value, bytes, nullptr));
}

API size_t cuda_emulator_used_bytes(int device) {
  Lock lock(state_mutex());
  return device >= 0 && device < MAX_DEVICES ? used_bytes[device] : 0;
}
// From its first use of a device, NVML lists this process among those that use it.
API int cuda_emulator_has_context(int device) { return has_context(device); }
API void cuda_emulator_set_memory(size_t bytes) { total_bytes() = bytes; }
// After `allocations` more of them, `failures` allocations of device memory fail.
API void cuda_emulator_fail_allocations(long long allocations, long long failures) {
  Lock lock(state_mutex());
  allocations_until_failure = failures > 0 ? allocations : -1;
  failures_wanted = failures;
}
