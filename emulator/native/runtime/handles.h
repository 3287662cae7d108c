// Handles of streams, events, graphs and their nodes: numbers that are never used twice, so a handle of something that
// was destroyed is always an error. No memory lies at these numbers: they are above every address of a process.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

namespace emulator {

// Even numbers: torch keeps a stream that it did not make by its handle, and marks its own streams by the last bit.
uintptr_t new_handle();

// Not safe for threads: guarded by the lock of the state.
template <class Pointer>
class Handles {
 public:
  uintptr_t add(Pointer object) {
    const auto handle = new_handle();
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  // Null for a handle that does not exist.
  auto find(const void* handle) const -> decltype(std::shared_ptr(std::declval<Pointer>())) {
    const auto place = objects_.find((uintptr_t)handle);
    if (place == objects_.end()) return nullptr;
    return std::shared_ptr(place->second);
  }
  bool erase(const void* handle) { return objects_.erase((uintptr_t)handle); }
  auto begin() const { return objects_.begin(); }
  auto end() const { return objects_.end(); }

 private:
  std::map<uintptr_t, Pointer> objects_;
};

}  // namespace emulator
