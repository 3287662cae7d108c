// Operators of the CUDA key, run by their CPU kernels on the device's (host) memory. Loaded into torch; see README.md.
// While a stream captures, an operator is not run: its outputs are shaped by its meta kernel and allocated by torch's
// own allocator, and a kernel node that runs it later is put into the runtime's graph.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>

extern "C" int cuda_emulator_launch(cudaStream_t, const char*, void (*)(void*), void*, void (*)(void*));

extern "C" int cuda_emulator_is_asynchronous(void);
namespace {
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Values = std::vector<IValue>;

// Kept as torch has them: views, allocation, and what reads the device by itself.
const std::set<std::string> KEPT = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::view.dtype", "aten::_reshape_alias", "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_", "aten::resize_", "aten::unfold", "aten::view_as_real",
    "aten::view_as_complex", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::pin_memory", "aten::_local_scalar_dense",
    "aten::is_set_to", "aten::_fused_sdp_choice", "aten::copy_", "aten::_unsafe_view", "aten::alias", "aten::detach", "aten::_efficientzerotensor", "aten::_to_copy",
    "aten::_copy_from_and_resize", "aten::lazy_clone", "aten::_lazy_clone"};
// Composite operators that choose a library (cuDNN) inside: taken whole.
const std::set<std::string> TAKEN_WHOLE = {"aten::convolution", "aten::convolution_backward"};
// CUDA's kernels of these wait for the device: their output's size depends on data.
const std::set<std::string> WAITS = {"equal", "nonzero", "nonzero_static", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "repeat_interleave", "multinomial", "is_nonzero", "linalg_eig", "_linalg_eigh", "histc"};
const std::set<std::string> DRAWS = {"native_dropout", "_fused_dropout", "randperm", "rrelu_with_noise", "rrelu_with_noise_", "rand", "randn", "randint"};

c10::DispatchKeySet below() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
      DispatchKey::PreDispatch, DispatchKey::PythonDispatcher, DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});
}

at::Tensor make(c10::Storage storage, const at::Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
at::Tensor on_host(const at::Tensor& t) {
  if (!t.is_cuda()) return t;
  auto bytes = t.storage().nbytes();
  return make(c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(t.storage().mutable_data(), c10::Device(c10::kCPU)), nullptr, false), t, DispatchKey::CPU);
}
at::Tensor on_meta(const at::Tensor& t) {
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

template <class F> IValue mapped(const IValue& v, const F& f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) { c10::List<at::Tensor> out; for (const at::Tensor& t : v.toTensorVector()) out.push_back(t.defined() ? f(t) : t); return out; }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
    return out;
  }
  return v;
}

struct Draw { bool used = false; at::PhiloxCudaState state; bool by_argument = false; };

void call(const c10::OperatorHandle& op, DispatchKey key, Values& stack, const Draw& draw) {
  c10::impl::ExcludeDispatchKeyGuard guard(below());
  if (!draw.used) { op.redispatchBoxed(DispatchKeySet(key), &stack); return; }
  uint64_t seed = draw.state.captured_ ? (uint64_t)*draw.state.seed_.ptr : draw.state.seed_.val;
  uint64_t offset = draw.state.captured_ ? (uint64_t)*draw.state.offset_.ptr + draw.state.offset_intragraph_ : draw.state.offset_.val;
  uint64_t mixed = (seed * 0x9E3779B97F4A7C15ull) ^ ((offset + 1) * 0xD1B54A32D192ED03ull);
  if (draw.by_argument) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "generator") stack[i] = IValue(at::detail::createCPUGenerator(mixed >> 16));
    op.redispatchBoxed(DispatchKeySet(key), &stack);
    return;
  }
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  auto generator = at::detail::getDefaultCPUGenerator();
  auto before = generator.get_state();
  generator.set_current_seed(mixed >> 16);
  try { op.redispatchBoxed(DispatchKeySet(key), &stack); } catch (...) { generator.set_state(before); throw; }
  generator.set_state(before);
}

struct Work {  // what a kernel node holds: addresses, not tensors that keep memory alive
  c10::OperatorHandle op; Values args; std::vector<std::pair<size_t, at::Tensor>> out_args; std::vector<std::pair<size_t, at::Tensor>> results; Draw draw;
  void run() {
    Values stack = args;
    for (auto& [i, to] : out_args) stack[i] = IValue(at::empty({0}, to.options()));
    std::vector<at::Tensor> fresh;
    for (auto& [i, to] : out_args) fresh.push_back(stack[i].toTensor());
    call(op, DispatchKey::CPU, stack, draw);
    c10::impl::ExcludeDispatchKeyGuard guard(below());
    for (size_t k = 0; k < out_args.size(); ++k) at::native::copy_(out_args[k].second, fresh[k], false);
    std::vector<at::Tensor> made;
    for (auto& value : stack) { if (value.isTensor()) made.push_back(value.toTensor()); else if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) made.push_back(t); }
    for (auto& [at_index, to] : results)
      if (made[at_index].numel() || !to.numel()) at::native::copy_(to, made[at_index], false);  // CPU kernels leave some saved statistics empty
  }
};
std::string name_of(const c10::OperatorHandle& op) { return op.operator_name().overload_name.empty() ? op.operator_name().name : op.operator_name().name + "." + op.operator_name().overload_name; }

void emulate(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Values args(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  std::optional<c10::Device> device;
  auto see = [&](const at::Tensor& t) { if (!device && t.is_cuda()) device = t.device(); return t; };
  for (auto& v : args) { mapped(v, see); }
  for (auto& v : args) if (!device && v.isDevice() && v.toDevice().is_cuda()) device = v.toDevice();
  c10::cuda::OptionalCUDAGuard on_device(device);
  const auto where = device && device->has_index() ? *device : c10::Device(c10::kCUDA, c10::cuda::current_device());
  auto stream = c10::cuda::getCurrentCUDAStream();
  std::string bare = op.operator_name().name.substr(6);
  bool waits = WAITS.count(bare);
  if (bare.rfind("index", 0) == 0 || bare.rfind("_index_put", 0) == 0 || bare.rfind("_unsafe_index", 0) == 0)
    for (auto& v : args) if (v.isOptionalTensorList())  // a mask is turned into indices first
      for (const auto& t : v.toOptionalTensorVector()) if (t.has_value() && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) waits = true;
  if (waits) C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  bool capturing = status != cudaStreamCaptureStatusNone;
  if (!capturing && cuda_emulator_is_asynchronous()) {
    if (!waits && op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) capturing = true;
    else C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  }

  Draw draw;
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < count; ++i)
    if (schema.arguments()[i].name() == "generator") { draw.used = draw.by_argument = true; if (args[i].isGenerator()) generator = args[i].toGenerator(); }
  if (DRAWS.count(bare)) draw.used = true;
  if (draw.used) {
    auto* gen = at::get_generator_or_default<at::CUDAGeneratorImpl>(generator, at::cuda::detail::getDefaultCUDAGenerator(where.index()));
    std::lock_guard<std::mutex> lock(gen->mutex_);
    draw.state = gen->philox_cuda_state(4);
  }

  auto work = std::make_unique<Work>(Work{op, {}, {}, {}, draw});
  Values trial;  // on meta, while capturing
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    const auto& v = args[i];
    if (v.isDevice()) { work->args.emplace_back(c10::Device(c10::kCPU)); trial.emplace_back(c10::Device(c10::kMeta)); continue; }
    if (v.isGenerator() || argument.name() == "pin_memory") { work->args.emplace_back(); trial.emplace_back(); continue; }
    if (argument.is_out() && v.isTensor()) {
      work->out_args.emplace_back(i, at::Tensor());
      work->args.emplace_back();
      trial.emplace_back(at::empty({0}, v.toTensor().options().device(c10::kMeta)));
      continue;
    }
    // Numbers of the host are part of a launch: frozen by a capture.
    work->args.push_back(mapped(v, [&](const at::Tensor& t) { return t.is_cuda() ? on_host(t) : capturing ? t.clone() : t; }));
    if (capturing) trial.push_back(mapped(v, [](const at::Tensor& t) { return t.is_cuda() || t.dim() ? on_meta(t) : t; })); else trial.push_back(v);
  }
  const bool has_meta = op.hasComputedKernelForDispatchKey(DispatchKey::Meta);
  Values shaped;
  std::vector<at::Tensor> out_shapes;
  if (capturing) {
    Values values = has_meta ? trial : work->args;
    if (!has_meta) {
      for (size_t i = 0; i < count; ++i) {
        auto* info = schema.arguments()[i].alias_info();
        if (schema.arguments()[i].is_out()) values[i] = IValue(at::empty({0}, args[i].toTensor().options().device(c10::kCPU)));
        else if (info && info->isWrite()) values[i] = mapped(values[i], [](const at::Tensor& t) { return t.clone(); });
      }
    }
    std::vector<at::Tensor> outs;
    for (auto& [i, to] : work->out_args) outs.push_back(values[i].toTensor());
    Draw plain;
    plain.used = false;
    call(op, has_meta ? DispatchKey::Meta : DispatchKey::CPU, values, plain);
    shaped = std::move(values);
    out_shapes = outs;
  } else {
    Values values = work->args;
    for (auto& [i, to] : work->out_args) values[i] = IValue(at::empty({0}, args[i].toTensor().options().device(c10::kCPU)));
    for (auto& [i, to] : work->out_args) out_shapes.push_back(values[i].toTensor());
    call(op, DispatchKey::CPU, values, draw);
    shaped = std::move(values);
  }

  c10::impl::ExcludeDispatchKeyGuard guard(below());
  for (size_t k = 0; k < work->out_args.size(); ++k) {
    const size_t i = work->out_args[k].first;
    at::Tensor out = args[i].toTensor();
    if (out.sizes() != out_shapes[k].sizes()) out.resize_(out_shapes[k].sizes());
    work->out_args[k].second = on_host(out);
    if (!capturing) at::native::copy_(work->out_args[k].second, out_shapes[k], false);
  }
  size_t flat = 0;
  auto fresh = [&](const at::Tensor& t) -> at::Tensor {
    const size_t at_index = flat++;
    if (!t.defined()) return t;
    at::Tensor out = at::empty_strided(t.sizes(), t.strides(), t.options().device(where).pinned_memory(false));
    if (capturing) work->results.emplace_back(at_index, on_host(out));
    else { at::Tensor to = on_host(out); at::native::copy_(to, t, false); }
    return out;
  };
  for (size_t j = 0; j < schema.returns().size(); ++j) {
    auto* info = schema.returns()[j].alias_info();
    if (info && info->isWrite()) {
      ++flat;
      for (size_t i = 0; i < count; ++i) {
        auto* of = schema.arguments()[i].alias_info();
        if (of && of->isWrite() && of->beforeSets() == info->beforeSets()) { stack->push_back(args[i]); break; }
      }
      continue;
    }
    stack->push_back(mapped(shaped[j], fresh));
  }
  if (capturing) {
    const auto name = name_of(op);
    auto error = cuda_emulator_launch(stream, name.c_str(), [](void* w) { static_cast<Work*>(w)->run(); }, work.release(), [](void* w) { delete static_cast<Work*>(w); });
    if (error) { cudaGetLastError(); C10_CUDA_CHECK((cudaError_t)error); }
  } else {
    auto error = cuda_emulator_launch(stream, "eager", [](void*) {}, nullptr, [](void*) {});
    if (error) { cudaGetLastError(); C10_CUDA_CHECK((cudaError_t)error); }
  }
}

void copy(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto n = stack->size();
  at::Tensor self = (*stack)[n - 3].toTensor(), src = (*stack)[n - 2].toTensor();
  const bool plain = !self.is_cuda() || !src.is_cuda() || self.device() != src.device() ||
      (self.dtype() == src.dtype() && self.sizes() == src.sizes() && self.is_contiguous() && src.is_contiguous() && self.numel() && self.is_conj() == src.is_conj() && self.is_neg() == src.is_neg());
  if (!plain) { emulate(op, keys, stack); return; }
  const bool non_blocking = (*stack)[n - 1].toBool();
  stack->resize(n - 3);
  at::native::copy_(self, src, non_blocking);
  stack->emplace_back(self);
}
void math_only(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  stack->resize(stack->size() - op.schema().arguments().size());
  stack->emplace_back(int64_t(0));
}

size_t emulated = 0, left = 0;
std::string left_names;
struct Install {
  Install() {
    auto& dispatcher = c10::Dispatcher::singleton();
    static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      auto op = dispatcher.findSchema(name);
      if (!op) continue;
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      if (full == "aten::copy_") { library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&copy>()); continue; }
      if (full == "aten::_fused_sdp_choice") { library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&math_only>()); continue; }
      if (KEPT.count(full)) continue;
      const bool whole = TAKEN_WHOLE.count(full);
      if (!whole && !op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
      if (!op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) { ++left; left_names += full + "\n"; continue; }
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&emulate>());
      ++emulated;
    }
    if (getenv("CUDA_EMULATOR_TRACE")) fprintf(stderr, "[cuda_emulator] %zu operators emulated, %zu have no CPU kernel\n", emulated, left);
  }
} install;
}  // namespace
extern "C" const char* cuda_emulator_left_names() { return left_names.c_str(); }
extern "C" size_t cuda_emulator_emulated() { return emulated; }
