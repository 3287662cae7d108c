#include "forms.h"

#include <ATen/Functions.h>
#include <ATen/native/TensorAdvancedIndexing.h>
#include <ATen/native/TensorAdvancedIndexingUtils.h>
#include <ATen/ops/copy_native.h>

#include <string_view>

#include "devices.h"
#include "emulate.h"
#include "stand_ins.h"

namespace emulator {
namespace {

using Stack = torch::jit::Stack;

// Masks become indices, which waits for the device. Indices of the host are copied to it.
void prepare_indices(Values& arguments) {
  const auto self = arguments[0].toTensor();
  const auto given = arguments[1].toOptionalTensorList();
  at::native::checkIndexTensorTypes(given, /*allow_int=*/true);
  c10::List<std::optional<at::Tensor>> indices;
  for (const auto& index : at::native::expandTensors(self, given, /*ensure_same_device=*/true))
    indices.push_back(index.defined() ? std::optional<at::Tensor>(index) : std::nullopt);
  arguments[1] = std::move(indices);
}

// A number is copied to the device, so a capture refuses it.
void prepare_index_put(Values& arguments) {
  prepare_indices(arguments);
  const auto device = arguments[0].toTensor().device();
  const auto value = arguments[2].toTensor();
  if (value.device() == device) return;
  if (value.dim() == 0) {
    arguments[2] = value.to(device);
    return;
  }
  TORCH_CHECK(!arguments[3].toBool(), "expected device ", device, " but got device ", value.device(),
              " for value tensor");  // where values are accumulated
  raise_two_devices(device, value.device());
}

// torch.where takes 0-dim CPU tensors in every place, and copies them to the device.
void prepare_where(Values& arguments) {
  const auto device = device_of(arguments);
  for (size_t i = 0; i < 3; ++i) {
    const auto tensor = arguments[i].toTensor();
    if (tensor.device() != device && tensor.dim() == 0) arguments[i] = tensor.to(device);
  }
}

void prepare_masked_fill(Values& arguments) {
  const auto self = arguments[0].toTensor(), mask = arguments[1].toTensor();
  TORCH_CHECK(self.device() == mask.device(), "expected self and mask to be on the same device, but got mask on ",
              mask.device(), " and self on ", self.device());
}

void prepare_convolution(Values& arguments) {
  const auto input = arguments[0].toTensor();
  for (size_t i : {1, 2}) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const auto parameter = arguments[i].toTensor();
    TORCH_CHECK(input.options().type_equal(parameter.options()), "Input type (", input.toString(), ") and ",
                i == 1 ? "weight" : "bias", " type (", parameter.toString(), ") should be the same");
  }
}

at::Tensor argument(const Stack& stack, size_t of, size_t index) { return stack[stack.size() - of + index].toTensor(); }

void finish(Stack* stack, size_t count, const at::Tensor& result) {
  stack->resize(stack->size() - count);
  stack->emplace_back(result);
}

// A number under a mask needs no indices.
void index_put(const Operator& op, Stack* stack) {
  const auto self = argument(*stack, 5, 0), value = argument(*stack, 5, 2);
  const auto given = (*stack)[stack->size() - 4].toOptionalTensorList();
  if (!(*stack)[stack->size() - 2].toBool()) {
    const auto [fills, mask] = at::native::canDispatchToMaskedFill(self, given, value);
    if (fills) {
      self.masked_fill_(mask, value.item());
      return finish(stack, 5, self);
    }
  }
  emulate(op, stack);
}

void fill_with_tensor(const Operator&, Stack* stack) {
  const auto self = argument(*stack, 2, 0), value = argument(*stack, 2, 1);
  TORCH_CHECK(value.dim() == 0, "fill_ only supports 0-dimension value tensor but got tensor with ", value.dim(),
              " dimensions.");
  if (self.device() != value.device()) self.fill_(value.item());
  else self.copy_(self.is_alias_of(value) ? value.clone() : value);
  finish(stack, 2, self);
}

// The value is read from the device.
void masked_fill_with_tensor(const Operator&, Stack* stack) {
  const auto self = argument(*stack, 3, 0), mask = argument(*stack, 3, 1), value = argument(*stack, 3, 2);
  TORCH_CHECK(value.dim() == 0, "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with ",
              value.dim(), " dimension(s).");
  TORCH_CHECK(!self.device().is_cpu(), "masked_fill_: Expected inputs to be on same device");
  self.masked_fill_(mask, value.item());
  finish(stack, 3, self);
}

void index_fill_with_tensor(const Operator&, Stack* stack) {
  const auto self = argument(*stack, 4, 0), index = argument(*stack, 4, 2), value = argument(*stack, 4, 3);
  TORCH_CHECK(value.dim() == 0, "index_fill_ only supports a 0-dimensional value tensor, but got tensor with ",
              value.dim(), " dimension(s).");
  self.index_fill_((*stack)[stack->size() - 3].toInt(), index, value.item());
  finish(stack, 4, self);
}

// The meta kernel, which gives the shape, does not take an index without elements.
void index_add(const Operator& op, Stack* stack) {
  const auto self = argument(*stack, 5, 0), index = argument(*stack, 5, 2);
  if (index.numel()) return emulate(op, stack);
  finish(stack, 5, op.name == "aten::index_add_" ? self : self.clone());
}

// The CPU's kernel counts no integers.
void histc(const Operator& op, Stack* stack) {
  const auto self = argument(*stack, 4, 0);
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) return emulate(op, stack);
  *(stack->end() - 4) = self.to(at::kDouble);
  emulate(op, stack);
  stack->back() = stack->back().toTensor().to(self.scalar_type());
}

// Lists on other devices are copied one by one.
void copy_lists(const Operator& op, Stack* stack) {
  const auto to = (*stack)[stack->size() - 3].toTensorVector(), from = (*stack)[stack->size() - 2].toTensorVector();
  bool same = true;
  for (size_t i = 0; i < to.size() && i < from.size(); ++i) same = same && to[i].device() == from[i].device();
  if (same) return emulate(op, stack);
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], stack->back().toBool());
  stack->resize(stack->size() - 3);
}

// Torch copies by the runtime where no kernel is needed: between devices, and of equal layouts.
void copy(const Operator& op, Stack* stack) {
  auto self = argument(*stack, 3, 0), source = argument(*stack, 3, 1);
  const bool same_layout = self.dtype() == source.dtype() && self.sizes() == source.sizes() && self.is_contiguous() &&
                           source.is_contiguous() && self.is_conj() == source.is_conj() &&
                           self.is_neg() == source.is_neg();
  const bool one_device = self.is_cuda() && self.device() == source.device();
  if (one_device && !(same_layout && self.numel())) return emulate(op, stack);
  const bool two_devices = self.is_cuda() && source.is_cuda() && !one_device;
  if (two_devices && !same_layout && self.numel()) {
    // A GPU's kernel reads the other device. Here the layouts are made equal on their own devices, and bytes are moved.
    const auto given = source.to(self.scalar_type()).expand(self.sizes()).resolve_conj().resolve_neg().contiguous();
    auto moved = at::empty(self.sizes(), self.options().memory_format(at::MemoryFormat::Contiguous));
    at::native::copy_(moved, given, stack->back().toBool());
    self.copy_(moved);
    return finish(stack, 3, self);
  }
  at::native::copy_(self, source, stack->back().toBool());
  finish(stack, 3, self);
}

// The fused kernels are not part of the device: 0 is SDPBackend::math.
void choose_attention(const Operator& op, Stack* stack) {
  stack->resize(stack->size() - op.handle.schema().arguments().size());
  stack->emplace_back(int64_t(0));
}

// `sdpa_kernel` switches the fused kernels on again. They are computed by the math path, without what a gradient needs.
void fused_attention(const Operator& op, Stack* stack) {
  const auto& schema = op.handle.schema();
  const Values given = torch::jit::pop(*stack, schema.arguments().size());
  const auto of = [&](const char* name) { return given[*schema.argumentIndexWithName(name)]; };
  const auto query = given[0].toTensor(), key = given[1].toTensor();
  const bool biased = schema.argumentIndexWithName("attn_bias") && of("attn_bias").isTensor();
  const auto bias = biased ? std::optional<at::Tensor>(of("attn_bias").toTensor()) : std::nullopt;
  const auto output = std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, given[2].toTensor(), bias, of("dropout_p").toDouble(),
                                             of("is_causal").toBool(), std::nullopt, of("scale").toOptional<double>()));
  stack->emplace_back(output);
  for (size_t i = 1; i < schema.returns().size(); ++i) {
    const auto& name = schema.returns()[i].name();
    if (name == "max_q" || name == "max_k") stack->emplace_back((name == "max_q" ? query : key).size(2));
    else stack->emplace_back(at::empty({0}, query.options()));
  }
}

}  // namespace

Preparation preparation_of(const std::string& name) {
  if (name == "aten::index.Tensor" || name == "aten::index.Tensor_out") return prepare_indices;
  if (name == "aten::_index_put_impl_") return prepare_index_put;
  if (name == "aten::where.self" || name == "aten::where.self_out") return prepare_where;
  if (name == "aten::masked_fill_.Scalar") return prepare_masked_fill;
  return name == "aten::convolution" ? prepare_convolution : nullptr;
}

Form form_of(const std::string& name) {
  if (name == "aten::copy_") return copy;
  if (name == "aten::_foreach_copy_") return copy_lists;
  if (name == "aten::fill_.Tensor") return fill_with_tensor;
  if (name == "aten::masked_fill_.Tensor") return masked_fill_with_tensor;
  if (name == "aten::index_fill_.int_Tensor") return index_fill_with_tensor;
  if (name == "aten::_index_put_impl_") return index_put;
  if (name == "aten::index_add" || name == "aten::index_add_") return index_add;
  if (name == "aten::histc") return histc;
  for (const char* kind : {"flash", "efficient", "cudnn"})
    if (name == std::string("aten::_scaled_dot_product_") + kind + "_attention") return fused_attention;
  return name == "aten::_fused_sdp_choice" ? choose_attention : nullptr;
}

}  // namespace emulator
