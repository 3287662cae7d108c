// What is known of one operator before it is called. Names are those of torch's native_functions.yaml.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace emulator {

using Values = std::vector<c10::IValue>;

enum class Waits { never, always, by_arguments };

struct Operator {
  c10::OperatorHandle handle;
  std::string name;                               // of the graph's node: aten::add.Tensor
  std::string wrapper;                            // of torch's generated function that checks devices. Empty: none does
  std::optional<c10::SafeKernelFunction> shapes;  // torch's C++ kernel of the key Meta
  std::optional<c10::OperatorHandle> out_variant;  // the same operation, into tensors that exist
  std::vector<size_t> checked;                     // arguments with tensors, in the order in which torch checks them
  std::vector<size_t> outs;                        // arguments that are results: out=
  std::vector<int> returned;                       // per result: the written argument that it is, or -1
  std::optional<size_t> generator;                 // the argument with a generator
  std::optional<size_t> pin_memory;                // the argument of this name: the host has no such memory
  bool draws = false;                              // random numbers
  bool asserts = false;                            // its CUDA kernel checks values on the device
  void (*prepare)(Values&) = nullptr;              // brings the arguments into the form that the kernel takes
  const struct Alert* alert = nullptr;             // its CUDA code is not deterministic
  bool is_foreign = false;                         // of a library that is no part of torch
  Waits waits = Waits::never;                      // its CUDA code waits for the device
};

// Keeps torch's CUDA code: views, allocation, reads of the device, and code that only calls other operators.
bool keeps_cuda_code(const std::string& name);

// A composite that chooses a library (cuDNN) inside, so it is taken whole.
bool is_taken_whole(const std::string& name);

bool is_aten(const c10::OperatorName& name);

// Names in our lists that this torch has no operator for.
std::vector<std::string> names_without_operator();

std::string full_name(const c10::OperatorName& name);

Operator describe(const c10::OperatorHandle& handle);

// The same for torch's key SparseCUDA, which has other generated functions.
Operator describe_sparse(const c10::OperatorHandle& handle);

// Whether torch's CUDA code of this operator waits for the device, given these arguments.
bool must_wait(const Operator& op, const Values& arguments);

}  // namespace emulator
