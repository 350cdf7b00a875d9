#include "comm/host_staging.h"

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status Reserve(size_t bytes, Buffer& buffer) {
  const auto wanted = static_cast<int64_t>(bytes);
  if (wanted <= buffer.bytes()) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(wanted, CpuMemory(), "host staging"));
  return absl::OkStatus();
}

}  // namespace

absl::Status HostStaging::Run(absl::Span<const std::byte> send, absl::Span<std::byte> recv,
                              Stream& device, Collective collective) {
  const bool in_place = send.data() == recv.data();
  Buffer& from = in_place ? recv_ : send_;
  MOE_RETURN_IF_ERROR(Reserve(recv.size(), recv_));
  MOE_RETURN_IF_ERROR(Reserve(send.size(), from));
  const auto sent = absl::MakeSpan(from.data(), send.size());
  const auto received = absl::MakeSpan(recv_.data(), recv.size());
  MOE_RETURN_IF_ERROR(
      device.CopyBytes(send.data(), sent.data(), static_cast<int64_t>(sent.size())));
  MOE_RETURN_IF_ERROR(device.Synchronize());
  MOE_RETURN_IF_ERROR(collective(sent, received, *MakeInlineStream(&device.threads())));
  return device.Upload(received.data(), recv.data(), static_cast<int64_t>(recv.size()));
}

}  // namespace moe
