// The last error of each thread, the error that stays, names and texts of errors.
#include "runtime.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
// A failed kernel ends the CUDA context: every later call answers its error.
std::atomic<cudaError_t> lasting_error = cudaSuccess;

struct Text {
  const char* name;
  const char* text;
};
const std::map<int, Text>& texts() {
  static auto* texts = new std::map<int, Text>{
      {0, {"cudaSuccess", "no error"}},
      {1, {"cudaErrorInvalidValue", "invalid argument"}},
      {2, {"cudaErrorMemoryAllocation", "out of memory"}},
      {3, {"cudaErrorInitializationError", "initialization error"}},
      {100, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
      {101, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {400, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {401, {"cudaErrorIllegalState", "the operation cannot be performed in the present state"}},
      {500, {"cudaErrorSymbolNotFound", "named symbol not found"}},
      {600, {"cudaErrorNotReady", "device not ready"}},
      {700, {"cudaErrorIllegalAddress", "an illegal memory access was encountered"}},
      {704, {"cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}},
      {710, {"cudaErrorAssert", "device-side assert triggered"}},
      {712, {"cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"}},
      {713, {"cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"}},
      {801, {"cudaErrorNotSupported", "operation not supported"}},
      {900, {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
      {901, {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
      {902, {"cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"}},
      {903, {"cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"}},
      {904, {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
      {905, {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
      {906,
       {"cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream"}},
      {907, {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"}},
      {908,
       {"cudaErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread"}}};
  return *texts;
}
bool is_traced() {
  static const bool traced = getenv("CUDA_EMULATOR_TRACE");
  return traced;
}

}  // namespace

std::recursive_mutex& state_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

void trace(const char* format, ...) {
  if (!is_traced()) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("[cuda_emulator] ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

cudaError_t set_error(cudaError_t error, const char* call) {
  const cudaError_t lasting = lasting_error;
  if (lasting != cudaSuccess) error = lasting;
  if (error != cudaSuccess) {
    last_error = error;
    trace("%s: %d", call, (int)error);
  }
  return error;
}

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaPeekAtLastError() {
  const cudaError_t lasting = lasting_error;
  return lasting != cudaSuccess ? lasting : last_error;
}
API cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}
API const char* cudaGetErrorName(cudaError_t error) {
  const auto found = texts().find(error);
  return found == texts().end() ? "cudaErrorUnknown" : found->second.name;
}
API const char* cudaGetErrorString(cudaError_t error) {
  const auto found = texts().find(error);
  return found == texts().end() ? "unknown error" : found->second.text;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}

// A kernel's own check failed: CUDA reports it at the next call, and at each one after it.
API void cuda_emulator_device_assert(const char* what) {
  fprintf(stderr, "emulated CUDA device: Assertion `%s` failed.\n", what);
  lasting_error = cudaErrorAssert;
}
// What CUDA needs a new process for. Returns whether there was an error.
API int cuda_emulator_clear_error(void) {
  last_error = cudaSuccess;
  return lasting_error.exchange(cudaSuccess) != cudaSuccess;
}
