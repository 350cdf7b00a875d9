// Ring all-reduce over SendRecv: the default for dense gradients.
#ifndef MOE_COMM_RING_ALL_REDUCE_H_
#define MOE_COMM_RING_ALL_REDUCE_H_

#include <cstdint>
#include <memory>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe {

// How gradients are summed over ranks (--all-reduce).
enum class AllReduceAlgorithm : uint8_t {
  kRing,     // RingAllReduce below
  kDirect,   // peers' buffers are read in place; needs peer memory
  kLibrary,  // the backend library's own (MPI_Allreduce); not on local threads
};

struct RingOptions {
  // What is received to be added comes in chunks of this size: still in the cache when it is added,
  // and the scratch stays small. Bounded below by one cache line.
  int64_t chunk_bytes = int64_t{1} << 18;
};

// inout[i] on every rank becomes the sum over ranks of inout[i]; enqueued on `stream`.
//
// Reduce-scatter then all-gather around the ring r -> r + 1: 2(R-1) steps, 2*S*(R-1)/R bytes sent
// per rank. Block b is summed in the order b+1, b+2, ..., b (mod R), the same on every rank, so the
// result is equal on all ranks and from run to run; for int64 any order gives the same bits, at
// any R. R need not divide the length. Patarasuk and Yuan, "Bandwidth optimal all-reduce
// algorithms" (2009), doi:10.1016/j.jpdc.2008.09.002.
//
// Scratch (one chunk) belongs to the object and is allocated by the first call. `comm` must outlive
// the object. Errors: those of SendRecv.
class RingAllReduce {
 public:
  explicit RingAllReduce(Communicator& comm, const RingOptions& options = {});
  ~RingAllReduce();
  RingAllReduce(const RingAllReduce&) = delete;
  RingAllReduce& operator=(const RingAllReduce&) = delete;

  absl::Status Sum(absl::Span<float> inout, Stream& stream);
  absl::Status Sum(absl::Span<int64_t> inout, Stream& stream);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the tasks that are still in a stream
};

}  // namespace moe

#endif  // MOE_COMM_RING_ALL_REDUCE_H_
