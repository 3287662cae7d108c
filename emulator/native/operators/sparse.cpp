#include "sparse.h"

#include <ATen/Functions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <unordered_set>

#include "devices.h"
#include "draws.h"
#include "stand_ins.h"
#include "work.h"

namespace emulator {
namespace {

using c10::DispatchKey;

// The other operators on sparse tensors are the same code for CPU and CUDA: it calls operators on indices and values.
bool is_sparse_kernel(const std::string& bare) {
  static const std::unordered_set<std::string> names = {"add",
                                                        "mul",
                                                        "bmm",
                                                        "addmm",
                                                        "addmm_",
                                                        "hspmm",
                                                        "sspaddmm",
                                                        "index_select",
                                                        "_coalesce",
                                                        "_sparse_sparse_matmul",
                                                        "_sparse_sum_backward",
                                                        "_sparse_softmax",
                                                        "_sparse_softmax_backward_data",
                                                        "_sparse_log_softmax",
                                                        "_sparse_log_softmax_backward_data"};
  return names.count(bare);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  if (!tensor.is_sparse()) return host_stand_in(tensor);
  const auto indices = host_stand_in(tensor._indices()), values = host_stand_in(tensor._values());
  const auto options = tensor.options().device(c10::kCPU);
  return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), options, tensor.is_coalesced());
}

// A sparse tensor gets new indices and values. A dense one gets the numbers.
void store(const at::Tensor& to, const at::Tensor& from) {
  if (!to.is_sparse()) {
    to.resize_(from.sizes());
    host_stand_in(to).copy_(from);
    return;
  }
  auto* impl = at::sparse::get_sparse_impl(to);
  impl->raw_resize_(from.sparse_dim(), from.dense_dim(), from.sizes());
  impl->set_indices_and_values_unsafe(from._indices().to(to.device()), from._values().to(to.device()));
  impl->set_coalesced(from.is_coalesced());
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

}  // namespace

bool has_sparse_kernels(const c10::OperatorHandle& handle) {
  return is_sparse_kernel(handle.operator_name().name.substr(6)) &&
         handle.hasKernelForDispatchKey(DispatchKey::SparseCUDA) &&
         handle.hasKernelForDispatchKey(DispatchKey::SparseCPU);
}

void emulate_sparse(const Operator& op, torch::jit::Stack* stack) {
  const auto& schema = op.handle.schema();
  const Values arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto device = device_of(arguments);
  check_devices(op, arguments, device);
  c10::cuda::OptionalCUDAGuard on_device(device);
  c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  c10::cuda::stream_synchronize(stream);
  Values results;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    results.push_back(map_tensors(arguments[i], on_host));
    if (!is_written(schema.arguments()[i])) continue;
    // A copy: the kernel may give it another size, which memory of the device cannot have.
    results[i] = results[i].toTensor().clone();
    written.emplace_back(arguments[i].toTensor(), results[i].toTensor());
  }
  count_launch(stream, op);
  run_kernel(op.handle, DispatchKey::SparseCPU, results);
  for (const auto& [to, from] : written) store(to, from);
  for (size_t k = 0; k < op.returned.size(); ++k)
    stack->push_back(op.returned[k] >= 0 ? arguments[op.returned[k]] : results[k].toTensor().to(device));
}

}  // namespace emulator
