// Gathers rows that the ranks of a group hold, each some of them.
#ifndef MOE_COMM_ROW_GATHER_H_
#define MOE_COMM_ROW_GATHER_H_

#include <cstdint>

#include <absl/container/inlined_vector.h>
#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// Of N rows rank r of R holds [N r / R, N (r + 1) / R).
constexpr int64_t FirstRowOf(int rank, int ranks, int64_t rows) {
  return rows * rank / ranks;
}
// [R + 1]
inline RankCounts EvenRows(int ranks, int64_t rows) {
  RankCounts offsets;
  for (int r = 0; r <= ranks; ++r) offsets.push_back(FirstRowOf(r, ranks, rows));
  return offsets;
}
template <typename T>
MatrixView<T> RowsOfRank(MatrixView<T> x, absl::Span<const int64_t> offsets, int rank) {
  return RowRange(x, offsets[static_cast<size_t>(rank)], offsets[static_cast<size_t>(rank) + 1]);
}

// Every rank's x [N, H], dense, has its own rows [offsets[rank], offsets[rank + 1]); the others
// become those of their ranks. offsets [R + 1] from 0 to N are host memory and the same on all
// ranks; a rank may hold none. Collective, enqueued; a rank of R sends at most its rows to each
// other: with even rows (R - 1) / R of N H sizeof(T) bytes in all. Errors: kInvalidArgument if
// offsets do not ascend from 0 to N or x is not dense; those of AllGatherV.
template <typename T>
absl::Status AllGatherRows(MatrixView<T> x, absl::Span<const int64_t> offsets, Communicator& comm,
                           Stream& stream, const Site& site = {}) {
  const bool fits = static_cast<int>(offsets.size()) == comm.size() + 1 && offsets.front() == 0 &&
                    offsets.back() == x.rows() && x.stride() == x.cols();
  if (!fits) {
    return absl::InvalidArgumentError(
        "AllGatherRows: offsets that are not [R + 1] from 0 to the rows of a dense matrix");
  }
  RankCounts counts;  // AllGatherV refuses those below 0
  for (int r = 0; r < comm.size(); ++r) {
    counts.push_back((offsets[r + 1] - offsets[r]) * x.cols());
  }
  const absl::Span<T> all(x.data(), static_cast<size_t>(x.rows() * x.cols()));
  const auto mine = all.subspan(static_cast<size_t>(offsets[comm.rank()] * x.cols()),
                                static_cast<size_t>(counts[comm.rank()]));
  return comm.AllGatherV<T>(mine, all, counts, stream, site);
}

}  // namespace moe

#endif  // MOE_COMM_ROW_GATHER_H_
