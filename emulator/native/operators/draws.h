// Random numbers. A kernel takes the state of torch's own CUDA generator at its launch, as a CUDA kernel does.
#pragma once

#include <ATen/cuda/PhiloxCudaState.h>

#include "operator.h"

namespace emulator {

class Draw {
 public:
  Draw() = default;

  // The next numbers of the call's generator, or of the device's default one. Under capture, of the graph's state.
  static Draw at_launch(const Operator& op, const Values& arguments, c10::DeviceIndex device);

  // Numbers that disturb no generator.
  static Draw for_trial(const Operator& op);

  // Run a CPU kernel that draws exactly these numbers.
  void run(const c10::OperatorHandle& kernel, Values& stack) const;

 private:
  uint64_t seed() const;

  bool used_ = false;
  std::optional<size_t> argument_;  // none: the kernel takes the default generator
  at::PhiloxCudaState state_{0, 0};
};

// Run the kernel of a key, below everything that torch does before a kernel.
void run_kernel(const c10::OperatorHandle& kernel, c10::DispatchKey key, Values& stack);

// For what runs outside a kernel: no autograd, autocast or modes of Python.
c10::DispatchKeySet keys_above_kernels();

}  // namespace emulator
