// The time that the work between two points of a stream takes.
#ifndef MOE_KERNELS_BASE_STREAM_TIMER_H_
#define MOE_KERNELS_BASE_STREAM_TIMER_H_

#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/stream.h"

namespace moe {

// Times one interval at a time: Start, the work, Stop, ElapsedNs; then again. Used by the stream's
// thread.
//
// CUDA: two events in the stream, which do not stall it. The time, by the device's clock, is from
// when the stream reaches the first point until all work before the second one has ended. If the
// device is idle at the first point, it includes the wait for the host to enqueue what follows.
// CPU: the host's clock, once the stream is empty.
class StreamTimer {
 public:
  virtual ~StreamTimer() = default;
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  virtual absl::Status Start() = 0;
  virtual absl::Status Stop() = 0;
  // Waits for the stream; returns its first error, if any.
  virtual absl::StatusOr<double> ElapsedNs() = 0;

 protected:
  StreamTimer() = default;
};

// `stream` outlives the timer.
absl::StatusOr<std::unique_ptr<StreamTimer>> MakeStreamTimer(Stream& stream);

// Internal: callers use MakeStreamTimer.
absl::StatusOr<std::unique_ptr<StreamTimer>> MakeCudaStreamTimer(Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STREAM_TIMER_H_
