// What an Event refers to, on any device. Internal to kernels/base: callers hold events.
#ifndef MOE_KERNELS_BASE_EVENT_STATE_H_
#define MOE_KERNELS_BASE_EVENT_STATE_H_

#include <absl/status/status.h>

#include "kernels/base/stream.h"

namespace moe {

struct Event::State {
  State() = default;
  virtual ~State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Blocks the host thread until the point has passed. An error is one of the device.
  virtual absl::Status Wait() = 0;

  // cudaEvent_t of a point in a CUDA stream; nullptr on the CPU.
  virtual void* native_handle() const { return nullptr; }
};

// kFailedPrecondition for an event that stands for no point.
inline absl::Status CheckRecorded(const Event& event) {
  if (event.state() != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError("Stream::WaitFor: an event that was never recorded");
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_EVENT_STATE_H_
