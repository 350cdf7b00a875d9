// Collectives over memory of a CUDA device through a backend that moves host memory only.
#ifndef MOE_COMM_HOST_STAGING_H_
#define MOE_COMM_HOST_STAGING_H_

#include <cstddef>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"

namespace moe {

// Buffers of the host that grow and are kept. One thread at a time.
class HostStaging {
 public:
  // A collective over host memory. In place: send and recv are the same bytes.
  using Collective = absl::FunctionRef<absl::Status(absl::Span<const std::byte> send,
                                                    absl::Span<std::byte> recv, Stream& stream)>;

  // Copies `send` to the host, runs `collective` there on an inline stream, and enqueues the copy
  // of what it received back to the device. Blocks the host until the collective has ended. What is
  // not received keeps no old value: recv is written whole.
  absl::Status Run(absl::Span<const std::byte> send, absl::Span<std::byte> recv, Stream& device,
                   Collective collective);

 private:
  Buffer send_, recv_;
};

}  // namespace moe

#endif  // MOE_COMM_HOST_STAGING_H_
