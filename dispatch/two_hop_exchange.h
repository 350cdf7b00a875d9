// All-to-all of rows in two hops: between nodes, and inside a node. The hierarchical dispatcher
// uses it; `moe bench` measures it alone.
#ifndef MOE_DISPATCH_TWO_HOP_EXCHANGE_H_
#define MOE_DISPATCH_TWO_HOP_EXCHANGE_H_

#include <cstdint>
#include <memory>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "dispatch/dispatcher.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

// Rank r is local rank l of node m, r = m * s + l for s = node_size. Two groups meet at every rank:
// its rail (the ranks of its local rank, one per node) and its node.
//   (m, l) -> rail -> (m', l) -> node -> (m', l')
// so a pair of nodes is crossed by s large messages each way instead of s * s small ones, and once
// by a row that several ranks of m' need. Every rank knows the number of rows between every pair,
// so no message carries the length of another.
class TwoHopExchange {
 public:
  // Rows that `source` has for `destination`.
  using RowCount = absl::FunctionRef<int64_t(int source, int destination)>;
  // What an exchange runs on.
  struct Call {
    absl::FunctionRef<void(int peer, int64_t bytes)> count_bytes;  // called once per hop and peer
    Workspace& workspace;
    Stream& stream;
    Site site = {};
  };

  // Collective: splits `comm`. node_size divides its size.
  static absl::StatusOr<TwoHopExchange> Create(Communicator& comm, int node_size);

  // Clock of both hops; nullptr, the initial value: none.
  void set_clock(ExchangeClock* clock) { clock_ = clock; }

  // Rows that cross once and become one row or several in the node; empty: each is one.
  struct Relays {
    absl::Span<const int32_t> sent, received;  // [nodes] rows along the rail
    absl::Span<const int32_t> source;  // [rows of the second hop, by (l', m)] row of the first
  };

  // send: rows by destination, or with `relays` by node. The result: rows(source, destination) rows
  // by (local rank, node) of their source.
  template <typename U>
  absl::StatusOr<MatrixView<U>> Send(MatrixView<const U> send, RowCount rows, const Call& call,
                                     const Relays& relays = {});

 private:
  TwoHopExchange(Communicator& comm, int node_size)
      : comm_(&comm),
        node_size_(node_size),
        nodes_(comm.size() / node_size),
        my_node_(comm.rank() / node_size),
        my_local_(comm.rank() % node_size),
        rail_{.comm = nullptr, .first = my_local_, .step = node_size},
        node_{.comm = nullptr, .first = my_node_ * node_size, .step = 1} {}

  // Rows that this rank moves to and from each rank of a group in its hop.
  struct HopRows {
    RankCounts out, in;
  };
  // RailRows: all rows that a rank has for a node. NodeRows: all that a rail brought for a rank.
  HopRows RailRows(RowCount rows) const;
  HopRows NodeRows(RowCount rows) const;

  // A group of this rank. Its rank i is first + i * step of the whole.
  struct Part {
    std::unique_ptr<Communicator> comm;
    int first, step;
  };
  template <typename U>
  absl::Status Hop(const Part& part, MatrixView<const U> send, const RankCounts& sent,
                   MatrixView<U> received, const RankCounts& received_rows, const Call& call);

  // from: blocks of rows(outer, inner) rows each, by (outer, inner). The result: by (inner, outer).
  template <typename U>
  static absl::StatusOr<MatrixView<U>> Transpose(
      MatrixView<const U> from, int outer, int inner,
      absl::FunctionRef<int64_t(int outer, int inner)> rows, Workspace& workspace, Stream& stream);

  int RankOf(int node, int local) const { return node * node_size_ + local; }

  Communicator* comm_;
  int node_size_, nodes_, my_node_, my_local_;
  Part rail_, node_;
  ExchangeClock* clock_ = nullptr;
};

}  // namespace moe

#endif  // MOE_DISPATCH_TWO_HOP_EXCHANGE_H_
