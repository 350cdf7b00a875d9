#include "dispatch/two_hop_exchange.h"

#include <algorithm>
#include <numeric>

#include "dispatch/exchange_rows.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

struct Block {
  int64_t from, to, rows;
};

int64_t SumOf(const RankCounts& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

}  // namespace

absl::StatusOr<TwoHopExchange> TwoHopExchange::Create(Communicator& comm, int node_size) {
  TwoHopExchange exchange(comm, node_size);
  MOE_ASSIGN_OR_RETURN(exchange.rail_.comm, comm.Split(exchange.my_local_, exchange.my_node_));
  MOE_ASSIGN_OR_RETURN(exchange.node_.comm, comm.Split(exchange.my_node_, exchange.my_local_));
  return exchange;
}

TwoHopExchange::HopRows TwoHopExchange::RailRows(RowCount rows) const {
  HopRows hop = {.out = RankCounts(nodes_, 0), .in = RankCounts(nodes_, 0)};
  for (int m = 0; m < nodes_; ++m) {
    for (int l = 0; l < node_size_; ++l) {
      hop.out[m] += rows(comm_->rank(), RankOf(m, l));
      hop.in[m] += rows(RankOf(m, my_local_), RankOf(my_node_, l));
    }
  }
  return hop;
}

TwoHopExchange::HopRows TwoHopExchange::NodeRows(RowCount rows) const {
  HopRows hop = {.out = RankCounts(node_size_, 0), .in = RankCounts(node_size_, 0)};
  for (int l = 0; l < node_size_; ++l) {
    for (int m = 0; m < nodes_; ++m) {
      hop.out[l] += rows(RankOf(m, my_local_), RankOf(my_node_, l));
      hop.in[l] += rows(RankOf(m, l), comm_->rank());
    }
  }
  return hop;
}

template <typename U>
absl::Status TwoHopExchange::Hop(const Part& part, MatrixView<const U> send, const RankCounts& sent,
                                 MatrixView<U> received, const RankCounts& received_rows,
                                 const Call& call) {
  MOE_RETURN_IF_ERROR(ExchangeRows<U>(
      {*part.comm, call.stream, clock_, call.site}, send, [&](int i) { return sent[i]; }, received,
      [&](int i) { return received_rows[i]; }));
  const int64_t row_bytes = send.cols() * static_cast<int64_t>(sizeof(U));
  for (int i = 0; i < part.comm->size(); ++i) {
    call.count_bytes(part.first + i * part.step, sent[i] * row_bytes);
  }
  return absl::OkStatus();
}

template <typename U>
absl::StatusOr<MatrixView<U>> TwoHopExchange::Transpose(
    MatrixView<const U> from, int outer, int inner,
    absl::FunctionRef<int64_t(int outer, int inner)> rows, Workspace& workspace, Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const auto to, workspace.Matrix<U>(from.rows(), from.cols()));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Array<Block>(int64_t{outer} * inner));
  int64_t begin = 0;
  for (int o = 0; o < outer; ++o) {
    for (int i = 0; i < inner; ++i) {
      const int64_t count = rows(o, i);
      blocks[i * outer + o] = {begin, 0, count};
      begin += count;
    }
  }
  begin = 0;
  for (Block& block : blocks) {
    block.to = begin;
    begin += block.rows;
  }
  MOE_RETURN_IF_ERROR(stream.Enqueue([=, &threads = stream.threads()] {
    threads.For(static_cast<int64_t>(blocks.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        std::copy_n(from.data() + blocks[b].from * from.cols(), blocks[b].rows * from.cols(),
                    to.data() + blocks[b].to * to.cols());
      }
    });
    return absl::OkStatus();
  }));
  return to;
}

template <typename U>
absl::StatusOr<MatrixView<U>> TwoHopExchange::Send(MatrixView<const U> send, RowCount rows,
                                                   const Call& call, const Relays& relays) {
  Workspace& workspace = call.workspace;
  HopRows rail = RailRows(rows);
  const HopRows node = NodeRows(rows);
  const bool relayed = !relays.sent.empty();
  if (relayed) {
    rail.out.assign(relays.sent.begin(), relays.sent.end());
    rail.in.assign(relays.received.begin(), relays.received.end());
  }
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<U>(SumOf(rail.in), send.cols()));
  MOE_RETURN_IF_ERROR(Hop<U>(rail_, send, rail.out, middle, rail.in, call));
  MatrixView<U> by_local;
  if (relayed) {
    MOE_ASSIGN_OR_RETURN(by_local, workspace.Matrix<U>(SumOf(node.out), send.cols()));
    MOE_RETURN_IF_ERROR(GatherRows<U>(middle, relays.source, by_local, call.stream));
  } else {
    MOE_ASSIGN_OR_RETURN(
        by_local, Transpose<U>(
                      middle, nodes_, node_size_,
                      [&](int m, int l) { return rows(RankOf(m, my_local_), RankOf(my_node_, l)); },
                      workspace, call.stream));
  }
  MOE_ASSIGN_OR_RETURN(const auto received, workspace.Matrix<U>(SumOf(node.in), send.cols()));
  MOE_RETURN_IF_ERROR(Hop<U>(node_, by_local, node.out, received, node.in, call));
  return received;
}

#define MOE_INSTANTIATE(U)                                                                      \
  template absl::StatusOr<MatrixView<U>> TwoHopExchange::Send<U>(MatrixView<const U>, RowCount, \
                                                                 const Call&, const Relays&);
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
