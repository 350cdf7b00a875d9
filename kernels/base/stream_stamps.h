// When a CUDA stream came to points of its work, on the host's clock.
#ifndef MOE_KERNELS_BASE_STREAM_STAMPS_H_
#define MOE_KERNELS_BASE_STREAM_STAMPS_H_

#include <cstdint>
#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/stream.h"

namespace moe {

// By the thread of the stream. Points are events, which hold nothing up; a host function in the
// stream would, until the host has run it.
class StreamStamps {
 public:
  virtual ~StreamStamps() = default;
  StreamStamps(const StreamStamps&) = delete;
  StreamStamps& operator=(const StreamStamps&) = delete;

  // *ns, which must stay where it is, will be the MonotonicNs() at which the work enqueued so far
  // has ended: once Collect has returned.
  virtual absl::Status Mark(int64_t* ns) = 0;

  // Waits for the stream, then writes the times of all marks since the last call. The device's
  // clock is set by the host's at each call, to some ten microseconds; between marks it counts half
  // microseconds.
  virtual absl::Status Collect() = 0;

 protected:
  StreamStamps() = default;
};

// `stream`, of a CUDA device, must live while the stamps are used.
absl::StatusOr<std::unique_ptr<StreamStamps>> MakeStreamStamps(Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STREAM_STAMPS_H_
