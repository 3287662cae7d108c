#include "draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

namespace emulator {
namespace {

constexpr uint64_t NUMBERS_PER_LAUNCH = 4;

// The default generator of the CPU is shared, and the program's own numbers on the CPU must not change.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(uint64_t seed) : lock_(mutex()), generator_(at::detail::getDefaultCPUGenerator()) {
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~DefaultGenerator() { generator_.set_state(before_); }

 private:
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator generator_;
  at::Tensor before_;
};

}  // namespace

c10::DispatchKeySet keys_above_kernels() {
  using c10::DispatchKey;
  static const auto keys =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch,
                           DispatchKey::PythonDispatcher, DispatchKey::Functionalize,
                           DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});
  return keys;
}

void run_kernel(const c10::OperatorHandle& kernel, c10::DispatchKey key, Values& stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
  kernel.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

Draw Draw::at_launch(const Operator& op, const Values& arguments, c10::DeviceIndex device) {
  Draw draw;
  if (!op.draws) return draw;
  std::optional<at::Generator> given;
  if (op.generator && arguments[*op.generator].isGenerator()) given = arguments[*op.generator].toGenerator();
  const auto& usual = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(given, usual);
  std::lock_guard<std::mutex> lock(generator->mutex_);
  draw.used_ = true;
  draw.argument_ = op.generator;
  draw.state_ = generator->philox_cuda_state(NUMBERS_PER_LAUNCH);
  return draw;
}

Draw Draw::for_trial(const Operator& op) {
  Draw draw;
  draw.used_ = op.draws;
  draw.argument_ = op.generator;
  return draw;
}

// Under capture the generator's state lies in device memory, and each replay reads it.
uint64_t Draw::seed() const {
  const auto& state = state_;
  const uint64_t seed = state.captured_ ? static_cast<uint64_t>(*state.seed_.ptr) : state.seed_.val;
  const uint64_t offset =
      state.captured_ ? static_cast<uint64_t>(*state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
  return ((seed * 0x9E3779B97F4A7C15ull) ^ ((offset + 1) * 0xD1B54A32D192ED03ull)) >> 16;
}

void Draw::run(const c10::OperatorHandle& kernel, Values& stack) const {
  if (!used_) return run_kernel(kernel, c10::DispatchKey::CPU, stack);
  if (argument_) {
    stack[*argument_] = at::detail::createCPUGenerator(seed());
    return run_kernel(kernel, c10::DispatchKey::CPU, stack);
  }
  DefaultGenerator seeded(seed());
  run_kernel(kernel, c10::DispatchKey::CPU, stack);
}

}  // namespace emulator
