#include "comm/clock_offset.h"

#include <limits>
#include <vector>

#include "comm/hosts.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int kPings = 16;

absl::Status Transfer(const SendRecvOp& op, Communicator& comm, Stream& stream, const Site& site) {
  MOE_RETURN_IF_ERROR(comm.SendRecv({&op, 1}, stream, site));
  return stream.Synchronize();
}

absl::Status Answer(int peer, absl::FunctionRef<int64_t()> now_ns, Communicator& comm,
                    Stream& stream, const Site& site) {
  int64_t stamp = 0;
  for (int i = 0; i < kPings; ++i) {
    MOE_RETURN_IF_ERROR(
        Transfer({.peer = peer, .recv = &stamp, .bytes = sizeof(stamp)}, comm, stream, site));
    stamp = now_ns();
    MOE_RETURN_IF_ERROR(
        Transfer({.peer = peer, .send = &stamp, .bytes = sizeof(stamp)}, comm, stream, site));
  }
  return absl::OkStatus();
}

absl::StatusOr<ClockOffset> Ask(absl::FunctionRef<int64_t()> now_ns, Communicator& comm,
                                Stream& stream, const Site& site) {
  ClockOffset best = {.error_ns = std::numeric_limits<int64_t>::max()};
  for (int i = 0; i < kPings; ++i) {
    int64_t stamp = 0;
    const int64_t sent = now_ns();
    MOE_RETURN_IF_ERROR(
        Transfer({.peer = 0, .send = &stamp, .bytes = sizeof(stamp)}, comm, stream, site));
    MOE_RETURN_IF_ERROR(
        Transfer({.peer = 0, .recv = &stamp, .bytes = sizeof(stamp)}, comm, stream, site));
    const int64_t received = now_ns();
    const int64_t error = (received - sent + 1) / 2;
    if (error < best.error_ns) {
      best = {.offset_ns = stamp - (sent + (received - sent) / 2), .error_ns = error};
    }
  }
  return best;
}

}  // namespace

absl::StatusOr<ClockOffset> EstimateClockOffset(uint64_t host, absl::FunctionRef<int64_t()> now_ns,
                                                Communicator& comm, Stream& stream,
                                                const Site& site) {
  MOE_ASSIGN_OR_RETURN(const std::vector<uint64_t> hosts, HostsOf(host, comm, stream, site));
  ClockOffset result;
  for (int r = 1; r < comm.size(); ++r) {
    if (hosts[r] == hosts[0]) continue;
    if (comm.rank() == 0) MOE_RETURN_IF_ERROR(Answer(r, now_ns, comm, stream, site));
    if (comm.rank() != r) continue;
    MOE_ASSIGN_OR_RETURN(result, Ask(now_ns, comm, stream, site));
  }
  return result;
}

}  // namespace moe
