#include "dispatch/two_hop_exchange.h"

#include <algorithm>
#include <utility>

#include "dispatch/dispatcher_base.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

struct Block {
  int64_t from, to, rows;
};

}  // namespace

absl::StatusOr<TwoHopExchange> TwoHopExchange::Create(Communicator& comm, int node_size) {
  TwoHopExchange exchange(comm, node_size);
  MOE_ASSIGN_OR_RETURN(exchange.rail_, comm.Split(exchange.my_local_, exchange.my_node_));
  MOE_ASSIGN_OR_RETURN(exchange.node_, comm.Split(exchange.my_node_, exchange.my_local_));
  return exchange;
}

void TwoHopExchange::ForEachRankByRail(absl::FunctionRef<void(int rank)> visit) const {
  for (int l = 0; l < node_size_; ++l) {
    for (int m = 0; m < nodes_; ++m) visit(RankOf(m, l));
  }
}

int64_t TwoHopExchange::SumOverNodes(absl::FunctionRef<int64_t(int)> rows) const {
  int64_t sum = 0;
  for (int m = 0; m < nodes_; ++m) sum += rows(m);
  return sum;
}

int64_t TwoHopExchange::SumOverLocals(absl::FunctionRef<int64_t(int)> rows) const {
  int64_t sum = 0;
  for (int l = 0; l < node_size_; ++l) sum += rows(l);
  return sum;
}

template <typename U>
absl::Status TwoHopExchange::Hop(Communicator& group, absl::FunctionRef<int(int)> rank_of,
                                 MatrixView<const U> send, absl::FunctionRef<int64_t(int)> sent,
                                 MatrixView<U> received,
                                 absl::FunctionRef<int64_t(int)> received_rows,
                                 CountBytes count_bytes, Stream& stream) {
  group.SetPhase(comm_->phase());
  MOE_RETURN_IF_ERROR(ExchangeRows<U>(group, send, sent, received, received_rows, stream));
  const int64_t row_bytes = send.cols() * static_cast<int64_t>(sizeof(U));
  for (int i = 0; i < group.size(); ++i) count_bytes(rank_of(i), sent(i) * row_bytes);
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
absl::StatusOr<MatrixView<U>> TwoHopExchange::Out(MatrixView<const U> send, RowCount rows,
                                                  CountBytes count_bytes, Workspace& workspace,
                                                  Stream& stream) {
  const int me = comm_->rank();
  const auto on_rail = [&](int m) {
    return RankOf(m, my_local_);
  };
  const auto in_node = [&](int l) {
    return RankOf(my_node_, l);
  };
  // First hop: all that a rank has for a node. Second: all that a rail brought for a rank.
  const auto for_node = [&](int source, int node) {
    return SumOverLocals([&](int l) { return rows(source, RankOf(node, l)); });
  };
  const auto by_rail = [&](int local, int destination) {
    return SumOverNodes([&](int m) { return rows(RankOf(m, local), destination); });
  };
  const auto to_node = [&](int m) {
    return for_node(me, m);
  };
  const auto from_node = [&](int m) {
    return for_node(on_rail(m), my_node_);
  };
  const auto to_local = [&](int l) {
    return by_rail(my_local_, in_node(l));
  };
  const auto from_local = [&](int l) {
    return by_rail(l, me);
  };

  MOE_ASSIGN_OR_RETURN(const auto middle,
                       workspace.Matrix<U>(SumOverNodes(from_node), send.cols()));
  MOE_RETURN_IF_ERROR(
      Hop<U>(*rail_, on_rail, send, to_node, middle, from_node, count_bytes, stream));
  MOE_ASSIGN_OR_RETURN(
      const auto by_local,
      Transpose<U>(
          middle, nodes_, node_size_, [&](int m, int l) { return rows(on_rail(m), in_node(l)); },
          workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto received,
                       workspace.Matrix<U>(SumOverLocals(from_local), send.cols()));
  MOE_RETURN_IF_ERROR(
      Hop<U>(*node_, in_node, by_local, to_local, received, from_local, count_bytes, stream));
  return received;
}

template <typename U>
absl::Status TwoHopExchange::Back(MatrixView<const U> send, RowCount rows, MatrixView<U> received,
                                  CountBytes count_bytes, Workspace& workspace, Stream& stream) {
  const int me = comm_->rank();
  const auto on_rail = [&](int m) {
    return RankOf(m, my_local_);
  };
  const auto in_node = [&](int l) {
    return RankOf(my_node_, l);
  };
  // First hop: all that a rank has for the homes of a rail. Second: all that a node has for a home.
  const auto for_rail = [&](int local, int sender) {
    return SumOverNodes([&](int m) { return rows(RankOf(m, local), sender); });
  };
  const auto of_node = [&](int home, int node) {
    return SumOverLocals([&](int l) { return rows(home, RankOf(node, l)); });
  };
  const auto to_local = [&](int l) {
    return for_rail(l, me);
  };
  const auto from_local = [&](int l) {
    return for_rail(my_local_, in_node(l));
  };
  const auto to_node = [&](int m) {
    return of_node(on_rail(m), my_node_);
  };
  const auto from_node = [&](int m) {
    return of_node(me, m);
  };

  MOE_ASSIGN_OR_RETURN(const auto middle,
                       workspace.Matrix<U>(SumOverLocals(from_local), send.cols()));
  MOE_RETURN_IF_ERROR(
      Hop<U>(*node_, in_node, send, to_local, middle, from_local, count_bytes, stream));
  MOE_ASSIGN_OR_RETURN(
      const auto by_node,
      Transpose<U>(
          middle, node_size_, nodes_, [&](int l, int m) { return rows(on_rail(m), in_node(l)); },
          workspace, stream));
  return Hop<U>(*rail_, on_rail, by_node, to_node, received, from_node, count_bytes, stream);
}

#define MOE_INSTANTIATE(U)                                                                        \
  template absl::StatusOr<MatrixView<U>> TwoHopExchange::Out<U>(MatrixView<const U>, RowCount,    \
                                                                CountBytes, Workspace&, Stream&); \
  template absl::Status TwoHopExchange::Back<U>(MatrixView<const U>, RowCount, MatrixView<U>,     \
                                                CountBytes, Workspace&, Stream&);                 \
  template absl::StatusOr<MatrixView<U>> TwoHopExchange::Transpose<U>(                            \
      MatrixView<const U>, int, int, absl::FunctionRef<int64_t(int, int)>, Workspace&, Stream&);
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
