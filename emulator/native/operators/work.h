// A CPU kernel as a piece of work on a CUDA stream. It holds addresses, so a missing wait or record_stream shows.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "draws.h"

namespace emulator {

struct Work {
  const Operator* op;
  c10::OperatorHandle kernel;       // the operator, or its variant with out=
  Values arguments;                 // CUDA tensors as host stand-ins
  std::vector<at::Tensor> results;  // where what the kernel returns belongs. Undefined: it is written in place
  Draw draw;

  void run() const;
};

// Whether eager work waits in its stream's queue.
bool is_asynchronous();

bool is_capturing(cudaStream_t stream);

// Queue the work: into the graph of a capturing stream, else into the stream. Raises what the runtime refuses, and what
// the kernel raises where the stream runs it at once.
void launch(cudaStream_t stream, std::unique_ptr<Work> work);

// For a kernel that runs at once, outside the stream's work. Raises what the runtime refuses.
void count_launch(cudaStream_t stream, const Operator& op);

}  // namespace emulator
