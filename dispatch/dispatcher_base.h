// What the dispatch algorithms share: checks, byte counts, all-to-all of rows. Internal.
#ifndef MOE_DISPATCH_DISPATCHER_BASE_H_
#define MOE_DISPATCH_DISPATCHER_BASE_H_

#include <cstdint>
#include <memory>

#include <absl/container/inlined_vector.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "dispatch/dispatcher.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"

namespace moe {

template <typename T>
class DispatcherBase : public Dispatcher<T> {
 public:
  const ExchangeBytes& bytes() const override { return bytes_; }
  void set_clock(ExchangeClock* clock) override { clock_ = clock; }
  bool ReturnsInPlace(const DispatchPlan& /*plan*/) const override { return false; }

 protected:
  DispatcherBase(const DispatcherOptions& options, Communicator& comm,
                 DeviceKind kind = DeviceKind::kCpu)
      : comm_(comm),
        node_size_(options.node_size == 0 ? comm.size() : options.node_size),
        kind_(kind) {}

  // kInvalidArgument unless the plan is of this group and the views have its shapes.
  absl::Status CheckDispatch(absl::string_view function, const DispatchPlan& plan, int chunk,
                             MatrixView<const T> x, MatrixView<T> expert_rows,
                             const Stream& exchange) const;
  absl::Status CheckWeights(const DispatchPlan& plan, absl::Span<const float> weight) const;
  absl::Status CheckReturn(const DispatchPlan& plan, int chunk, MatrixView<const T> expert_rows,
                           MatrixView<T> home_rows, const Stream& exchange) const;

  static MatrixView<T> ExpertRowsOf(const DispatchPlan& plan, int chunk, MatrixView<T> all) {
    return RowRange(all, plan.expert_begin(chunk), plan.expert_begin(chunk + 1));
  }
  static MatrixView<T> HomeRowsOf(const DispatchPlan& plan, int chunk, MatrixView<T> all) {
    return RowRange(all, plan.home_begin(chunk), plan.home_begin(chunk + 1));
  }

  void CountBytes(int peer, int64_t bytes) {
    const bool same_node = peer / node_size_ == comm_.rank() / node_size_;
    (peer == comm_.rank() ? bytes_.self
     : same_node          ? bytes_.same_node
                          : bytes_.cross_node) += bytes;
  }

  ExchangeClock* clock() const { return clock_; }

  Communicator& comm_;
  const int node_size_;

 private:
  absl::Status CheckChunk(absl::string_view function, const DispatchPlan& plan, int chunk) const;
  absl::Status CheckDevice(absl::string_view function, const Stream& exchange) const;

  const DeviceKind kind_;
  ExchangeBytes bytes_;
  ExchangeClock* clock_ = nullptr;
};

// Runs `body`, which enqueues `part` of a movement. clock: or nullptr.
template <typename Body>
absl::Status TimedPart(ExchangeClock* clock, ExchangePart part, const Communicator& comm,
                       Stream& stream, Body body) {
  if (clock == nullptr) return body();
  MOE_RETURN_IF_ERROR(clock->Start(part, comm, stream));
  MOE_RETURN_IF_ERROR(body());
  return clock->Stop(part, comm, stream);
}

// All-to-all of rows of `width` elements inside `comm`: sent(p) rows to peer p, received(p) from
// it. clock: or nullptr.
template <typename U, typename Sent, typename Received>
absl::Status ExchangeRows(Communicator& comm, MatrixView<const U> send, Sent sent,
                          MatrixView<U> recv, Received received, Stream& stream,
                          ExchangeClock* clock) {
  const int64_t width = send.cols();
  absl::InlinedVector<int64_t, 16> send_counts(comm.size()), recv_counts(comm.size());
  for (int p = 0; p < comm.size(); ++p) {
    send_counts[p] = sent(p) * width;
    recv_counts[p] = received(p) * width;
  }
  return TimedPart(clock, ExchangePart::kMeeting, comm, stream, [&] {
    return comm.AllToAllV<U>(
        absl::Span<const U>(send.data(), static_cast<size_t>(send.rows() * width)), send_counts,
        absl::Span<U>(recv.data(), static_cast<size_t>(recv.rows() * width)), recv_counts, stream);
  });
}

// [home rows of the chunk, 1] weight of each, 0 for empty places. Enqueues.
absl::StatusOr<MatrixView<float>> WeightsInHomeOrder(const DispatchPlan& plan, int chunk,
                                                     absl::Span<const float> weight,
                                                     Workspace& workspace, Stream& stream);

// [expert rows of the chunk] the same weights, received in return order. Enqueues.
absl::StatusOr<absl::Span<const float>> WeightsInExpertOrder(const DispatchPlan& plan, int chunk,
                                                             MatrixView<const float> received,
                                                             Workspace& workspace, Stream& stream);

// Options are checked by Dispatcher::Create. in_two_hops: the hierarchical one, over memory of the
// host; collective: splits `comm`.
template <typename T>
absl::StatusOr<std::unique_ptr<Dispatcher<T>>> MakeStagedDispatcher(
    const DispatcherOptions& options, Communicator& comm, DeviceKind kind, bool in_two_hops);
template <typename T>
std::unique_ptr<Dispatcher<T>> MakeDirectDispatcher(const DispatcherOptions& options,
                                                    Communicator& comm, MemoryResource& memory);

}  // namespace moe

#endif  // MOE_DISPATCH_DISPATCHER_BASE_H_
