// Tasks that a stream runs on the host, stored in place.
#ifndef MOE_KERNELS_BASE_HOST_TASK_H_
#define MOE_KERNELS_BASE_HOST_TASK_H_

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>

namespace moe {

// Holds any callable that returns absl::Status. Move-only, since the callable may be. A callable of
// up to kInPlaceBytes is stored in place, so that a queue of tasks does not allocate: operations
// capture views and a few numbers.
class HostTask {
 public:
  static constexpr size_t kInPlaceBytes = 512;

  HostTask() = default;
  template <typename Run>
  requires(!std::is_same_v<std::decay_t<Run>, HostTask>) explicit HostTask(Run&& run) {
    using Callable = std::decay_t<Run>;
    if constexpr (kFits<Callable>) {
      Hold<Callable>(std::forward<Run>(run));
    } else {
      Hold<OnHeap<Callable>>(OnHeap<Callable>{std::make_unique<Callable>(std::forward<Run>(run))});
    }
  }
  ~HostTask() { Reset(); }
  HostTask(const HostTask&) = delete;
  HostTask& operator=(const HostTask&) = delete;
  HostTask(HostTask&& other) noexcept { TakeFrom(other); }
  HostTask& operator=(HostTask&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    TakeFrom(other);
    return *this;
  }

  explicit operator bool() const { return operations_ != nullptr; }
  absl::Status operator()() { return operations_->run(memory_); }

 private:
  static constexpr size_t kAlignment = 64;

  template <typename Callable>
  static constexpr bool kFits =
      sizeof(Callable) <= kInPlaceBytes &&
      alignof(Callable) <= kAlignment&& std::is_nothrow_move_constructible_v<Callable>;
  template <typename Callable>
  struct OnHeap {
    std::unique_ptr<Callable> run;
    absl::Status operator()() { return (*run)(); }
  };
  struct Operations {
    absl::Status (*run)(void* at);
    void (*move)(void* from, void* to);  // leaves nothing at `from`
    void (*destroy)(void* at);
  };

  template <typename Callable>
  static absl::Status RunAt(void* at) {
    return (*static_cast<Callable*>(at))();
  }
  template <typename Callable>
  static void MoveAt(void* from, void* to) {
    auto& callable = *static_cast<Callable*>(from);
    ::new (to) Callable(std::move(callable));
    callable.~Callable();
  }
  template <typename Callable>
  static void DestroyAt(void* at) {
    static_cast<Callable*>(at)->~Callable();
  }
  template <typename Callable>
  static constexpr Operations kOperationsOf = {RunAt<Callable>, MoveAt<Callable>,
                                               DestroyAt<Callable>};

  template <typename Callable, typename From>
  void Hold(From&& from) {
    ::new (static_cast<void*>(memory_)) Callable(std::forward<From>(from));
    operations_ = &kOperationsOf<Callable>;
  }
  void TakeFrom(HostTask& other) {
    if (other.operations_ == nullptr) return;
    other.operations_->move(other.memory_, memory_);
    operations_ = std::exchange(other.operations_, nullptr);
  }
  void Reset() {
    if (operations_ != nullptr) std::exchange(operations_, nullptr)->destroy(memory_);
  }

  alignas(kAlignment) std::byte memory_[kInPlaceBytes];
  const Operations* operations_ = nullptr;  // nullptr: empty
};

// A callable that a stream runs at once or moves into its queue. Valid during the call that it is
// passed to.
struct TaskOffer {
  absl::FunctionRef<absl::Status()> run;
  absl::FunctionRef<HostTask()> take;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_HOST_TASK_H_
