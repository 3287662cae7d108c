// The devices of an operator's arguments, checked as torch's CUDA code checks them.
#pragma once

#include "operator.h"

namespace emulator {

// The device that the call runs on: of its first CUDA tensor, or of its argument `device`, or the current one.
c10::Device device_of(const Values& arguments);

// Raises torch's error where the operator takes no tensor of another device.
void check_devices(const Operator& op, const Values& arguments, c10::Device device);

// The error of torch's TensorIterator, which most element-wise operators raise.
[[noreturn]] void raise_two_devices(c10::Device device, c10::Device other);

// Run torch's shape kernel. Its errors name the meta device where CUDA's name the CUDA device.
void run_shape_kernel(const Operator& op, Values& stack, c10::Device device);

}  // namespace emulator
