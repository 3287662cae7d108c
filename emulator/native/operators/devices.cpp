#include "devices.h"

#include <ATen/core/op_registration/adaption.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>

#include "draws.h"
#include "stand_ins.h"

namespace emulator {
namespace {

bool all_on(const Values& arguments, c10::Device device) {
  bool same = true;
  for (const auto& value : arguments)
    visit_tensors(value, [&](const at::Tensor& tensor) { same = same && tensor.device() == device; });
  return same;
}

// The rule of torch's generated CUDA functions, by torch's own function.
void check_as_generated(const Operator& op, const Values& arguments) {
  std::optional<c10::Device> common;
  for (size_t i : op.checked) {
    const auto& name = op.handle.schema().arguments()[i].name();
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
      c10::impl::check_and_update_common_device(common, tensor, op.wrapper.c_str(), name.c_str());
    });
  }
}

// The rule of TensorIterator, which takes 0-dim CPU tensors as numbers. Where torch has a shape kernel, that kernel
// checks the CPU tensors.
void check_as_iterator(const Operator& op, const Values& arguments, c10::Device device) {
  for (const auto& value : arguments)
    visit_tensors(value, [&](const at::Tensor& tensor) {
      const bool is_legal = tensor.device().is_cpu() && (op.shapes || tensor.dim() == 0);
      if (tensor.device() != device && !is_legal) raise_two_devices(device, tensor.device());
    });
}

std::string with_device(std::string text, const std::string& from, c10::Device device) {
  const auto at = text.find(from);
  return at == std::string::npos ? text : text.replace(at + from.size() - 4, 4, device.str());
}

}  // namespace

c10::Device device_of(const Values& arguments) {
  std::optional<c10::Device> found;
  for (const auto& value : arguments) {
    if (found) return *found;
    visit_tensors(value, [&](const at::Tensor& tensor) {
      if (!found && tensor.is_cuda()) found = tensor.device();
    });
  }
  for (const auto& value : arguments)
    if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) return value.toDevice();
  return found ? *found : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

void check_devices(const Operator& op, const Values& arguments, c10::Device device) {
  if (all_on(arguments, device)) return;
  if (op.wrapper.empty()) return check_as_iterator(op, arguments, device);
  check_as_generated(op, arguments);
}

void raise_two_devices(c10::Device device, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
              other, "!");
}

void run_shape_kernel(const Operator& op, Values& stack, c10::Device device) {
  c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
  try {
    op.shapes->callBoxed(op.handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    auto named = with_device(with_device(text, "two devices, meta", device), "to have device meta", device);
    if (named == text) throw;
    TORCH_CHECK(false, named);
  }
}

}  // namespace emulator
