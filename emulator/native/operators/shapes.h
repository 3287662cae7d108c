// Shapes of an operator's results without its data: known before the kernel runs.
#pragma once

#include "operator.h"

namespace emulator {

// Torch's C++ shape kernel, or a rule of ours: costs little.
bool has_cheap_shapes(const Operator& op);

// What the operator would return, as tensors of another device whose numbers mean nothing. The `outs` are the stand-ins
// of its out= arguments, in the shape that they get. Raises the host's errors: shapes, types, devices that do not fit.
struct Shapes {
  Values results;
  std::vector<at::Tensor> outs;
};
Shapes shapes_of(const Operator& op, const Values& arguments, c10::Device device);

}  // namespace emulator
