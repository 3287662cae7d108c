// Operators on sparse COO tensors. They run at once, after a wait for the stream, so a capture refuses them.
#pragma once

#include "operator.h"

namespace emulator {

// Whether torch has a CUDA kernel of its own for this operator on sparse tensors, and a CPU kernel to replace it.
bool has_sparse_kernels(const c10::OperatorHandle& handle);

void emulate_sparse(const Operator& op, torch::jit::Stack* stack);

}  // namespace emulator
