// CPU kernels of the fused LSTM and GRU cells, which torch has for CUDA only. A CPU never calls them by itself.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace emulator {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor bias_gradient(const at::Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0) : at::Tensor(); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx, const OptionalTensor& input_bias,
                                                         const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                                  const OptionalTensor& grad_cy, const at::Tensor& cx,
                                                                  const at::Tensor& cy, const at::Tensor& workspace,
                                                                  bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto squashed = cy.tanh();
  const auto of_hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto of_cy = of_hy * out * (1 - squashed * squashed);
  if (grad_cy && grad_cy->defined()) of_cy = of_cy + *grad_cy;
  const auto grad_gates = at::cat({of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
                                   of_cy * in * (1 - cell * cell), of_hy * squashed * out * (1 - out)},
                                  1);
  return {grad_gates, of_cy * forget, bias_gradient(grad_gates, has_bias)};
}

// The workspace holds what the gradient needs: the three gates, the state, and the hidden part of the new gate.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto update = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hy,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
  const auto of_update = grad_hy * (hx - fresh) * update * (1 - update);
  const auto of_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const auto of_reset = of_fresh * hidden * reset * (1 - reset);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad_hy * update, bias_gradient(of_input, has_bias), bias_gradient(of_hidden, has_bias)};
}

}  // namespace

void add_cells(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace emulator
