#include "emulate.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "devices.h"
#include "shapes.h"
#include "stand_ins.h"
#include "work.h"

namespace emulator {
namespace {

at::Tensor allocated_like(const at::Tensor& shape, c10::Device device) {
  return at::detail::empty_strided_cuda(shape.sizes(), shape.strides(), shape.scalar_type(), device);
}

// A number on the host is part of the launch: what happens to it later must not be seen.
at::Tensor part_of_launch(const at::Tensor& tensor) { return tensor.clone(); }

void add_arguments(Work& work, const Operator& op, const Values& arguments, bool runs_later) {
  StandIns stand_ins(StandIn::host);
  work.arguments.reserve(arguments.size() + op.returned.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    if (value.isDevice()) work.arguments.emplace_back(c10::Device(c10::kCPU));
    else if (value.isGenerator() || op.pin_memory == i) work.arguments.emplace_back();
    else
      work.arguments.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
        return tensor.is_cuda() || !runs_later ? stand_ins.of(tensor) : part_of_launch(tensor);
      }));
  }
}

// Torch resizes what is given as out= to the shape of the result.
void resize_outs(const Operator& op, const Values& arguments, const std::vector<at::Tensor>& shapes) {
  c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
  for (size_t k = 0; k < op.outs.size(); ++k) {
    const auto& out = arguments[op.outs[k]].toTensor();
    if (out.sizes() == shapes[k].sizes()) continue;
    out.resize_(shapes[k].sizes());
    const bool dense = shapes[k].is_non_overlapping_and_dense();
    if (dense && out.strides() != shapes[k].strides()) out.as_strided_(shapes[k].sizes(), shapes[k].strides());
  }
}

// Push each result: an argument that is written, or a new tensor that `make` gives for what a kernel returned.
template <class Make>
void push_results(const Operator& op, const Values& arguments, const Values& returned, torch::jit::Stack* stack,
                  const Make& make) {
  for (size_t k = 0; k < op.returned.size(); ++k) {
    if (op.returned[k] >= 0) stack->push_back(arguments[op.returned[k]]);
    else stack->push_back(map_tensors(returned[k], make));
  }
}

// The results where the work stores them, in the order in which the kernel returns them.
void add_results(Work& work, const Operator& op, const Values& results) {
  if (op.out_variant) {
    work.kernel = *op.out_variant;
    for (const auto& result : results) work.arguments.emplace_back(host_stand_in(result.toTensor()));
    return;
  }
  bool any = false;
  const auto add = [&](const at::Tensor& tensor, bool is_new) {
    any = any || (is_new && tensor.defined());
    work.results.push_back(is_new && tensor.defined() ? host_stand_in(tensor) : at::Tensor());
  };
  for (size_t k = 0; k < results.size(); ++k) {
    if (results[k].isTensor()) add(results[k].toTensor(), op.returned[k] < 0);
    else if (results[k].isTensorList())
      for (const at::Tensor& tensor : results[k].toTensorVector()) add(tensor, op.returned[k] < 0);
  }
  if (!any) work.results.clear();
}

// CUDA code launches nothing for results without elements.
bool is_empty(const Values& results) {
  bool empty = !results.empty();
  for (const auto& result : results)
    visit_tensors(result, [&](const at::Tensor& tensor) { empty = empty && tensor.numel() == 0; });
  return empty;
}

void queue(const Operator& op, const Values& arguments, c10::Device device, cudaStream_t stream, bool runs_later,
           torch::jit::Stack* stack) {
  auto shapes = shapes_of(op, arguments, device);
  resize_outs(op, arguments, shapes.outs);
  auto work = std::make_unique<Work>(Work{&op, op.handle, {}, {}, Draw::at_launch(op, arguments, device.index())});
  add_arguments(*work, op, arguments, runs_later);
  const auto first = stack->size();
  push_results(op, arguments, shapes.results, stack,
               [&](const at::Tensor& shape) { return allocated_like(shape, device); });
  const Values results(stack->begin() + first, stack->end());
  if (is_empty(results)) return;
  add_results(*work, op, results);
  launch(stream, std::move(work));
}

// For results whose size depends on data, and where the shapes alone would cost as much as the kernel.
void compute_now(const Operator& op, const Values& arguments, c10::Device device, cudaStream_t stream,
                 torch::jit::Stack* stack) {
  Work work{&op, op.handle, {}, {}, Draw::at_launch(op, arguments, device.index())};
  add_arguments(work, op, arguments, false);
  std::vector<at::Tensor> outs;
  for (size_t i : op.outs) {
    outs.push_back(at::empty({0}, arguments[i].toTensor().options().device(c10::kCPU)));
    work.arguments[i] = outs.back();
  }
  count_launch(stream, op);
  work.draw.run(op.handle, work.arguments);
  resize_outs(op, arguments, outs);
  c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
  const auto store = [](const at::Tensor& to, const at::Tensor& from) {
    auto stand_in = host_stand_in(to);
    at::native::copy_(stand_in, from, false);
    return to;
  };
  for (size_t k = 0; k < outs.size(); ++k) store(arguments[op.outs[k]].toTensor(), outs[k]);
  push_results(op, arguments, work.arguments, stack,
               [&](const at::Tensor& tensor) { return store(allocated_like(tensor, device), tensor); });
}

}  // namespace

void emulate(const Operator& op, torch::jit::Stack* stack) {
  Values arguments = torch::jit::pop(*stack, op.handle.schema().arguments().size());
  const auto device = device_of(arguments);
  c10::cuda::OptionalCUDAGuard on_device(device);
  if (op.prepare) op.prepare(arguments);
  check_devices(op, arguments, device);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool waits = must_wait(op, arguments);
  const bool captures = is_capturing(stream);
  if (waits) c10::cuda::stream_synchronize(stream);  // refused under capture, as on a GPU
  // Only its kernel knows the shapes of a foreign operator's results: they may depend on the data.
  else if (op.is_foreign && !captures && is_asynchronous()) C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  const bool runs_later = !waits && (captures || (is_asynchronous() && !op.is_foreign));
  if (!waits && (runs_later || op.asserts || has_cheap_shapes(op)))
    queue(op, arguments, device, stream, runs_later, stack);
  else compute_now(op, arguments, device, stream, stack);
}

}  // namespace emulator
