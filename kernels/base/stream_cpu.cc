#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/caught.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"

namespace moe {
namespace {

class HostEvent final : public Event::State {
 public:
  void Reset() {
    std::lock_guard<std::mutex> lock(mu_);
    done_ = false;
    status_ = absl::OkStatus();
  }
  // status: the stream's at this point. A stream that waits for failed work fails, too.
  void Signal(const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      done_ = true;
      status_ = status;
    }
    cv_.notify_all();
  }
  absl::Status Wait() override {
    std::unique_lock<std::mutex> lock(mu_);
    cv_.wait(lock, [this] { return done_; });
    return status_;
  }

 private:
  std::mutex mu_;
  std::condition_variable cv_;
  bool done_ = false;    // guarded by mu_
  absl::Status status_;  // guarded by mu_
};

class InlineStream final : public Stream {
 public:
  explicit InlineStream(ThreadPool& threads) : threads_(threads) {}

  Device device() const override { return {}; }
  ThreadPool& threads() const override { return threads_; }
  // All work in the stream has run, so that one event serves for every point. Its signal orders
  // that work before any waiter.
  absl::StatusOr<Event> Record() override {
    passed_->Signal(status_);
    return Event(passed_);
  }
  absl::Status WaitFor(const Event& event) override {
    MOE_RETURN_IF_ERROR(event.CheckRecorded());
    status_.Update(event.state()->Wait());
    return status_;
  }
  absl::Status Synchronize() override { return status_; }
  absl::Status Upload(const void* from, void* to, int64_t bytes) override {
    return CopyBytes(from, to, bytes);  // read before the call returns
  }

 private:
  absl::Status DoEnqueue(const TaskOffer& task) override {
    if (status_.ok()) status_ = Caught(task.run);
    return status_;
  }

  ThreadPool& threads_;
  const std::shared_ptr<HostEvent> passed_ = std::make_shared<HostEvent>();
  absl::Status status_;
};

// Reuses events whose points are no longer held.
class HostEventPool {
 public:
  // Reserves more than are ever held at a time, since how many waiters lag behind varies by chance.
  HostEventPool() {
    for (int i = 0; i < 64; ++i) events_.push_back(std::make_shared<HostEvent>());
  }
  std::shared_ptr<HostEvent> Take() {
    for (const auto& event : events_) {
      if (event.use_count() > 1) continue;
      event->Reset();
      return event;
    }
    return events_.emplace_back(std::make_shared<HostEvent>());
  }

 private:
  std::vector<std::shared_ptr<HostEvent>> events_;
};

// A FIFO that keeps its memory; std::deque frees blocks as it advances.
template <typename T>
class Fifo {
 public:
  bool empty() const { return count_ == 0; }
  void Push(T item) {
    if (count_ == items_.size()) Grow();
    items_[(first_ + count_++) % items_.size()] = std::move(item);
  }
  T Pop() {
    T item = std::move(items_[first_]);
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  static constexpr size_t kSmallest = 256;

  void Grow() {
    std::vector<T> larger(std::max(kSmallest, 2 * count_));
    for (size_t i = 0; i < count_; ++i) {
      larger[i] = std::move(items_[(first_ + i) % items_.size()]);
    }
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> items_;
  size_t first_ = 0, count_ = 0;
};

class QueueStream final : public Stream {
 public:
  // Throws if the system cannot start a thread.
  explicit QueueStream(ThreadPool& threads) : threads_(threads), worker_([this] { Loop(); }) {}
  ~QueueStream() override {
    {
      std::lock_guard<std::mutex> lock(mu_);
      stopping_ = true;
    }
    cv_.notify_all();
    worker_.join();
  }

  Device device() const override { return {}; }
  ThreadPool& threads() const override { return threads_; }

  absl::StatusOr<Event> Record() override {
    return Caught([&]() -> absl::StatusOr<Event> {
      const auto state = events_.Take();
      // on a failed stream it passes with the error, so that no waiter hangs
      (void)Push({{}, state});
      return Event(state);
    });
  }

  absl::Status WaitFor(const Event& event) override {
    MOE_RETURN_IF_ERROR(event.CheckRecorded());
    return PushTask([&] { return HostTask([state = event.state()] { return state->Wait(); }); });
  }

  absl::Status Synchronize() override {
    std::unique_lock<std::mutex> lock(mu_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
    return status_;
  }

 private:
  struct Item {
    HostTask task;
    std::shared_ptr<HostEvent> signal;
  };

  absl::Status DoEnqueue(const TaskOffer& task) override { return PushTask(task.take); }

  // Without memory for it the task is lost, and the stream has failed.
  absl::Status PushTask(absl::FunctionRef<HostTask()> take) {
    absl::Status status = Caught([&] { return Push({take(), nullptr}); });
    if (!status.ok()) {
      std::lock_guard<std::mutex> lock(mu_);
      status_.Update(status);
    }
    return status;
  }

  absl::Status Push(Item item) {
    absl::Status seen;
    {
      std::lock_guard<std::mutex> lock(mu_);
      seen = status_;
      queue_.Push(std::move(item));
    }
    cv_.notify_one();
    return seen;
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mu_);
    while (true) {
      cv_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Item item = queue_.Pop();
      busy_ = true;
      absl::Status result = status_;
      lock.unlock();
      if (item.task && result.ok()) result = Caught([&] { return item.task(); });
      if (item.signal) item.signal->Signal(result);
      item = {};
      lock.lock();
      busy_ = false;
      status_.Update(result);
      if (queue_.empty()) idle_.notify_all();
    }
  }

  ThreadPool& threads_;
  std::mutex mu_;
  std::condition_variable cv_;
  std::condition_variable idle_;
  HostEventPool events_;   // used by the host thread alone
  Fifo<Item> queue_;       // guarded by mu_
  bool busy_ = false;      // guarded by mu_
  bool stopping_ = false;  // guarded by mu_
  absl::Status status_;    // guarded by mu_; first error
  std::thread worker_;     // last: starts after the state above exists
};

}  // namespace

absl::Status Stream::Launch(absl::FunctionRef<absl::Status(void*)>) {
  return absl::UnimplementedError("Stream::Launch: not a stream of a CUDA device");
}

absl::Status Stream::CopyBytes(const void* from, void* to, int64_t bytes) {
  return Enqueue([=] {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return absl::OkStatus();
  });
}

absl::Status Stream::Upload(const void* from, void* to, int64_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(from);
  return Enqueue([kept = std::vector<std::byte>(begin, begin + bytes), to] {
    if (!kept.empty()) std::memcpy(to, kept.data(), kept.size());
    return absl::OkStatus();
  });
}

absl::Status Stream::Zero(void* to, int64_t bytes) {
  return Enqueue([=] {
    if (bytes > 0) std::memset(to, 0, static_cast<size_t>(bytes));
    return absl::OkStatus();
  });
}

void Stream::Guard(const std::shared_ptr<StreamGuard>&) {}

std::unique_ptr<Stream> MakeInlineStream(ThreadPool* threads) {
  return std::make_unique<InlineStream>(threads != nullptr ? *threads : ThreadPool::Serial());
}

absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device device, ThreadPool* threads,
                                                   void* cuda_stream) {
  if (device.kind == DeviceKind::kCuda) {
    return MakeCudaStream(device.index, threads, cuda_stream, CudaPriority::kLeast);
  }
  if (cuda_stream != nullptr) {
    return absl::InvalidArgumentError("MakeStream: a CUDA stream on the CPU, expected none");
  }
  return Caught([&]() -> absl::StatusOr<std::unique_ptr<Stream>> {
    return std::make_unique<QueueStream>(threads != nullptr ? *threads : ThreadPool::Serial());
  });
}

absl::StatusOr<std::unique_ptr<Stream>> MakeTransferStream(Device device) {
  if (device.kind == DeviceKind::kCpu) return MakeStream(device);
  return MakeCudaStream(device.index, nullptr, nullptr, CudaPriority::kGreatest);
}

}  // namespace moe
