#include "comm/all_reduce.h"

#include <numeric>

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

template <typename T>
absl::Status AllReducer::ReduceScatter(absl::Span<T> inout, absl::Span<const int64_t> counts,
                                       Stream& stream, const Site& site) {
  if (algorithm_ == AllReduceAlgorithm::kRing) {
    return ring_.ReduceScatter(inout, counts, stream, site);
  }
  absl::Span<T> own;  // empty where counts do not fit, which the communicator refuses
  const auto rank = static_cast<size_t>(comm_.rank());
  if (rank < counts.size()) {
    const auto before = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
    const auto n = static_cast<int64_t>(inout.size());
    if (before >= 0 && before <= n && counts[rank] >= 0 && counts[rank] <= n - before) {
      own = inout.subspan(static_cast<size_t>(before), static_cast<size_t>(counts[rank]));
    }
  }
  return comm_.ReduceScatterV<T>(inout, counts, own, ReduceOp::kSum, stream, site);
}

template absl::Status AllReducer::ReduceScatter(absl::Span<float>, absl::Span<const int64_t>,
                                                Stream&, const Site&);
template absl::Status AllReducer::ReduceScatter(absl::Span<int64_t>, absl::Span<const int64_t>,
                                                Stream&, const Site&);

}  // namespace moe
