// The boxed kernel that every emulated operator has under torch's key CUDA.
#pragma once

#include "operator.h"

namespace emulator {

void emulate(const Operator& op, torch::jit::Stack* stack);

}  // namespace emulator
