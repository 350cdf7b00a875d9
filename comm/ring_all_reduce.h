// Ring all-reduce over SendRecv: the default for dense gradients.
#ifndef MOE_COMM_RING_ALL_REDUCE_H_
#define MOE_COMM_RING_ALL_REDUCE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "comm/host_staging.h"
#include "kernels/base/buffer.h"
#include "kernels/base/choice.h"
#include "kernels/base/stream.h"

namespace moe {

// How gradients are summed over ranks (--all-reduce).
enum class AllReduceAlgorithm : uint8_t {
  kRing,     // RingAllReduce below
  kDirect,   // peers' buffers are read in place; threads only
  kLibrary,  // the backend library's own (MPI_Allreduce); not on local threads
};
inline constexpr Choice<AllReduceAlgorithm> kAllReduceWords[] = {
    {"ring", AllReduceAlgorithm::kRing},
    {"direct", AllReduceAlgorithm::kDirect},
    {"library", AllReduceAlgorithm::kLibrary}};

struct RingOptions {
  // What is received to be added comes in chunks of this size: still in the cache when it is added,
  // and the scratch stays small. Bounded below by one cache line. 0: 256 KiB on the host; 4 MiB on
  // a CUDA device, as much as a link of 450 GB/s moves while a chunk's kernels are launched (10
  // us).
  int64_t chunk_bytes = 0;
};

// inout[i] on every rank becomes the sum over ranks of inout[i]; enqueued on `stream`.
//
// Reduce-scatter then all-gather around the ring r -> r + 1: 2(R-1) steps, 2*S*(R-1)/R bytes sent
// per rank. Block b is summed in the order b+1, b+2, ..., b (mod R), the same on every rank, so the
// result is equal on all ranks and from run to run; for int64 any order gives the same bits, at
// any R. R need not divide the length. Patarasuk and Yuan, "Bandwidth optimal all-reduce
// algorithms" (2009), doi:10.1016/j.jpdc.2008.09.002.
//
// Where additions run: on the stream's device if `comm` moves its memory, and the host then waits
// for nothing; else on the host, with a copy there and back. The bits are the same.
//
// Scratch (one chunk) belongs to the object and is allocated by the first call. One host thread at
// a time, and streams of one device, which may take turns: each waits until the one before has
// passed its use of the scratch, and so does the destructor. `comm` must outlive the object.
// Errors: those of SendRecv; kInvalidArgument for a stream of a second device; kResourceExhausted.
class RingAllReduce {
 public:
  explicit RingAllReduce(Communicator& comm, const RingOptions& options = {})
      : comm_(comm), options_(options) {}
  ~RingAllReduce();
  RingAllReduce(const RingAllReduce&) = delete;
  RingAllReduce& operator=(const RingAllReduce&) = delete;

  // T: float or int64_t.
  template <typename T>
  absl::Status Sum(absl::Span<T> inout, Stream& stream, const Site& site = {});

  // The first half, over parts of any size: part rank() of `inout` becomes the sum over ranks of
  // it, in the order of block rank() above; what the other parts then hold is undefined.
  //   counts  [R] elements of each part, >= 0, with sum inout.size(); the same on all ranks
  // S*(R-1)/R bytes sent per rank, for equal parts. Errors: kInvalidArgument for other counts.
  template <typename T>
  absl::Status ReduceScatter(absl::Span<T> inout, absl::Span<const int64_t> counts, Stream& stream,
                             const Site& site = {});

 private:
  class Cut;
  // Values and scratch of a call, in memory of the device where additions run.
  template <typename T>
  struct Lent {
    absl::Span<T> values, scratch;
    Stream& stream;
    const Site& site;
  };
  // Runs `circle(lent)`.
  template <typename T, typename Circle>
  absl::Status RunWhereItCan(absl::Span<T> inout, Stream& stream, const Site& site, Circle circle);
  // Scratch of one chunk in memory of the stream's device; `stream` waits until its last use has
  // passed.
  template <typename T>
  absl::StatusOr<absl::Span<T>> Scratch(Stream& stream);
  template <typename T>
  absl::Status Scatter(const Lent<T>& lent, const Cut& cut);
  template <typename T>
  absl::Status Gather(const Lent<T>& lent, const Cut& cut);

  Communicator& comm_;
  const RingOptions options_;
  HostStaging staging_;
  Device device_;  // device of the scratch
  Buffer scratch_;
  Event scratch_used_;
  const std::unique_ptr<Stream> waits_ = MakeInlineStream();  // the destructor takes no memory
};

}  // namespace moe

#endif  // MOE_COMM_RING_ALL_REDUCE_H_
