// Ordered execution on a device: the interface that lets CPU and CUDA share every algorithm above
// it.
#ifndef MOE_KERNELS_BASE_STREAM_H_
#define MOE_KERNELS_BASE_STREAM_H_

#include <cstdint>
#include <memory>
#include <utility>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/host_task.h"
#include "kernels/base/parallel.h"

namespace moe {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;  // CUDA ordinal; 0 for the CPU.
};

// A point in a stream. Copyable; copies share the point.
class Event {
 public:
  // What an event refers to, on any device.
  struct State {
    State() = default;
    virtual ~State() = default;
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    // Blocks the host thread until the point has passed. An error is the device's.
    virtual absl::Status Wait() = 0;
    // cudaEvent_t of a point in a CUDA stream; nullptr on the CPU.
    virtual void* native_handle() const { return nullptr; }
  };

  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State>& state() const { return state_; }
  // kFailedPrecondition for an event that was never recorded.
  absl::Status CheckRecorded() const {
    if (state_ != nullptr) return absl::OkStatus();
    return absl::FailedPreconditionError("Stream::WaitFor: an event that was never recorded");
  }

 private:
  std::shared_ptr<State> state_;
};

// Can end work that is already in a stream: a communicator whose peer is lost.
class StreamGuard {
 public:
  virtual ~StreamGuard() = default;
  // Why such work ended early; OK until then. May be called by any thread.
  virtual absl::Status status() = 0;
};

// A FIFO queue of work on one device.
//
// Errors are sticky, as on CUDA: the first task that fails or throws stops the queue, later ones
// are dropped, and every later call returns its status. One host thread at a time uses a stream.
// Kernels that were enqueued before the host could see an error still run.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  virtual Device device() const = 0;

  // CPU: the threads that operations enqueued here may use.
  virtual ThreadPool& threads() const { return ThreadPool::Serial(); }

  // Runs `task`, which returns absl::Status, on the host after all work already in the stream. It
  // must not call CUDA. An inline stream runs it at once; others store it (HostTask).
  template <typename Task>
  absl::Status Enqueue(Task&& task) {
    const auto run = [&]() -> absl::Status {
      return task();
    };
    const auto take = [&] {
      return HostTask(std::forward<Task>(task));
    };
    return DoEnqueue({.run = run, .take = take});
  }

  // Marks the work enqueued so far. If that work fails, the event carries its error to every stream
  // that waits for it, because results computed from failed work are invalid. (CUDA: errors of host
  // tasks and of guards; an error of the device affects all its streams anyway.)
  virtual absl::StatusOr<Event> Record() = 0;

  // Holds back later work in this stream until `event` has passed. Blocks the host only if this
  // stream is inline, or is a CUDA stream and the event a CPU stream's. kFailedPrecondition for an
  // event that was never recorded.
  virtual absl::Status WaitFor(const Event& event) = 0;

  // Blocks the host until the stream is empty; returns the first error, if any.
  virtual absl::Status Synchronize() = 0;

  // CUDA: calls launch(cudaStream_t) before it returns, with this stream's device current; `launch`
  // enqueues kernels or library calls. Its error becomes the stream's. CPU: kUnimplemented.
  virtual absl::Status Launch(absl::FunctionRef<absl::Status(void*)> launch);

  // Enqueues a copy of `bytes` bytes. Each side is memory of the host or of this stream's device
  // and stays valid until the stream passes this point; the two do not overlap.
  virtual absl::Status CopyBytes(const void* from, void* to, int64_t bytes);

  // Enqueues a copy of `bytes` bytes of host memory, read before the call returns, to memory of
  // this stream's device.
  virtual absl::Status Upload(const void* from, void* to, int64_t bytes);

  // Enqueues zeros for `bytes` bytes of this stream's device.
  virtual absl::Status Zero(void* to, int64_t bytes);

  // CUDA: from now on an error of `guard` is an error of this stream, reported by Synchronize. Kept
  // as long as the stream; adding the same guard again costs one comparison. CPU: no effect, tasks
  // return their own errors.
  virtual void Guard(const std::shared_ptr<StreamGuard>& guard);

 protected:
  Stream() = default;

 private:
  virtual absl::Status DoEnqueue(const TaskOffer& task) = 0;
};

inline bool IsCuda(const Stream& stream) {
  return stream.device().kind == DeviceKind::kCuda;
}

// CPU: a worker thread with a FIFO (about 85 us a hand-off on two cores: for communication that
// overlaps). CUDA: a non-blocking stream, or kUnimplemented, with the remedy, if the build has no
// CUDA or the machine no such device. `threads`, if given, must outlive the stream.
//
// With `cuda_stream`, the caller's cudaStream_t on that CUDA device, no stream is made: work is
// enqueued there, in order with the caller's own. The caller must not destroy it before this
// object, whose destructor waits for all work in it. kInvalidArgument for a stream of another
// device, or one of CUDA's default streams, which belong to whatever device is current.
absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device device, ThreadPool* threads = nullptr,
                                                   void* cuda_stream = nullptr);

// A stream for what travels while other streams of `device` compute: as MakeStream(device), but on
// CUDA its kernels come first where blocks wait for room. Blocks that have room keep it.
absl::StatusOr<std::unique_ptr<Stream>> MakeTransferStream(Device device);

// CPU only: runs each task before Enqueue returns. Used for computation on the CPU.
std::unique_ptr<Stream> MakeInlineStream(ThreadPool* threads = nullptr);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STREAM_H_
