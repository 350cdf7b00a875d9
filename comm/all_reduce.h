// One entry for the algorithms of --all-reduce.
#ifndef MOE_COMM_ALL_REDUCE_H_
#define MOE_COMM_ALL_REDUCE_H_

#include <cstdint>
#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "comm/ring_all_reduce.h"
#include "kernels/base/stream.h"

namespace moe {

// Sums over the ranks of one communicator with one algorithm; what the gradient reducer calls.
//   kRing     RingAllReduce, on every backend
//   kDirect   peers' buffers are read in place and summed in rank order, 2 meetings and one pass
//             over the data; on "local" alone
//   kLibrary  the backend library's own; not on "local", which has none
// All give the same bits on every rank and from run to run; int64 gives the same bits with all.
class AllReducer {
 public:
  // kInvalidArgument when the backend does not have the algorithm. `comm` must outlive this and
  // the work it enqueues. Not collective.
  static absl::StatusOr<std::unique_ptr<AllReducer>> Create(AllReduceAlgorithm algorithm,
                                                            Communicator& comm,
                                                            const RingOptions& ring = {});

  // Collective, enqueued: inout[i] becomes the sum over ranks of inout[i]. T: float or int64_t.
  template <typename T>
  absl::Status Sum(absl::Span<T> inout, Stream& stream, const Site& site = {}) {
    if (algorithm_ == AllReduceAlgorithm::kRing) return ring_.Sum(inout, stream, site);
    return comm_.AllReduce(inout, ReduceOp::kSum, stream, site);
  }

  // … part rank() of `inout` alone, counts[r] elements being part r; the other parts are lost.
  // Communicator::ReduceScatterV in place, or the first half of the ring.
  template <typename T>
  absl::Status ReduceScatter(absl::Span<T> inout, absl::Span<const int64_t> counts, Stream& stream,
                             const Site& site = {});

 private:
  AllReducer(AllReduceAlgorithm algorithm, Communicator& comm, const RingOptions& ring)
      : algorithm_(algorithm), comm_(comm), ring_(comm, ring) {}

  const AllReduceAlgorithm algorithm_;
  Communicator& comm_;
  RingAllReduce ring_;
};

}  // namespace moe

#endif  // MOE_COMM_ALL_REDUCE_H_
