// Times, on the host's clock, at which a CUDA stream reached points of its work.
#ifndef MOE_KERNELS_BASE_STREAM_STAMPS_H_
#define MOE_KERNELS_BASE_STREAM_STAMPS_H_

#include <cstdint>
#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/stream.h"

namespace moe {

// Used by the stream's thread. Points are events, which do not stall the stream, as a host function
// would until the host has run it.
class StreamStamps {
 public:
  virtual ~StreamStamps() = default;
  StreamStamps(const StreamStamps&) = delete;
  StreamStamps& operator=(const StreamStamps&) = delete;

  // Sets *ns, which must outlive Collect, to the MonotonicNs() at which the work enqueued so far
  // has ended. Valid once Collect has returned.
  virtual absl::Status Mark(int64_t* ns) = 0;

  // Waits for the stream, then writes the times of all marks since the last call. Each call aligns
  // the device's clock with the host's, to some ten microseconds; between marks its resolution is
  // half a microsecond.
  virtual absl::Status Collect() = 0;

 protected:
  StreamStamps() = default;
};

// `stream`, of a CUDA device, must outlive the stamps.
absl::StatusOr<std::unique_ptr<StreamStamps>> MakeStreamStamps(Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STREAM_STAMPS_H_
