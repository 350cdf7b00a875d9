#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include <cuda_runtime_api.h>

#include "kernels/base/buffer.h"
#include "kernels/base/caught.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/cuda_probe.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"

namespace moe {
namespace {

constexpr int64_t kUploadPiece = int64_t{16} << 20;

// CUDA events that no Event refers to any more, for reuse: making one takes a driver lock and
// device memory, and a step records many. A wait that is already in a stream keeps its point, so
// that recording the event anew does not affect it.
class EventPool {
 public:
  // An event of the current device.
  absl::StatusOr<cudaEvent_t> Take() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!idle_.empty()) {
        cudaEvent_t event = idle_.back();
        idle_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    MOE_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
    return event;
  }
  void Put(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mu_);
    idle_.push_back(event);
  }

 private:
  std::mutex mu_;
  std::vector<cudaEvent_t> idle_;  // guarded by mu_; lives as long as the process
};

EventPool& EventsOf(int device) {
  static std::mutex* const mu = new std::mutex;
  static auto* const pools = new std::deque<EventPool>;  // guarded by mu
  std::lock_guard<std::mutex> lock(*mu);
  while (static_cast<int>(pools->size()) <= device) pools->emplace_back();
  return (*pools)[device];
}

class CudaEvent final : public Event::State {
 public:
  using Guards = std::vector<std::shared_ptr<StreamGuard>>;

  CudaEvent(EventPool& pool, cudaEvent_t event, Guards guards)
      : pool_(pool), event_(event), guards_(std::move(guards)) {}
  ~CudaEvent() override { pool_.Put(event_); }
  absl::Status Wait() override {
    MOE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(event_), "event"));
    for (const auto& guard : guards_) MOE_RETURN_IF_ERROR(guard->status());
    return absl::OkStatus();
  }
  void* native_handle() const override { return event_; }
  const Guards& guards() const { return guards_; }  // of the stream that recorded it

 private:
  EventPool& pool_;
  const cudaEvent_t event_;
  const Guards guards_;
};

// The first error of a stream, which its events pass to the streams that wait for them.
class FirstError final : public StreamGuard {
 public:
  absl::Status status() override {
    std::lock_guard<std::mutex> lock(mu_);
    return status_;
  }
  absl::Status Update(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mu_);
    status_.Update(status);
    return status_;
  }

 private:
  std::mutex mu_;
  absl::Status status_;  // guarded by mu_
};

// The host tasks of one stream and its first error: state shared with functions on CUDA's own
// thread.
class HostTasks {
 public:
  // Shared with events, which may outlive the stream.
  const std::shared_ptr<FirstError>& error() const { return error_; }
  absl::Status status() { return error_->status(); }
  absl::Status Update(const absl::Status& status) { return error_->Update(status); }
  void Push(HostTask task) {
    std::lock_guard<std::mutex> lock(mu_);
    tasks_.push_back(std::move(task));
  }
  void DropLast() {
    std::lock_guard<std::mutex> lock(mu_);
    tasks_.pop_back();
  }
  // After an error of the device, synchronising does not wait for a running function.
  void WaitForRunning() {
    std::unique_lock<std::mutex> lock(mu_);
    ended_.wait(lock, [this] { return !running_; });
  }
  // A stream runs its functions in order, so this call runs the oldest task.
  static void RunOldest(void* self_pointer) {
    auto& self = *static_cast<HostTasks*>(self_pointer);
    HostTask task;
    {
      std::lock_guard<std::mutex> lock(self.mu_);
      task = std::move(self.tasks_.front());
      self.tasks_.pop_front();
      if (!self.status().ok()) return;
      self.running_ = true;
    }
    const absl::Status result = Caught([&] { return task(); });
    task = HostTask();  // its captures are released before anyone is notified that it has ended
    const std::lock_guard<std::mutex> lock(self.mu_);
    self.Update(result).IgnoreError();
    self.running_ = false;
    self.ended_.notify_all();  // under mu_: a waiter may destroy this
  }

 private:
  const std::shared_ptr<FirstError> error_ = std::make_shared<FirstError>();
  std::mutex mu_;
  std::deque<HostTask> tasks_;  // guarded by mu_
  bool running_ = false;        // guarded by mu_; whether a task runs on CUDA's thread
  std::condition_variable ended_;
};

// Pinned host memory through which a stream takes arrays that the host may change at once. Two
// blocks are filled in turn: the host waits only when it returns to a block whose copies the stream
// has not passed. Blocks grow to twice the largest array taken and are kept. Used by one host
// thread at a time with the stream's device current.
class CudaStaging {
 public:
  CudaStaging(cudaStream_t stream, std::string name) : stream_(stream), name_(std::move(name)) {}
  // The stream must have passed all copies.
  ~CudaStaging() {
    for (Block& block : blocks_) {
      if (block.passed != nullptr) CudaStatus(cudaEventDestroy(block.passed), name_).IgnoreError();
    }
  }
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  // `bytes` bytes, 64-byte aligned; the caller fills them and copies from them in the stream before
  // the next call.
  absl::StatusOr<std::byte*> Take(int64_t bytes) {
    const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (blocks_[current_].used + size > blocks_[current_].memory.bytes()) {
      MOE_RETURN_IF_ERROR(Leave(blocks_[current_]));
      current_ = 1 - current_;
      MOE_RETURN_IF_ERROR(Enter(blocks_[current_], size));
    }
    Block& block = blocks_[current_];
    std::byte* const data = block.memory.data() + block.used;
    block.used += size;
    return data;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  static constexpr int64_t kSmallestBlock = int64_t{1} << 20;

  struct Block {
    Buffer memory;
    int64_t used = 0;
    cudaEvent_t passed = nullptr;  // recorded when the block was left
    bool left = false;
  };

  absl::Status Leave(Block& block) {
    if (block.used == 0) return absl::OkStatus();
    if (block.passed == nullptr) {
      MOE_RETURN_IF_ERROR(
          CudaStatus(cudaEventCreateWithFlags(&block.passed, cudaEventDisableTiming), name_));
    }
    MOE_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(block.passed, stream_), name_));
    block.left = true;
    return absl::OkStatus();
  }

  // Waits for the block's last copies and makes room for `bytes`.
  absl::Status Enter(Block& block, int64_t bytes) {
    if (block.left) MOE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(block.passed), name_));
    block.left = false;
    block.used = 0;
    if (bytes <= block.memory.bytes()) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(MemoryResource* const pinned, PinnedMemory());
    MOE_ASSIGN_OR_RETURN(block.memory,
                         Buffer::Allocate(std::max(2 * bytes, kSmallestBlock), *pinned, name_));
    return absl::OkStatus();
  }

  const cudaStream_t stream_;
  const std::string name_;
  Block blocks_[2];
  int current_ = 0;
};

class CudaStream final : public Stream {
 public:
  // `own`: the stream was made for this object alone.
  CudaStream(int index, cudaStream_t stream, bool own, ThreadPool& threads)
      : index_(index),
        name_(absl::StrCat("stream of CUDA device ", index)),
        stream_(stream),
        own_(own),
        threads_(threads),
        staging_(stream, name_) {}
  ~CudaStream() override {
    CudaStatus(cudaStreamSynchronize(stream_), name_).IgnoreError();
    host_.WaitForRunning();
    if (own_) CudaStatus(cudaStreamDestroy(stream_), name_).IgnoreError();
  }

  Device device() const override { return {DeviceKind::kCuda, index_}; }
  ThreadPool& threads() const override { return threads_; }

  absl::Status DoEnqueue(const TaskOffer& task) override {
    MOE_RETURN_IF_ERROR(host_.status());
    const absl::Status taken = Caught([&] {
      host_.Push(task.take());
      return absl::OkStatus();
    });
    if (!taken.ok()) return host_.Update(taken);
    const cudaError_t error = cudaLaunchHostFunc(stream_, &HostTasks::RunOldest, &host_);
    if (error != cudaSuccess) host_.DropLast();
    return Sticky(error);
  }

  absl::Status Launch(absl::FunctionRef<absl::Status(void*)> launch) override {
    MOE_RETURN_IF_ERROR(host_.status());
    // Kernels launch on the calling thread's current device, which uses of other streams may have
    // changed.
    MOE_RETURN_IF_ERROR(Sticky(cudaSetDevice(index_)));
    const absl::Status status = launch(stream_);
    return status.ok() ? status : host_.Update(status);
  }

  absl::Status CopyBytes(const void* from, void* to, int64_t bytes) override {
    MOE_RETURN_IF_ERROR(host_.status());
    if (bytes == 0) return absl::OkStatus();
    return Sticky(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_));
  }

  absl::Status Upload(const void* from, void* to, int64_t bytes) override {
    MOE_RETURN_IF_ERROR(host_.status());
    if (bytes == 0) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(Sticky(cudaSetDevice(index_)));
    // Copied in parts: little pinned memory, and the host fills one while the device copies the
    // previous one.
    const auto* const begin = static_cast<const std::byte*>(from);
    for (int64_t done = 0; done < bytes; done += kUploadPiece) {
      const int64_t piece = std::min(kUploadPiece, bytes - done);
      absl::StatusOr<std::byte*> staged = staging_.Take(piece);
      if (!staged.ok()) return host_.Update(staged.status());
      std::memcpy(*staged, begin + done, static_cast<size_t>(piece));
      MOE_RETURN_IF_ERROR(CopyBytes(*staged, static_cast<std::byte*>(to) + done, piece));
    }
    return absl::OkStatus();
  }

  absl::Status Zero(void* to, int64_t bytes) override {
    MOE_RETURN_IF_ERROR(host_.status());
    if (bytes == 0) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(Sticky(cudaSetDevice(index_)));
    return Sticky(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), stream_));
  }

  absl::StatusOr<Event> Record() override {
    MOE_RETURN_IF_ERROR(Sticky(cudaSetDevice(index_)));
    EventPool& pool = EventsOf(index_);
    MOE_ASSIGN_OR_RETURN(cudaEvent_t event, pool.Take());
    CudaEvent::Guards guards = guards_;
    guards.push_back(host_.error());
    auto state = std::make_shared<CudaEvent>(pool, event, std::move(guards));
    const cudaError_t error = cudaEventRecord(event, stream_);
    if (error != cudaSuccess) return Sticky(error);
    return Event(std::move(state));
  }

  // For a point of a CPU stream the host waits. A host function in this stream that waited for it
  // would block the one thread on which CUDA runs the functions of all streams, and that point may
  // depend on one of them.
  absl::Status WaitFor(const Event& event) override {
    MOE_RETURN_IF_ERROR(event.CheckRecorded());
    void* const native = event.state()->native_handle();
    if (native == nullptr) return host_.Update(event.state()->Wait());
    MOE_RETURN_IF_ERROR(Sticky(cudaStreamWaitEvent(stream_, static_cast<cudaEvent_t>(native), 0)));
    // If that stream's work fails, so does what this stream computes from it.
    for (const auto& guard : static_cast<CudaEvent&>(*event.state()).guards()) Guard(guard);
    return host_.status();
  }

  absl::Status Synchronize() override {
    const absl::Status device = CudaStatus(cudaStreamSynchronize(stream_), name_);
    host_.WaitForRunning();
    MOE_RETURN_IF_ERROR(host_.status());
    for (const auto& guard : guards_) MOE_RETURN_IF_ERROR(host_.Update(guard->status()));
    return host_.Update(device);
  }

  void Guard(const std::shared_ptr<StreamGuard>& guard) override {
    if (std::find(guards_.begin(), guards_.end(), guard) == guards_.end()) guards_.push_back(guard);
  }

 private:
  absl::Status Sticky(cudaError_t error) {
    if (error == cudaSuccess) return absl::OkStatus();
    return host_.Update(CudaStatus(error, name_));
  }

  const int index_;
  const std::string name_;
  const cudaStream_t stream_;
  const bool own_;
  ThreadPool& threads_;
  HostTasks host_;
  CudaStaging staging_;
  CudaEvent::Guards guards_;
};

}  // namespace

absl::StatusOr<Device> DeviceOfCudaStream(void* cuda_stream) {
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return absl::InvalidArgumentError(
        "one of CUDA's default streams, expected one of cudaStreamCreateWithFlags");
  }
  int index = 0;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaStreamGetDevice(stream, &index), "cudaStreamGetDevice"));
  return Device{DeviceKind::kCuda, index};
}

absl::StatusOr<std::unique_ptr<Stream>> MakeCudaStream(int index, ThreadPool* threads,
                                                       void* cuda_stream, CudaPriority priority) {
  const std::string name = absl::StrCat("MakeStream of CUDA device ", index);
  int count = 0;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), name));
  if (count == 0) return CudaStatus(cudaErrorNoDevice, name);
  if (index < 0 || index >= count) return CudaStatus(cudaErrorInvalidDevice, name);
  MOE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(index), name));
  MOE_RETURN_IF_ERROR(CudaStatus(cuda::ProbeKernelImage(), name));
  auto stream = static_cast<cudaStream_t>(cuda_stream);
  const bool own = stream == nullptr;
  if (own) {
    int least = 0, greatest = 0;
    MOE_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), name));
    const int number = priority == CudaPriority::kGreatest ? greatest : least;
    MOE_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, number), name));
  } else {
    MOE_ASSIGN_OR_RETURN(const Device of, DeviceOfCudaStream(stream));
    if (of.index != index) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": the stream given is of CUDA device ", of.index));
    }
  }
  return std::make_unique<CudaStream>(index, stream, own,
                                      threads != nullptr ? *threads : ThreadPool::Serial());
}

}  // namespace moe
