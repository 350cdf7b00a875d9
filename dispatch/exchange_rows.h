// What the dispatch algorithms share: all-to-all of rows, told to a clock. Internal.
#ifndef MOE_DISPATCH_EXCHANGE_ROWS_H_
#define MOE_DISPATCH_EXCHANGE_ROWS_H_

#include <cstdint>
#include <memory>

#include <absl/container/inlined_vector.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "dispatch/dispatcher.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"

namespace moe {

template <typename T>
int64_t RowBytes(int64_t hidden) {
  return hidden * static_cast<int64_t>(sizeof(T));
}

// Runs `body`, which enqueues `part` of a movement. clock: or nullptr.
template <typename Body>
absl::Status TimedPart(ExchangeClock* clock, ExchangePart part, const Communicator& comm,
                       Stream& stream, Body body) {
  if (clock == nullptr) return body();
  MOE_RETURN_IF_ERROR(clock->Start(part, comm, stream));
  MOE_RETURN_IF_ERROR(body());
  return clock->Stop(part, comm, stream);
}

// What an exchange of rows runs on.
struct RowExchange {
  Communicator& comm;
  Stream& stream;
  ExchangeClock* clock = nullptr;
  const Site& site;
};

// All-to-all of rows: sent(p) rows to peer p, received(p) from it.
template <typename U, typename Sent, typename Received>
absl::Status ExchangeRows(const RowExchange& exchange, MatrixView<const U> send, Sent sent,
                          MatrixView<U> recv, Received received) {
  Communicator& comm = exchange.comm;
  const int64_t width = send.cols();
  absl::InlinedVector<int64_t, 16> send_counts(comm.size()), recv_counts(comm.size());
  for (int p = 0; p < comm.size(); ++p) {
    send_counts[p] = sent(p) * width;
    recv_counts[p] = received(p) * width;
  }
  return TimedPart(exchange.clock, ExchangePart::kMeeting, comm, exchange.stream, [&] {
    return comm.AllToAllV<U>(
        absl::Span<const U>(send.data(), static_cast<size_t>(send.rows() * width)), send_counts,
        absl::Span<U>(recv.data(), static_cast<size_t>(recv.rows() * width)), recv_counts,
        exchange.stream, exchange.site);
  });
}

// Options are checked by Dispatcher::Create. in_two_hops: the hierarchical one, over memory of the
// host; collective: splits `comm`.
template <typename T>
absl::StatusOr<std::unique_ptr<Dispatcher<T>>> MakeStagedDispatcher(Nodes nodes, Communicator& comm,
                                                                    DeviceKind kind,
                                                                    bool in_two_hops);
template <typename T>
std::unique_ptr<Dispatcher<T>> MakeDirectDispatcher(Nodes nodes, Communicator& comm,
                                                    MemoryResource& memory);

}  // namespace moe

#endif  // MOE_DISPATCH_EXCHANGE_ROWS_H_
