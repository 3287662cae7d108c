// Puts the kernels under torch's key CUDA.
#include <torch/library.h>

#include <atomic>
#include <map>
#include <set>

#include "alerts.h"
#include "emulate.h"
#include "forms.h"
#include "sparse.h"

namespace emulator {

void add_cells(torch::Library& library);
void add_cuda_only(torch::Library& library);

namespace {

using c10::DispatchKey;

struct Kernel : c10::OperatorKernel {
  Kernel(Operator described, Form chosen) : op(std::move(described)), form(chosen) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (op.alert) raise_alert(op, {stack->end() - op.handle.schema().arguments().size(), stack->end()});
    form(op, stack);
  }
  Operator op;
  Form form;
};

// An operator without a CPU kernel keeps torch's CUDA code. Its launches are counted by name.
bool is_emulated(const c10::OperatorHandle& handle, const std::string& name) {
  if (keeps_cuda_code(name)) return false;
  if (is_taken_whole(name) || form_of(name)) return true;
  return handle.hasKernelForDispatchKey(DispatchKey::CUDA) && handle.hasComputedKernelForDispatchKey(DispatchKey::CPU);
}

// A library of ours for a namespace and a key. It is never taken back.
torch::Library& library_for(const std::string& space, DispatchKey key) {
  static auto* libraries = new std::map<std::pair<std::string, DispatchKey>, torch::Library*>;
  auto& library = (*libraries)[{space, key}];
  if (!library) library = new torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__);
  return *library;
}

void add(torch::Library& library, Operator op, Form form) {
  const auto name = full_name(op.handle.operator_name());
  auto kernel = std::make_unique<Kernel>(std::move(op), form);
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

// A CUDA kernel in Python calls operators, which are emulated: it stays.
bool has_python_kernel(const c10::OperatorHandle& handle) {
  const auto state = handle.dumpState();
  const auto at = state.find("\nCUDA: registered at ");
  return at != state.npos && state.substr(at, state.find(" ::", at) - at).find(".py:") != state.npos;
}

// Collectives choose a library by the key, and copy nothing between devices themselves.
bool is_foreign_kernel(const c10::OperatorHandle& handle) {
  return handle.hasKernelForDispatchKey(DispatchKey::CUDA) && handle.hasKernelForDispatchKey(DispatchKey::CPU) &&
         handle.operator_name().getNamespace() != "c10d" && !has_python_kernel(handle);
}

// Whether a library has defined operators since this was asked last.
class NewOperators : public c10::OpRegistrationListener {
 public:
  static bool exchange() {
    static auto* listener = new NewOperators;
    static auto* registration = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::unique_ptr<c10::OpRegistrationListener>(listener)));
    (void)registration;
    return listener->any_.exchange(false);
  }
  void onOperatorRegistered(const c10::OperatorHandle&) override { any_ = true; }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

 private:
  std::atomic<bool> any_ = true;
};

void install_aten(const c10::OperatorHandle& handle) {
  const auto name = full_name(handle.operator_name());
  if (has_sparse_kernels(handle))
    add(library_for("aten", DispatchKey::SparseCUDA), describe_sparse(handle), emulate_sparse);
  if (!is_emulated(handle, name)) return;
  const auto form = form_of(name);
  add(library_for("aten", DispatchKey::CUDA), describe(handle), form ? form : emulate);
}

}  // namespace
}  // namespace emulator

extern "C" void cuda_emulator_install() {
  using namespace emulator;
  auto& host = library_for("aten", DispatchKey::CPU);
  add_cells(host);
  add_cuda_only(host);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto handle = dispatcher.findSchema(name);
    if (handle && is_aten(name)) install_aten(*handle);
  }
}

// The operators of libraries that were loaded since the last call, and of torch's other namespaces.
extern "C" void cuda_emulator_adopt() {
  using namespace emulator;
  if (!NewOperators::exchange()) return;
  static auto* known = new std::set<std::string>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto handle = is_aten(name) ? std::nullopt : dispatcher.findSchema(name);
    if (!handle || !is_foreign_kernel(*handle) || !known->insert(full_name(name)).second) continue;
    add(library_for(std::string(*name.getNamespace()), DispatchKey::CUDA), describe(*handle), emulate);
  }
}

// The names in our lists that this torch has no operator for, one a line.
extern "C" const char* cuda_emulator_names_without_operator() {
  static std::string text;
  text.clear();
  for (const auto& name : emulator::names_without_operator()) text += name + "\n";
  return text.c_str();
}
