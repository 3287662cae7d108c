#include "stand_ins.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

namespace emulator {
namespace {

at::Tensor view_of(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  // The bits that say "not yet conjugated" belong to the data.
  const auto lazy = like.key_set() & c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  const auto keys = c10::DispatchKeySet(key) | lazy;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

c10::Storage on_host(const c10::Storage& storage) {
  c10::DataPtr data(storage.unsafeGetStorageImpl()->mutable_data(), c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false};
}

c10::Storage without_memory(const c10::Storage& storage) {
  c10::DataPtr data(nullptr, c10::Device(c10::kMeta));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kMeta), true};
}

at::Tensor filled(const at::Tensor& tensor, StandIn kind) {
  const auto type = tensor.scalar_type();
  const bool is_whole = !at::isFloatingType(type) && !at::isComplexType(type);
  const auto options = tensor.options().device(c10::kCPU).pinned_memory(false);
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return made.fill_(is_whole && kind == StandIn::zeros ? 0 : 1);
}

}  // namespace

at::Tensor host_stand_in(const at::Tensor& tensor) {
  return view_of(on_host(tensor.storage()), tensor, c10::DispatchKey::CPU);
}

at::Tensor StandIns::of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto* impl = tensor.unsafeGetTensorImpl();
  for (const auto& [known, stand_in] : tensors_)
    if (known == impl) return stand_in;
  tensors_.emplace_back(impl, make(tensor));
  return tensors_.back().second;
}

at::Tensor StandIns::make(const at::Tensor& tensor) {
  if (kind_ == StandIn::zeros || kind_ == StandIn::ones) return filled(tensor, kind_);
  return view_of(storage_of(tensor), tensor, kind_ == StandIn::host ? c10::DispatchKey::CPU : c10::DispatchKey::Meta);
}

c10::Storage StandIns::storage_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto* impl = storage.unsafeGetStorageImpl();
  for (const auto& [known, stand_in] : storages_)
    if (known == impl) return stand_in;
  storages_.emplace_back(impl, kind_ == StandIn::host ? on_host(storage) : without_memory(storage));
  return storages_.back().second;
}

}  // namespace emulator
