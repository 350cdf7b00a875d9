// How long the work between two points of a stream takes.
#ifndef MOE_KERNELS_BASE_STREAM_TIMER_H_
#define MOE_KERNELS_BASE_STREAM_TIMER_H_

#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/stream.h"

namespace moe {

// One stretch at a time: Start, the work, Stop, ElapsedNs; then again. By the thread of the stream.
//
// CUDA: two events in the stream, which hold nothing up: the device's clock, from where it has come
// to the first point until all work in front of the second one has ended. A device that is idle at
// the first point waits for the host to enqueue what follows, and that wait is in the time.
// CPU: the host's clock, once the stream is empty.
class StreamTimer {
 public:
  virtual ~StreamTimer() = default;
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  virtual absl::Status Start() = 0;
  virtual absl::Status Stop() = 0;
  // Waits for the stream; its first error, if any.
  virtual absl::StatusOr<double> ElapsedNs() = 0;

 protected:
  StreamTimer() = default;
};

// `stream` outlives the timer.
absl::StatusOr<std::unique_ptr<StreamTimer>> MakeStreamTimer(Stream& stream);

// MakeStreamTimer of a CUDA stream: callers call that.
absl::StatusOr<std::unique_ptr<StreamTimer>> MakeCudaStreamTimer(Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STREAM_TIMER_H_
