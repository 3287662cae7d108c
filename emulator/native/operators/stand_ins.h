// Tensors of other devices that stand for tensors of the CUDA device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "operator.h"

namespace emulator {

enum class StandIn {
  host,   // a CPU tensor on the same memory. It keeps no memory alive: a kernel holds addresses only
  shape,  // a meta tensor
  zeros,  // a CPU tensor of ones, or of zeros where the type is no floating point: an index in range
  ones,   // a CPU tensor of ones: a divisor
};

at::Tensor host_stand_in(const at::Tensor& tensor);

// One call's stand-ins. Two arguments that are one tensor, or share a storage, do so here too: operators test for it.
class StandIns {
 public:
  explicit StandIns(StandIn kind) : kind_(kind) {}

  // A CUDA tensor's stand-in. A CPU tensor stays as it is.
  at::Tensor of(const at::Tensor& tensor);

 private:
  at::Tensor make(const at::Tensor& tensor);
  c10::Storage storage_of(const at::Tensor& tensor);

  StandIn kind_;
  c10::SmallVector<std::pair<const c10::TensorImpl*, at::Tensor>, 6> tensors_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 6> storages_;
};

// Apply a function to every defined tensor of a value.
template <class Function>
c10::IValue map_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector())
      mapped.push_back(tensor.defined() ? function(tensor) : tensor);
    return mapped;
  }
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> mapped;
  for (const auto& tensor : value.toOptionalTensorVector())
    mapped.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(function(*tensor)) : tensor);
  return mapped;
}

template <class Function>
void visit_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) function(*tensor);
  }
}

}  // namespace emulator
