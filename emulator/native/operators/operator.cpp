#include "operator.h"

#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "alerts.h"
#include "forms.h"
#include "operator_table.h"

namespace emulator {
namespace {

using Names = std::unordered_set<std::string>;

Names names_of(const std::string& words) {
  std::istringstream stream(words);
  return {std::istream_iterator<std::string>(stream), {}};
}

// With namespace and overload.
const Names KEPT = names_of(
    "aten::empty.memory_format aten::empty_strided aten::_efficientzerotensor aten::as_strided aten::view "
    "aten::view.dtype aten::_unsafe_view aten::_reshape_alias aten::unfold aten::view_as_real "
    "aten::view_as_complex aten::alias aten::detach aten::set_ aten::set_.source_Storage "
    "aten::set_.source_Storage_storage_offset aten::set_.source_Tensor aten::is_set_to aten::resize_ "
    "aten::record_stream aten::is_pinned aten::pin_memory aten::_pin_memory aten::_local_scalar_dense "
    "aten::_to_copy aten::_copy_from_and_resize aten::_lazy_clone aten::_unsafe_index.Tensor "
    "aten::_to_sparse aten::_to_sparse.sparse_dim aten::_to_sparse_csr aten::_to_sparse_csc "
    "aten::_to_sparse_bsr aten::_to_sparse_bsc");
const Names TAKEN_WHOLE = names_of("aten::convolution aten::convolution_backward");

// The others are names of aten without overload.
const Names WAIT = names_of(
    "equal nonzero masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive "
    "bincount linalg_eig linalg_eigvals _linalg_eigvals _linalg_eigh _linalg_svd linalg_lstsq cholesky "
    "linalg_matrix_exp _ctc_loss embedding_renorm_ segment_reduce _nested_tensor_from_mask "
    "_nested_tensor_from_mask_left_aligned");
const Names WAIT_BY_ARGUMENTS = names_of("histc repeat_interleave");
const Names DRAW_WITHOUT_GENERATOR = names_of("native_dropout _fused_dropout _sample_dirichlet");
// Their CUDA kernels stop with a device-side assert. A shape that does not fit is refused on the host.
const Names ASSERT = names_of(
    "index _index_put_impl_ index_select index_add index_add_ index_copy index_copy_ index_reduce "
    "index_reduce_ index_fill_ gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ "
    "take put_ embedding_dense_backward _embedding_bag _embedding_bag_forward_only "
    "_embedding_bag_dense_backward embedding_renorm_ nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward multi_margin_loss multilabel_margin_loss_forward max_unpool2d max_unpool3d "
    "masked_scatter_ binary_cross_entropy bernoulli_ multinomial _assert_async");

const TableRow* row_of(const std::string& name) {
  static const auto* rows = [] {
    auto* made = new std::unordered_map<std::string_view, const TableRow*>;
    for (const auto& row : OPERATOR_TABLE) made->emplace(row.name, &row);
    return made;
  }();
  auto found = rows->find(name);
  return found == rows->end() ? nullptr : found->second;
}

bool holds_tensors(const c10::Argument& argument) {
  const auto type = argument.type()->str();
  return type.rfind("Tensor", 0) == 0 || type.rfind("Optional[Tensor", 0) == 0 || type.rfind("List[", 0) == 0;
}

void describe_arguments(Operator& op, const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_list = arguments[i].type()->kind() == c10::TypeKind::ListType;
    if (arguments[i].is_out() && !is_list) op.outs.push_back(i);
    if (arguments[i].name() == "generator") op.generator = i;
    if (arguments[i].name() == "pin_memory") op.pin_memory = i;
  }
  op.checked = op.outs;  // torch's order: the outs, then the positional arguments
  for (size_t i = 0; i < arguments.size(); ++i)
    if (!arguments[i].kwarg_only() && holds_tensors(arguments[i])) op.checked.push_back(i);
  for (const auto& result : schema.returns()) {
    int written = -1;
    for (size_t i = 0; result.alias_info() && result.alias_info()->isWrite() && i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) written = (int)i;
    }
    op.returned.push_back(written);
  }
}

// The variant must take the same arguments and then one tensor for each result.
std::optional<c10::OperatorHandle> out_variant_of(const Operator& op, const TableRow* row) {
  if (!row || !*row->out || !op.outs.empty()) return std::nullopt;
  for (const auto& written : op.returned)
    if (written >= 0) return std::nullopt;
  const std::string name = row->out;
  const auto dot = name.find('.');
  auto found = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), name.substr(dot + 1)});
  if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
  const auto& own = op.handle.schema();
  const auto& other = found->schema();
  if (other.arguments().size() != own.arguments().size() + own.returns().size()) return std::nullopt;
  for (size_t i = 0; i < own.arguments().size(); ++i)
    if (own.arguments()[i].name() != other.arguments()[i].name()) return std::nullopt;
  return found;
}

// Composites are no source of shapes: they may call an operator that has none.
bool has_shapes(const c10::OperatorHandle& handle) {
  return handle.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
         handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

Waits waits_of(const std::string& bare, const c10::FunctionSchema& schema) {
  if (WAIT.count(bare)) return Waits::always;
  const bool checks = schema.argumentIndexWithName("check_errors").has_value();
  return WAIT_BY_ARGUMENTS.count(bare) || checks ? Waits::by_arguments : Waits::never;
}

}  // namespace

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool keeps_cuda_code(const std::string& name) { return KEPT.count(name); }
bool is_taken_whole(const std::string& name) { return TAKEN_WHOLE.count(name); }

bool is_aten(const c10::OperatorName& name) { return name.name.rfind("aten::", 0) == 0; }

std::vector<std::string> names_without_operator() {
  Names full, bare;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    full.insert(full_name(name));
    if (is_aten(name)) bare.insert(name.name.substr(6));
  }
  std::vector<std::string> missing;
  const auto check = [&](const auto& names, const Names& known) {
    std::copy_if(names.begin(), names.end(), std::back_inserter(missing),
                 [&](auto& name) { return !known.count(name); });
  };
  for (const auto* names : {&KEPT, &TAKEN_WHOLE}) check(*names, full);
  for (const auto* names : {&WAIT, &WAIT_BY_ARGUMENTS, &DRAW_WITHOUT_GENERATOR, &ASSERT}) check(*names, bare);
  check(names_of_alerts(), bare);
  return missing;
}

Operator describe(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  Operator op{handle};
  op.name = full_name(handle.operator_name());
  const bool is_torchs = is_aten(handle.operator_name());
  // The lists are of aten. Another library may use the same names.
  const auto bare = is_torchs ? handle.operator_name().name.substr(6) : std::string();
  const auto* row = row_of(op.name);
  if (row) op.wrapper = row->wrapper;
  describe_arguments(op, schema);
  if (has_shapes(handle)) op.shapes = handle.getComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  op.out_variant = out_variant_of(op, row);
  op.draws = op.generator || DRAW_WITHOUT_GENERATOR.count(bare);
  op.asserts = ASSERT.count(bare);
  op.prepare = preparation_of(op.name);
  op.waits = waits_of(bare, schema);
  if (op.name == "torchvision::nms") op.waits = Waits::always;  // it builds the list of boxes on the host
  op.alert = alert_of(bare);
  op.is_foreign = !is_torchs;
  return op;
}

Operator describe_sparse(const c10::OperatorHandle& handle) {
  auto op = describe(handle);
  const auto at = op.wrapper.find("CUDA");
  if (at != std::string::npos) op.wrapper.insert(at, "Sparse");
  op.shapes.reset();
  return op;
}

bool must_wait(const Operator& op, const Values& arguments) {
  if (op.waits != Waits::by_arguments) return op.waits == Waits::always;
  const auto& schema = op.handle.schema();
  auto argument = [&](const char* name) { return arguments[*schema.argumentIndexWithName(name)]; };
  if (schema.argumentIndexWithName("check_errors")) return argument("check_errors").toBool();
  if (schema.argumentIndexWithName("output_size")) return argument("output_size").isNone();
  // histc takes its bounds from the data where they are equal.
  return argument("min").toScalar().toDouble() == argument("max").toScalar().toDouble();
}

}  // namespace emulator
