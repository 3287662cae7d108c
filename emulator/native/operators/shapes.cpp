#include "shapes.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>

#include <string_view>

#include "devices.h"
#include "draws.h"
#include "stand_ins.h"

namespace emulator {
namespace {

using ShapeRule = at::Tensor (*)(const Values&);

at::Tensor rows_of_index(const Values& arguments) {
  const auto self = arguments[0].toTensor(), index = arguments[2].toTensor();
  const auto dim = at::maybe_wrap_dim(arguments[1].toInt(), self.dim());
  TORCH_CHECK_INDEX(index.dim() <= 1, "Index is supposed to be an empty tensor or a vector");
  auto sizes = self.sizes().vec();
  if (!sizes.empty()) sizes[dim] = index.numel();
  return at::empty(sizes, self.options().device(c10::kMeta));
}

at::Tensor given_size(const Values& arguments) {
  return at::empty({arguments[1].toInt()}, arguments[0].toTensor().options().device(c10::kMeta));
}

// A trial of index_select fills a whole table, and one of repeat_interleave repeats nothing.
ShapeRule rule_of(std::string_view name) {
  if (name == "aten::index_select") return rows_of_index;
  return name == "aten::repeat_interleave.Tensor" ? given_size : nullptr;
}

// The call with stand-ins of one kind. Fills in the outs before they are used up.
Values arguments_on(StandIn kind, const Operator& op, const Values& arguments, std::vector<at::Tensor>& outs) {
  StandIns stand_ins(kind);
  const c10::Device other = kind == StandIn::shape ? c10::kMeta : c10::kCPU;
  Values mapped;
  mapped.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    if (value.isDevice()) mapped.emplace_back(other);
    else if (value.isGenerator() || op.pin_memory == i) mapped.emplace_back();
    else mapped.push_back(map_tensors(value, [&](const at::Tensor& tensor) { return stand_ins.of(tensor); }));
  }
  outs.clear();
  for (size_t i : op.outs) outs.push_back(mapped[i].toTensor());
  return mapped;
}

// Run the CPU kernel on other numbers. Most operators take zeros, and a division takes ones.
void try_out(const Operator& op, const Values& arguments, Shapes& shapes) {
  try {
    shapes.results = arguments_on(StandIn::zeros, op, arguments, shapes.outs);
    Draw::for_trial(op).run(op.handle, shapes.results);
  } catch (const c10::Error&) {
    shapes.results = arguments_on(StandIn::ones, op, arguments, shapes.outs);
    Draw::for_trial(op).run(op.handle, shapes.results);
  }
}

}  // namespace

bool has_cheap_shapes(const Operator& op) { return op.shapes || rule_of(op.name); }

Shapes shapes_of(const Operator& op, const Values& arguments, c10::Device device) {
  Shapes shapes;
  if (const auto rule = op.shapes ? nullptr : rule_of(op.name)) {
    shapes.results.emplace_back(rule(arguments));
    return shapes;
  }
  if (!op.shapes) {
    try_out(op, arguments, shapes);
    return shapes;
  }
  shapes.results = arguments_on(StandIn::shape, op, arguments, shapes.outs);
  run_shape_kernel(op, shapes.results, device);
  return shapes;
}

}  // namespace emulator
