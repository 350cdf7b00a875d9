// Hierarchical dispatch: between nodes first, then inside the node.
//
// Rank r is local rank l of node m, r = m * s + l for s = node_size. Two groups meet at every rank:
// its rail (the ranks of its local rank, one per node) and its node.
//   out   (m, l) -> rail -> (m', l) -> node -> (m', l')   messages carry all rows for node m'
//   back  (m', l') -> node -> (m', l) -> rail -> (m, l)
// so a pair of nodes is crossed by s large messages each way instead of s * s small ones. Every
// count is known from the plan: no message says how long another one is.
#include <algorithm>
#include <memory>
#include <utility>

#include "dispatch/dispatcher_base.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

template <typename T>
class HierarchicalDispatcher final : public DispatcherBase<T> {
 public:
  HierarchicalDispatcher(const DispatcherOptions& options, Communicator& comm,
                         std::unique_ptr<Communicator> rail, std::unique_ptr<Communicator> node)
      : DispatcherBase<T>(options, comm),
        nodes_(comm.size() / this->node_size_),
        my_node_(comm.rank() / this->node_size_),
        my_local_(comm.rank() % this->node_size_),
        rail_(std::move(rail)),
        node_(std::move(node)) {}

  DispatchAlgorithm algorithm() const override { return DispatchAlgorithm::kHierarchical; }

  absl::StatusOr<MatrixView<T>> ReturnBuffer(const DispatchPlan& plan, int64_t hidden,
                                             Workspace& workspace) override {
    return workspace.Matrix<T>(plan.expert_rows(), hidden);
  }

  absl::Status Dispatch(const DispatchPlan& plan, int chunk, MatrixView<const T> x,
                        MatrixView<T> expert_rows, Workspace& workspace,
                        Stream& exchange) override {
    MOE_RETURN_IF_ERROR(this->CheckDispatch("Dispatch", plan, chunk, x, expert_rows, exchange));
    MOE_ASSIGN_OR_RETURN(const Received<T> tokens, SendTokens(plan, chunk, x, workspace, exchange));
    return GatherRows<T>(tokens.rows, tokens.index, this->ExpertRowsOf(plan, chunk, expert_rows),
                         exchange);
  }

  absl::Status DispatchScaled(const DispatchPlan& plan, int chunk, MatrixView<const T> dy,
                              absl::Span<const float> weight, MatrixView<T> expert_rows,
                              Workspace& workspace, Stream& exchange) override {
    MOE_RETURN_IF_ERROR(
        this->CheckDispatch("DispatchScaled", plan, chunk, dy, expert_rows, exchange));
    MOE_RETURN_IF_ERROR(this->CheckWeights(plan, weight));
    MOE_ASSIGN_OR_RETURN(const Received<T> tokens,
                         SendTokens(plan, chunk, dy, workspace, exchange));
    MOE_ASSIGN_OR_RETURN(const auto scale, SendWeights(plan, chunk, weight, workspace, exchange));
    return GatherScaledRows<T>(tokens.rows, tokens.index, scale,
                               this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
  }

  absl::Status Return(const DispatchPlan& plan, int chunk, MatrixView<const T> expert_rows,
                      MatrixView<T> home_rows, Workspace& workspace, Stream& exchange) override;

 private:
  // Rows that came in two hops, by (local rank, node) of their source.
  template <typename U>
  struct Received {
    MatrixView<U> rows;
    absl::Span<const int32_t> index;  // SendTokens: the row of each expert row of the chunk
  };
  struct Block {
    int64_t from, to, rows;
  };

  int RankOf(int node, int local) const { return node * this->node_size_ + local; }

  // Calls visit(o, i) for both, i fastest.
  template <typename Visit>
  static void ForEach(int outer, int inner, Visit visit) {
    for (int o = 0; o < outer; ++o) {
      for (int i = 0; i < inner; ++i) visit(o, i);
    }
  }

  // rows [*, W] in blocks by (outer, inner) of `outer` x `inner`; the result by (inner, outer).
  template <typename U, typename Rows>
  absl::StatusOr<MatrixView<U>> Transpose(MatrixView<const U> from, int outer, int inner, Rows rows,
                                          Workspace& workspace, Stream& exchange) const;

  // send: rows by destination, count(source, destination) of them for every pair of ranks.
  template <typename U, typename Count>
  absl::StatusOr<MatrixView<U>> SendOut(MatrixView<const U> send, Count count, Workspace& workspace,
                                        Stream& exchange);

  absl::StatusOr<Received<T>> SendTokens(const DispatchPlan& plan, int chunk, MatrixView<const T> x,
                                         Workspace& workspace, Stream& exchange);
  absl::StatusOr<absl::Span<const float>> SendWeights(const DispatchPlan& plan, int chunk,
                                                      absl::Span<const float> weight,
                                                      Workspace& workspace, Stream& exchange);

  // The chunk's return order, by (local rank, node) of home instead of by home rank.
  absl::StatusOr<absl::Span<const int32_t>> RailOrder(const DispatchPlan& plan, int chunk,
                                                      Workspace& workspace) const;

  void CountHop(int peer, int64_t elements, size_t element_bytes) {
    this->CountBytes(peer, elements * static_cast<int64_t>(element_bytes));
  }

  const int nodes_, my_node_, my_local_;
  const std::unique_ptr<Communicator> rail_, node_;
};

template <typename T>
template <typename U, typename Rows>
absl::StatusOr<MatrixView<U>> HierarchicalDispatcher<T>::Transpose(MatrixView<const U> from,
                                                                   int outer, int inner, Rows rows,
                                                                   Workspace& workspace,
                                                                   Stream& exchange) const {
  MOE_ASSIGN_OR_RETURN(const auto to, workspace.Matrix<U>(from.rows(), from.cols()));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Array<Block>(int64_t{outer} * inner));
  int64_t begin = 0;
  ForEach(outer, inner, [&](int o, int i) {
    const int64_t count = rows(o, i);
    blocks[i * outer + o] = {begin, 0, count};
    begin += count;
  });
  begin = 0;
  for (Block& block : blocks) {
    block.to = begin;
    begin += block.rows;
  }
  MOE_RETURN_IF_ERROR(exchange.Enqueue([=, &threads = exchange.threads()] {
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

template <typename T>
template <typename U, typename Count>
absl::StatusOr<MatrixView<U>> HierarchicalDispatcher<T>::SendOut(MatrixView<const U> send,
                                                                 Count count, Workspace& workspace,
                                                                 Stream& exchange) {
  const int me = this->comm_.rank();
  const auto to_node = [&](int source, int node) {
    int64_t rows = 0;
    for (int l = 0; l < this->node_size_; ++l) rows += count(source, RankOf(node, l));
    return rows;
  };
  const auto from_rail = [&](int local, int destination) {
    int64_t rows = 0;
    for (int m = 0; m < nodes_; ++m) rows += count(RankOf(m, local), destination);
    return rows;
  };
  int64_t rows = 0;
  for (int m = 0; m < nodes_; ++m) rows += to_node(RankOf(m, my_local_), my_node_);
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<U>(rows, send.cols()));
  rail_->SetPhase(this->comm_.phase());
  MOE_RETURN_IF_ERROR(ExchangeRows<U>(
      *rail_, send, [&](int m) { return to_node(me, m); }, middle,
      [&](int m) { return to_node(RankOf(m, my_local_), my_node_); }, workspace, exchange));
  for (int m = 0; m < nodes_; ++m) {
    CountHop(RankOf(m, my_local_), to_node(me, m) * send.cols(), sizeof(U));
  }

  MOE_ASSIGN_OR_RETURN(
      const auto by_local,
      Transpose<U>(
          middle, nodes_, this->node_size_,
          [&](int m, int l) { return count(RankOf(m, my_local_), RankOf(my_node_, l)); }, workspace,
          exchange));
  rows = 0;
  for (int l = 0; l < this->node_size_; ++l) rows += from_rail(l, me);
  MOE_ASSIGN_OR_RETURN(const auto received, workspace.Matrix<U>(rows, send.cols()));
  node_->SetPhase(this->comm_.phase());
  MOE_RETURN_IF_ERROR(ExchangeRows<U>(
      *node_, by_local, [&](int l) { return from_rail(my_local_, RankOf(my_node_, l)); }, received,
      [&](int l) { return from_rail(l, me); }, workspace, exchange));
  for (int l = 0; l < this->node_size_; ++l) {
    const int peer = RankOf(my_node_, l);
    CountHop(peer, from_rail(my_local_, peer) * send.cols(), sizeof(U));
  }
  return received;
}

template <typename T>
absl::StatusOr<typename HierarchicalDispatcher<T>::template Received<T>>
HierarchicalDispatcher<T>::SendTokens(const DispatchPlan& plan, int chunk, MatrixView<const T> x,
                                      Workspace& workspace, Stream& exchange) {
  const auto token = plan.send_token(chunk);
  MOE_ASSIGN_OR_RETURN(const auto send,
                       workspace.Matrix<T>(static_cast<int64_t>(token.size()), x.cols()));
  MOE_RETURN_IF_ERROR(GatherRows<T>(x, token, send, exchange));
  Received<T> result;
  MOE_ASSIGN_OR_RETURN(result.rows, SendOut<T>(
                                        send,
                                        [&](int source, int destination) {
                                          return plan.SendRows(chunk, source, destination);
                                        },
                                        workspace, exchange));

  // The plan counts received rows by source rank; these came by (local rank, node).
  MOE_ASSIGN_OR_RETURN(const auto shift, workspace.Array<int64_t>(plan.ranks()));
  int64_t begin = 0;
  ForEach(this->node_size_, nodes_, [&](int l, int m) {
    shift[RankOf(m, l)] = begin;
    begin += plan.SendRows(chunk, RankOf(m, l), plan.rank());
  });
  begin = 0;
  for (int r = 0; r < plan.ranks(); ++r) {
    shift[r] -= begin;
    begin += plan.SendRows(chunk, r, plan.rank());
  }
  const auto source = plan.expert_source(chunk), peer = plan.expert_peer(chunk);
  MOE_ASSIGN_OR_RETURN(const auto index,
                       workspace.Array<int32_t>(static_cast<int64_t>(source.size())));
  for (size_t n = 0; n < source.size(); ++n) {
    index[n] = static_cast<int32_t>(source[n] + shift[peer[n]]);
  }
  result.index = index;
  return result;
}

template <typename T>
absl::StatusOr<absl::Span<const float>> HierarchicalDispatcher<T>::SendWeights(
    const DispatchPlan& plan, int chunk, absl::Span<const float> weight, Workspace& workspace,
    Stream& exchange) {
  MOE_ASSIGN_OR_RETURN(const auto send,
                       WeightsInHomeOrder(plan, chunk, weight, workspace, exchange));
  MOE_ASSIGN_OR_RETURN(const auto by_rail, SendOut<float>(
                                               send,
                                               [&](int source, int destination) {
                                                 return plan.ExpertRows(chunk, source, destination);
                                               },
                                               workspace, exchange));
  MOE_ASSIGN_OR_RETURN(
      const auto received,
      Transpose<float>(
          by_rail, this->node_size_, nodes_,
          [&](int l, int m) { return plan.ExpertRows(chunk, RankOf(m, l), plan.rank()); },
          workspace, exchange));
  return WeightsInExpertOrder(plan, chunk, received, workspace, exchange);
}

template <typename T>
absl::StatusOr<absl::Span<const int32_t>> HierarchicalDispatcher<T>::RailOrder(
    const DispatchPlan& plan, int chunk, Workspace& workspace) const {
  const auto order = plan.return_order(chunk);
  MOE_ASSIGN_OR_RETURN(const auto result,
                       workspace.Array<int32_t>(static_cast<int64_t>(order.size())));
  MOE_ASSIGN_OR_RETURN(const auto begin, workspace.Array<int64_t>(plan.ranks()));
  int64_t rows = 0;
  for (int r = 0; r < plan.ranks(); ++r) {
    begin[r] = rows;
    rows += plan.ExpertRows(chunk, r, plan.rank());
  }
  auto to = result.begin();
  ForEach(this->node_size_, nodes_, [&](int l, int m) {
    const int home = RankOf(m, l);
    to = std::copy_n(order.begin() + begin[home], plan.ExpertRows(chunk, home, plan.rank()), to);
  });
  return result;
}

template <typename T>
absl::Status HierarchicalDispatcher<T>::Return(const DispatchPlan& plan, int chunk,
                                               MatrixView<const T> expert_rows,
                                               MatrixView<T> home_rows, Workspace& workspace,
                                               Stream& exchange) {
  MOE_RETURN_IF_ERROR(this->CheckReturn(plan, chunk, expert_rows, home_rows, exchange));
  const int64_t hidden = home_rows.cols();
  const int me = plan.rank();
  const auto count = [&](int home, int expert_rank) {
    return plan.ExpertRows(chunk, home, expert_rank);
  };
  // Rows of `expert_rank` for the homes of one rail; rows of one node's experts for `home`.
  const auto to_rail = [&](int local, int expert_rank) {
    int64_t rows = 0;
    for (int m = 0; m < nodes_; ++m) rows += count(RankOf(m, local), expert_rank);
    return rows;
  };
  const auto from_node = [&](int home, int node) {
    int64_t rows = 0;
    for (int l = 0; l < this->node_size_; ++l) rows += count(home, RankOf(node, l));
    return rows;
  };

  MOE_ASSIGN_OR_RETURN(const auto order, RailOrder(plan, chunk, workspace));
  MOE_ASSIGN_OR_RETURN(const auto send,
                       workspace.Matrix<T>(static_cast<int64_t>(order.size()), hidden));
  MOE_RETURN_IF_ERROR(GatherRows<T>(expert_rows, order, send, exchange));
  int64_t rows = 0;
  for (int l = 0; l < this->node_size_; ++l) rows += to_rail(my_local_, RankOf(my_node_, l));
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<T>(rows, hidden));
  node_->SetPhase(this->comm_.phase());
  MOE_RETURN_IF_ERROR(ExchangeRows<T>(
      *node_, send, [&](int l) { return to_rail(l, me); }, middle,
      [&](int l) { return to_rail(my_local_, RankOf(my_node_, l)); }, workspace, exchange));
  for (int l = 0; l < this->node_size_; ++l) {
    CountHop(RankOf(my_node_, l), to_rail(l, me) * hidden, sizeof(T));
  }

  MOE_ASSIGN_OR_RETURN(
      const auto by_node,
      Transpose<T>(
          middle, this->node_size_, nodes_,
          [&](int l, int m) { return count(RankOf(m, my_local_), RankOf(my_node_, l)); }, workspace,
          exchange));
  rail_->SetPhase(this->comm_.phase());
  for (int m = 0; m < nodes_; ++m) {
    const int peer = RankOf(m, my_local_);
    CountHop(peer, from_node(peer, my_node_) * hidden, sizeof(T));
  }
  return ExchangeRows<T>(
      *rail_, by_node, [&](int m) { return from_node(RankOf(m, my_local_), my_node_); },
      this->HomeRowsOf(plan, chunk, home_rows), [&](int m) { return from_node(me, m); }, workspace,
      exchange);
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Dispatcher<T>>> MakeHierarchicalDispatcher(
    const DispatcherOptions& options, Communicator& comm) {
  const int node_size = options.node_size == 0 ? comm.size() : options.node_size;
  const int node = comm.rank() / node_size, local = comm.rank() % node_size;
  MOE_ASSIGN_OR_RETURN(auto rail_group, comm.Split(local, node));
  MOE_ASSIGN_OR_RETURN(auto node_group, comm.Split(node, local));
  return std::make_unique<HierarchicalDispatcher<T>>(options, comm, std::move(rail_group),
                                                     std::move(node_group));
}

template absl::StatusOr<std::unique_ptr<Dispatcher<float>>> MakeHierarchicalDispatcher(
    const DispatcherOptions&, Communicator&);
template absl::StatusOr<std::unique_ptr<Dispatcher<BFloat16>>> MakeHierarchicalDispatcher(
    const DispatcherOptions&, Communicator&);

}  // namespace moe
