#include "comm/all_reduce.h"

#include <absl/strings/str_cat.h>

namespace moe {

absl::StatusOr<std::unique_ptr<AllReducer>> AllReducer::Create(AllReduceAlgorithm algorithm,
                                                               Communicator& comm,
                                                               const RingOptions& ring) {
  if (algorithm == AllReduceAlgorithm::kDirect && comm.backend() != "local") {
    return absl::InvalidArgumentError(
        absl::StrCat("AllReducer: direct reads the buffers of threads, and backend ",
                     comm.backend(), " has processes, expected ring or library"));
  }
  if (algorithm == AllReduceAlgorithm::kLibrary && comm.backend() == "local") {
    return absl::InvalidArgumentError(
        "AllReducer: there is no library below backend local, expected ring or direct");
  }
  return std::unique_ptr<AllReducer>(new AllReducer(algorithm, comm, ring));
}

absl::Status AllReducer::Sum(absl::Span<float> inout, Stream& stream) {
  if (algorithm_ == AllReduceAlgorithm::kRing) return ring_.Sum(inout, stream);
  return comm_.AllReduce(inout, ReduceOp::kSum, stream);
}

absl::Status AllReducer::Sum(absl::Span<int64_t> inout, Stream& stream) {
  if (algorithm_ == AllReduceAlgorithm::kRing) return ring_.Sum(inout, stream);
  return comm_.AllReduce(inout, ReduceOp::kSum, stream);
}

}  // namespace moe
