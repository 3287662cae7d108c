// CPU kernels of operators that torch has for CUDA only. A CPU never calls them by itself.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace emulator {
namespace {

// rstd is 1 / sqrt(mean(x^2) + eps), one number for each normalized row.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                                     at::IntArrayRef normalized_shape, const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> output_mask) {
  const auto outer = input.dim() - static_cast<int64_t>(normalized_shape.size());
  std::vector<int64_t> outer_dims(outer), inner_dims(normalized_shape.size());
  for (int64_t dim = 0; dim < input.dim(); ++dim) (dim < outer ? outer_dims[dim] : inner_dims[dim - outer]) = dim;
  const auto type = rstd.scalar_type();
  const auto normalized = input.to(type) * rstd, given = grad.to(type);
  const auto scaled = weight && weight->defined() ? given * weight->to(type) : given;
  at::Tensor of_input, of_weight;
  if (output_mask[0]) {
    const auto along = (scaled * normalized).mean(inner_dims, /*keepdim=*/true);
    of_input = ((scaled - normalized * along) * rstd).to(input.scalar_type());
  }
  if (output_mask[1] && weight && weight->defined()) {
    const auto products = given * normalized;
    of_weight = (outer ? products.sum(outer_dims) : products).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

at::Tensor mm(const at::Tensor& left, const at::Tensor& right, at::ScalarType type) {
  return at::mm(left.to(type), right.to(type));
}

at::Tensor bmm(const at::Tensor& left, const at::Tensor& right, at::ScalarType type) {
  return at::bmm(left.to(type), right.to(type));
}

at::Tensor addmm(const at::Tensor& added, const at::Tensor& left, const at::Tensor& right, at::ScalarType type,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(added.to(type), left.to(type), right.to(type), beta, alpha);
}

at::Tensor baddbmm(const at::Tensor& added, const at::Tensor& left, const at::Tensor& right, at::ScalarType type,
                   const at::Scalar& beta, const at::Scalar& alpha) {
  return at::baddbmm(added.to(type), left.to(type), right.to(type), beta, alpha);
}

}  // namespace

void add_cuda_only(torch::Library& library) {
  library.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  library.impl("mm.dtype", TORCH_FN(mm));
  library.impl("bmm.dtype", TORCH_FN(bmm));
  library.impl("addmm.dtype", TORCH_FN(addmm));
  library.impl("baddbmm.dtype", TORCH_FN(baddbmm));
}

}  // namespace emulator
