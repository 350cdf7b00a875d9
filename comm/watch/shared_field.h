// Fields that one thread writes while others read them.
#ifndef MOE_COMM_WATCH_SHARED_FIELD_H_
#define MOE_COMM_WATCH_SHARED_FIELD_H_

#include <atomic>

namespace moe {

// What was written before it, a reader of the new value sees, too. On x86 a plain store.
template <typename T>
void Store(std::atomic<T>& field, T value) {
  field.store(value, std::memory_order_release);
}
template <typename T>
T Load(const std::atomic<T>& field) {
  return field.load(std::memory_order_acquire);
}

}  // namespace moe

#endif  // MOE_COMM_WATCH_SHARED_FIELD_H_
