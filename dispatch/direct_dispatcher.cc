// Direct dispatch: rows are read straight from the memory of the ranks that hold them.
#include <algorithm>
#include <memory>
#include <utility>

#include <absl/container/inlined_vector.h>

#include "dispatch/exchange_rows.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

// Peer memory that grows. Every rank asks for the same size, so all grow together.
class GrowingPeerBuffer {
 public:
  // Collective when it grows: `last`, if any, is the stream with work that may still read or write
  // the memory, or use `comm`; it is waited for.
  absl::Status Reserve(int64_t bytes, Communicator& comm, MemoryResource& memory, Stream* last,
                       const Site& site) {
    if (buffer_ != nullptr && bytes <= bytes_) return absl::OkStatus();
    if (last != nullptr) MOE_RETURN_IF_ERROR(last->Synchronize());
    // A quarter more, so that slowly growing batches do not come here each time.
    const int64_t wanted = std::max<int64_t>(bytes + bytes / 4, 64);
    MOE_ASSIGN_OR_RETURN(auto grown, comm.AllocatePeerBuffer(wanted, memory, site));
    buffer_ = std::move(grown);  // all ranks were in the call above: nobody reads the old memory
    bytes_ = wanted;
    return absl::OkStatus();
  }
  bool holds(const void* data) const { return buffer_ != nullptr && data == local(); }
  std::byte* local() const { return buffer_->local().data(); }
  const std::byte* peer(int r) const { return buffer_->peer(r); }

 private:
  std::shared_ptr<PeerBuffer> buffer_;
  int64_t bytes_ = 0;
};

// A fence after memory is written, and one between the last read of it and the next write. Tokens
// are written by this class, which leaves that fence out where another one came in between (the
// fences of Return, in a layer): Dispatch costs 1 fence, or 2. Outputs are written by the caller
// whenever it likes after Return, so Return ends with a fence: d + 1.
template <typename T>
class DirectDispatcher final : public Dispatcher<T> {
 public:
  DirectDispatcher(Nodes nodes, Communicator& comm, MemoryResource& memory)
      : Dispatcher<T>(std::move(nodes), comm, memory.device().kind), memory_(memory) {}

  DispatchAlgorithm algorithm() const override { return DispatchAlgorithm::kDirect; }

  absl::StatusOr<MatrixView<T>> ReturnBuffer(const DispatchPlan& plan, int64_t hidden, Workspace&,
                                             const Site& site) override {
    MOE_RETURN_IF_ERROR(returned_.Reserve(plan.max_expert_rows() * RowBytes<T>(hidden), this->comm_,
                                          memory_, last_stream_, site));
    return MatrixView<T>(reinterpret_cast<T*>(returned_.local()), plan.expert_rows(), hidden);
  }

 private:
  absl::Status Out(const DispatchCall& call, MatrixView<const T> x,
                   std::optional<absl::Span<const float>> weight,
                   MatrixView<T> expert_rows) override {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    if (chunk == 0) {
      MOE_RETURN_IF_ERROR(PrepareTokens(call, x.cols()));
      MOE_RETURN_IF_ERROR(PublishTokens(x, call.exchange));
      if (weight.has_value()) {
        MOE_RETURN_IF_ERROR(PublishWeights(plan, *weight, x.cols(), call.exchange));
      }
      MOE_RETURN_IF_ERROR(Fence(call));
    }
    absl::Span<const float> scale;
    if (weight.has_value()) {
      MOE_ASSIGN_OR_RETURN(scale, ReadWeights(call, x.cols()));
    }
    return ReadTokens(call, scale, expert_rows);
  }

  absl::Status Back(const DispatchCall& call, MatrixView<const T> expert_rows,
                    MatrixView<T> home_rows) override {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const int64_t hidden = home_rows.cols();
    if (!returned_.holds(expert_rows.data()) || expert_rows.stride() != hidden) {
      return absl::InvalidArgumentError(
          "Return: expert_rows is not the view that ReturnBuffer gave out last");
    }
    last_stream_ = &call.exchange;
    MOE_RETURN_IF_ERROR(Fence(call));
    const auto peers = Views<T>(returned_, 0, plan.max_expert_rows(), hidden);
    MOE_RETURN_IF_ERROR(ReadRows<T>(peers, plan.home_peer(chunk), plan.home_source(chunk), {},
                                    this->HomeRowsOf(call, home_rows), call.exchange));
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(p, plan.ExpertRows(chunk, p, plan.rank()) * RowBytes<T>(hidden));
    }
    return chunk + 1 == plan.chunks() ? Fence(call) : absl::OkStatus();
  }

  // Byte offset of the weights, behind the tokens; the same on every rank.
  static int64_t WeightsBegin(const DispatchPlan& plan, int64_t hidden) {
    return (plan.max_tokens() * RowBytes<T>(hidden) + 63) / 64 * 64;
  }

  absl::Status Fence(const DispatchCall& call) {
    tokens_being_read_ = false;
    return TimedPart(this->clock(), ExchangePart::kMeeting, this->comm_, call.exchange,
                     [&] { return this->comm_.Fence(call.exchange, call.site); });
  }

  // Makes published_ large enough and free to be written.
  absl::Status PrepareTokens(const DispatchCall& call, int64_t hidden) {
    const DispatchPlan& plan = call.plan;
    const int64_t weight_bytes = plan.max_return_rows() * static_cast<int64_t>(sizeof(float));
    MOE_RETURN_IF_ERROR(published_.Reserve(WeightsBegin(plan, hidden) + weight_bytes, this->comm_,
                                           memory_, &call.exchange, call.site));
    last_stream_ = &call.exchange;
    return tokens_being_read_ ? Fence(call) : absl::OkStatus();
  }

  absl::Status PublishTokens(MatrixView<const T> x, Stream& exchange) {
    const MatrixView<T> to(reinterpret_cast<T*>(published_.local()), x.rows(), x.cols());
    if (IsCuda(exchange)) {
      if (x.stride() == x.cols()) {
        return exchange.CopyBytes(x.data(), to.data(), x.rows() * RowBytes<T>(x.cols()));
      }
      for (int64_t t = 0; t < x.rows(); ++t) {
        MOE_RETURN_IF_ERROR(exchange.CopyBytes(x.row(t), to.row(t), RowBytes<T>(x.cols())));
      }
      return absl::OkStatus();
    }
    return exchange.Enqueue([=, &threads = exchange.threads()] {
      const int64_t grain = std::max<int64_t>(1, (int64_t{64} << 10) / (RowBytes<T>(x.cols()) + 1));
      threads.For(x.rows(), grain, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) std::copy_n(x.row(t), x.cols(), to.row(t));
      });
      return absl::OkStatus();
    });
  }

  // Writes the weights in the order of home rows, all chunks; 0 for empty places.
  absl::Status PublishWeights(const DispatchPlan& plan, absl::Span<const float> weight,
                              int64_t hidden, Stream& exchange) {
    auto* const to = reinterpret_cast<float*>(published_.local() + WeightsBegin(plan, hidden));
    return GatherRows<float>(Column(weight.data(), plan.slots()), plan.home_slot(),
                             MatrixView<float>(to, plan.return_rows(), 1), exchange);
  }

  // [expert rows of the chunk] the weight of each.
  absl::StatusOr<absl::Span<const float>> ReadWeights(const DispatchCall& call, int64_t hidden) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const absl::Span<const int32_t> row = plan.expert_home_row(chunk);
    MOE_ASSIGN_OR_RETURN(const auto scale,
                         call.workspace.Array<float>(static_cast<int64_t>(row.size())));
    const auto peers =
        Views<float>(published_, WeightsBegin(plan, hidden), plan.max_return_rows(), 1);
    MOE_RETURN_IF_ERROR(ReadRows<float>(
        peers, plan.expert_peer(chunk), row, {},
        MatrixView<float>(scale.data(), static_cast<int64_t>(row.size()), 1), call.exchange));
    return scale;
  }

  absl::Status ReadTokens(const DispatchCall& call, absl::Span<const float> scale,
                          MatrixView<T> expert_rows) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const int64_t hidden = expert_rows.cols();
    const auto peers = Views<T>(published_, 0, plan.max_tokens(), hidden);
    tokens_being_read_ = true;
    MOE_RETURN_IF_ERROR(ReadRows<T>(peers, plan.expert_peer(chunk), plan.expert_token(chunk), scale,
                                    this->ExpertRowsOf(call, expert_rows), call.exchange));
    const int64_t row_bytes =
        RowBytes<T>(hidden) + (scale.empty() ? 0 : static_cast<int64_t>(sizeof(float)));
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(p, plan.ExpertRows(chunk, plan.rank(), p) * row_bytes);
    }
    return absl::OkStatus();
  }

  // GatherRowsOfMany from peer memory.
  template <typename U>
  absl::Status ReadRows(absl::Span<const MatrixView<const U>> peers, absl::Span<const int32_t> peer,
                        absl::Span<const int32_t> row, absl::Span<const float> scale,
                        MatrixView<U> out, Stream& exchange) {
    return TimedPart(this->clock(), ExchangePart::kCopy, this->comm_, exchange,
                     [&] { return GatherRowsOfMany<U>(peers, peer, row, scale, out, exchange); });
  }

  // Every rank's [rows, cols] at `offset` in `buffer`.
  template <typename U>
  absl::InlinedVector<MatrixView<const U>, 16> Views(const GrowingPeerBuffer& buffer,
                                                     int64_t offset, int64_t rows,
                                                     int64_t cols) const {
    absl::InlinedVector<MatrixView<const U>, 16> views;
    for (int r = 0; r < this->comm_.size(); ++r) {
      views.emplace_back(reinterpret_cast<const U*>(buffer.peer(r) + offset), rows, cols);
    }
    return views;
  }
  static MatrixView<const float> Column(const float* data, int64_t rows) { return {data, rows, 1}; }

  MemoryResource& memory_;       // holds published_ and returned_
  GrowingPeerBuffer published_;  // x or dy [max T, H], then weights [max return rows]
  GrowingPeerBuffer returned_;   // [max N, H]
  // Whether reads of published_ were enqueued after the last fence; the same on all ranks.
  bool tokens_being_read_ = false;
  Stream* last_stream_ = nullptr;
};

}  // namespace

template <typename T>
std::unique_ptr<Dispatcher<T>> MakeDirectDispatcher(Nodes nodes, Communicator& comm,
                                                    MemoryResource& memory) {
  return std::make_unique<DirectDispatcher<T>>(std::move(nodes), comm, memory);
}

template std::unique_ptr<Dispatcher<float>> MakeDirectDispatcher(Nodes, Communicator&,
                                                                 MemoryResource&);
template std::unique_ptr<Dispatcher<BFloat16>> MakeDirectDispatcher(Nodes, Communicator&,
                                                                    MemoryResource&);
template std::unique_ptr<Dispatcher<Float16>> MakeDirectDispatcher(Nodes, Communicator&,
                                                                   MemoryResource&);

}  // namespace moe
