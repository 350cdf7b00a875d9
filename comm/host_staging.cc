#include "comm/host_staging.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status Reserve(int64_t bytes, Buffer& buffer) {
  if (bytes <= buffer.bytes()) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(bytes, CpuMemory(), "host staging"));
  return absl::OkStatus();
}

}  // namespace

absl::Status HostStaging::Run(const Transfer& transfer, Stream& device, Collective collective) {
  const bool in_place = transfer.send == transfer.recv;
  Buffer& from = in_place ? recv_ : send_;
  MOE_RETURN_IF_ERROR(Reserve(transfer.recv_bytes, recv_));
  MOE_RETURN_IF_ERROR(Reserve(transfer.send_bytes, from));
  MOE_RETURN_IF_ERROR(device.CopyBytes(transfer.send, from.data(), transfer.send_bytes));
  MOE_RETURN_IF_ERROR(device.Synchronize());
  const std::unique_ptr<Stream> host = MakeInlineStream(&device.threads());
  MOE_RETURN_IF_ERROR(collective(from.data(), recv_.data(), *host));
  return device.Upload(recv_.data(), transfer.recv, transfer.recv_bytes);
}

}  // namespace moe
