// Puts the kernels under torch's key CUDA.
#include <torch/library.h>

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
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) { form(op, stack); }
  Operator op;
  Form form;
};

// An operator without a CPU kernel keeps torch's CUDA code. Its launches are counted by name.
bool is_emulated(const c10::OperatorHandle& handle, const std::string& name) {
  if (keeps_cuda_code(name)) return false;
  if (is_taken_whole(name) || form_of(name)) return true;
  return handle.hasKernelForDispatchKey(DispatchKey::CUDA) && handle.hasComputedKernelForDispatchKey(DispatchKey::CPU);
}

torch::Library& library_for(DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // never taken back
}

void add(torch::Library& library, Operator op, Form form) {
  const auto name = op.name;
  auto kernel = std::make_unique<Kernel>(std::move(op), form);
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

}  // namespace
}  // namespace emulator

extern "C" void cuda_emulator_install() {
  using namespace emulator;
  auto& host = library_for(DispatchKey::CPU);
  add_cells(host);
  add_cuda_only(host);
  auto& library = library_for(DispatchKey::CUDA);
  auto& sparse = library_for(DispatchKey::SparseCUDA);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto handle = dispatcher.findSchema(name);
    const auto full = full_name(name);
    if (!handle) continue;
    if (has_sparse_kernels(*handle)) add(sparse, describe_sparse(*handle), emulate_sparse);
    if (!is_emulated(*handle, full)) continue;
    const auto form = form_of(full);
    add(library, describe(*handle), form ? form : emulate);
  }
}
