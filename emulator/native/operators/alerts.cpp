#include "alerts.h"

#include <ATen/Context.h>

#include <unordered_map>

namespace emulator {
namespace {

const c10::IValue& named(const Operator& op, const Values& arguments, const char* name) {
  return arguments[*op.handle.schema().argumentIndexWithName(name)];
}

bool is_floating(const Operator&, const Values& arguments) { return arguments[0].toTensor().is_floating_point(); }
bool is_reduced(const Operator& op, const Values& arguments) {
  constexpr int64_t NONE = 0;
  return named(op, arguments, "reduction").toInt() != NONE;
}
bool has_weights(const Operator& op, const Values& arguments) { return named(op, arguments, "weights").isTensor(); }
bool has_indices(const Operator& op, const Values&) { return op.handle.schema().returns().size() == 2; }
bool takes_maximum(const Operator& op, const Values& arguments) { return named(op, arguments, "mode").toInt() == 2; }
bool is_product(const Operator& op, const Values& arguments) {
  return named(op, arguments, "reduce").toStringRef() == "prod";
}
// Of a tensor: torch multiplies by a number in a kernel that is deterministic.
bool multiplies(const Operator& op, const Values& arguments) {
  const auto& schema = op.handle.schema();
  return schema.argumentIndexWithName("reduce") && schema.argumentIndexWithName("src") &&
         named(op, arguments, "reduce").toStringRef() == "multiply";
}

// test_determinism.py compares each row with torch's own CUDA code.
const Alert ALERTS[] = {
    {"avg_pool3d_backward", "avg_pool3d_backward_cuda"},
    {"_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
    {"_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward_cuda"},
    {"adaptive_max_pool2d_backward", "adaptive_max_pool2d_backward_cuda"},
    {"max_pool3d_with_indices_backward", "max_pool3d_with_indices_backward_cuda"},
    {"fractional_max_pool2d_backward", "fractional_max_pool2d_backward_cuda"},
    {"fractional_max_pool3d_backward", "fractional_max_pool3d_backward_cuda"},
    {"max_unpool2d", "max_unpooling2d_forward_out"},
    {"max_unpool3d", "max_unpooling3d_forward_out"},
    {"upsample_linear1d_backward", "upsample_linear1d_backward_out_cuda"},
    {"upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
    {"upsample_bicubic2d_backward", "upsample_bicubic2d_backward_out_cuda"},
    {"upsample_trilinear3d_backward", "upsample_trilinear3d_backward_out_cuda"},
    {"_upsample_bilinear2d_aa_backward", "upsample_bilinear2d_aa_backward_out_cuda"},
    {"_upsample_bicubic2d_aa_backward", "upsample_bicubic2d_aa_backward_out_cuda"},
    {"reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
    {"reflection_pad3d_backward", "reflection_pad3d_backward_out_cuda"},
    {"replication_pad1d_backward", "replication_pad1d_backward_cuda"},
    {"replication_pad2d_backward", "replication_pad2d_backward_cuda"},
    {"replication_pad3d_backward", "replication_pad3d_backward_cuda"},
    {"nll_loss2d_forward", "nll_loss2d_forward_out_cuda_template", is_reduced},
    {"_ctc_loss_backward", "ctc_loss_backward_gpu"},
    {"_embedding_bag_backward", "embedding_bag_backward_cuda_max", takes_maximum},
    {"_embedding_bag_dense_backward", "embedding_bag_backward_cuda_max", takes_maximum},
    {"put_", "put_"},
    {"histc", "_histc_cuda with floating point input", is_floating},
    {"bincount", "_bincount_cuda", has_weights},
    {"median", "median CUDA with indices output", has_indices},
    {"nanmedian", "median CUDA with indices output", has_indices},
    {"grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
    {"grid_sampler_3d_backward", "grid_sampler_3d_backward_cuda"},
    {"scatter", "scatter_reduce_cuda_kernel", multiplies},
    {"scatter_", "scatter_reduce_cuda_kernel", multiplies},
    {"scatter_reduce", "scatter_reduce_cuda_prod_", is_product},
    {"scatter_reduce_", "scatter_reduce_cuda_prod_", is_product},
    {"index_reduce", "index_reduce_cuda"},
    {"index_reduce_", "index_reduce_cuda"},
};

}  // namespace

const Alert* alert_of(const std::string& bare_name) {
  static const auto* alerts = [] {
    auto* made = new std::unordered_map<std::string, const Alert*>;
    for (const auto& alert : ALERTS) made->emplace(alert.op, &alert);
    return made;
  }();
  const auto place = alerts->find(bare_name);
  return place == alerts->end() ? nullptr : place->second;
}

void raise_alert(const Operator& op, const Values& arguments) {
  if (!op.alert || !at::globalContext().deterministicAlgorithms()) return;
  if (!op.alert->concerns || op.alert->concerns(op, arguments))
    at::globalContext().alertNotDeterministic(op.alert->caller);
}

std::vector<std::string> names_of_alerts() {
  std::vector<std::string> names;
  for (const auto& alert : ALERTS) names.emplace_back(alert.op);
  return names;
}

}  // namespace emulator
