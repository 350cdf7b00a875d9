// Collectives over memory of a CUDA device through a backend that knows the host's alone.
#ifndef MOE_COMM_HOST_STAGING_H_
#define MOE_COMM_HOST_STAGING_H_

#include <cstdint>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"

namespace moe {

// Buffers of the host that grow and are kept. One thread at a time.
class HostStaging {
 public:
  // What a collective reads and writes on the device. In place: send == recv, of equal length.
  struct Transfer {
    const void* send = nullptr;
    int64_t send_bytes = 0;
    void* recv = nullptr;
    int64_t recv_bytes = 0;
  };
  using Collective = absl::FunctionRef<absl::Status(const void* send, void* recv, Stream& stream)>;

  // Copies `send` to the host, runs `collective` there on an inline stream, and enqueues the copy
  // of what it received back to the device. Blocks the host until the collective has ended. What is
  // not received keeps no old value: recv is written whole.
  absl::Status Run(const Transfer& transfer, Stream& device, Collective collective);

 private:
  Buffer send_, recv_;
};

}  // namespace moe

#endif  // MOE_COMM_HOST_STAGING_H_
