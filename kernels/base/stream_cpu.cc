#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/event_state.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"

namespace moe {
namespace {

class HostEvent final : public Event::State {
 public:
  void Signal() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      done_ = true;
    }
    cv_.notify_all();
  }
  absl::Status Wait() override {
    std::unique_lock<std::mutex> lock(mu_);
    cv_.wait(lock, [this] { return done_; });
    return absl::OkStatus();
  }

 private:
  std::mutex mu_;
  std::condition_variable cv_;
  bool done_ = false;  // guarded by mu_
};

class InlineStream final : public Stream {
 public:
  explicit InlineStream(ThreadPool& threads) : threads_(threads) {}

  Device device() const override { return {}; }
  ThreadPool& threads() const override { return threads_; }
  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> task) override {
    if (status_.ok()) status_ = task();
    return status_;
  }
  absl::StatusOr<Event> Record() override {
    auto state = std::make_shared<HostEvent>();
    state->Signal();
    return Event(std::move(state));
  }
  absl::Status WaitFor(const Event& event) override {
    status_.Update(event.state()->Wait());
    return status_;
  }
  absl::Status Synchronize() override { return status_; }

 private:
  ThreadPool& threads_;
  absl::Status status_;
};

class QueueStream final : public Stream {
 public:
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

  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> task) override {
    return Push({std::move(task), nullptr});
  }

  absl::StatusOr<Event> Record() override {
    auto state = std::make_shared<HostEvent>();
    (void)Push({nullptr, state});  // The point passes even on a failed stream, so no waiter hangs.
    return Event(state);
  }

  absl::Status WaitFor(const Event& event) override {
    return Push({[state = event.state()] { return state->Wait(); }, nullptr});
  }

  absl::Status Synchronize() override {
    std::unique_lock<std::mutex> lock(mu_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
    return status_;
  }

 private:
  struct Item {
    absl::AnyInvocable<absl::Status()> task;
    std::shared_ptr<HostEvent> signal;
  };

  absl::Status Push(Item item) {
    absl::Status seen;
    {
      std::lock_guard<std::mutex> lock(mu_);
      seen = status_;
      queue_.push_back(std::move(item));
    }
    cv_.notify_one();
    return seen;
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mu_);
    while (true) {
      cv_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Item item = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      const bool skip = !status_.ok();
      lock.unlock();
      absl::Status result;
      if (item.task && !skip) result = item.task();
      if (item.signal) item.signal->Signal();
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
  std::deque<Item> queue_;  // guarded by mu_
  bool busy_ = false;       // guarded by mu_
  bool stopping_ = false;   // guarded by mu_
  absl::Status status_;     // guarded by mu_; first error
  std::thread worker_;      // last: starts after the state above exists
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

absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device device, ThreadPool* threads) {
  if (device.kind == DeviceKind::kCuda) return MakeCudaStream(device.index, threads);
  return std::make_unique<QueueStream>(threads != nullptr ? *threads : ThreadPool::Serial());
}

}  // namespace moe
