#include "work.h"

#include <ATen/ops/copy_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "stand_ins.h"

extern "C" int cuda_emulator_launch(cudaStream_t, const char*, void (*)(void*), void*, void (*)(void*));
extern "C" int cuda_emulator_is_asynchronous(void);
extern "C" void cuda_emulator_device_assert(const char*);

namespace emulator {
namespace {

// The launch that this thread is in. A kernel that runs inside its own launch raises to the caller.
thread_local const Work* launching = nullptr;
thread_local std::exception_ptr raised;

// How CPU kernels say what a CUDA kernel asserts on the device.
constexpr const char* VALUE_ERRORS[] = {"out of range",
                                        "out of bounds",
                                        "out of DATA bounds",
                                        "out of boundaries",
                                        "invalid max index",
                                        "should be between 0 and 1",
                                        "Expected p_in >= 0",
                                        "Expected Tensor with single nonzero value",
                                        "invalid multinomial",
                                        "probability tensor",
                                        "number of elements of source"};

bool is_about_values(std::string_view text) {
  if (text.find("Dimension out of range") != text.npos) return false;
  return std::any_of(std::begin(VALUE_ERRORS), std::end(VALUE_ERRORS),
                     [&](const char* sign) { return text.find(sign) != text.npos; });
}

void run_and_report(void* data) {
  const auto* work = static_cast<const Work*>(data);
  try {
    work->run();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    const std::string text = known ? known->what_without_backtrace() : error.what();
    if (text == "ZeroDivisionError") return;  // CUDA gives a number without meaning
    const bool to_caller = launching == work && !(work->op->asserts && is_about_values(text));
    if (to_caller) raised = std::current_exception();
    else cuda_emulator_device_assert((work->op->name + ": " + text).c_str());
  }
}

void drop(void* data) { delete static_cast<Work*>(data); }

void submit(cudaStream_t stream, const char* name, void (*run)(void*), void* data, void (*drop)(void*)) {
  const auto error = static_cast<cudaError_t>(cuda_emulator_launch(stream, name, run, data, drop));
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  C10_CUDA_CHECK(error);
}

}  // namespace

void Work::run() const {
  Values stack = arguments;
  draw.run(kernel, stack);
  if (results.empty()) return;
  c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
  size_t next = 0;
  for (const auto& value : stack) {
    const auto store = [&](const at::Tensor& tensor) {
      const auto& to = results[next++];
      if (to.defined() && tensor.defined()) at::native::copy_(const_cast<at::Tensor&>(to), tensor, false);
    };
    if (value.isTensor()) store(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) store(tensor);
  }
}

bool is_asynchronous() { return cuda_emulator_is_asynchronous(); }

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

void launch(cudaStream_t stream, std::unique_ptr<Work> work) {
  const auto* before = std::exchange(launching, work.get());
  raised = nullptr;
  const char* name = work->op->name.c_str();
  try {
    submit(stream, name, run_and_report, work.release(), drop);
  } catch (...) {
    launching = before;
    throw;
  }
  launching = before;
  if (raised) std::rethrow_exception(std::exchange(raised, nullptr));
}

void count_launch(cudaStream_t stream, const Operator& op) {
  submit(stream, op.name.c_str(), [](void*) {}, nullptr, [](void*) {});
}

}  // namespace emulator
