// Gathers rows that the ranks of a group hold, each some of them.
#ifndef MOE_COMM_ROW_GATHER_H_
#define MOE_COMM_ROW_GATHER_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"

namespace moe {

template <typename T>
MatrixView<T> RowsOfRank(MatrixView<T> x, absl::Span<const int64_t> offsets, int rank) {
  return RowRange(x, offsets[static_cast<size_t>(rank)], offsets[static_cast<size_t>(rank) + 1]);
}

// Rows [offsets[r], offsets[r + 1]) of every rank's `all` [N, H] become those that rank r has in
// `own`, which is these rows of its `all` or overlaps none of it; both are dense. offsets [R + 1]
// from 0 to N are host memory and the same on all ranks; a rank may hold none. Collective,
// enqueued; a rank of R sends at most its rows to each other: with even rows (R - 1) / R of
// N H sizeof(T) bytes in all. Errors: kInvalidArgument if offsets do not ascend from 0 to N or a
// matrix does not fit or is not dense; those of AllGatherV.
template <typename T>
absl::Status AllGatherRows(MatrixView<const T> own, MatrixView<T> all,
                           absl::Span<const int64_t> offsets, Communicator& comm, Stream& stream,
                           const Site& site = {}) {
  const int64_t cols = all.cols();
  const bool fits = static_cast<int>(offsets.size()) == comm.size() + 1 && offsets.front() == 0 &&
                    offsets.back() == all.rows() && all.stride() == cols;
  if (!fits) {
    return absl::InvalidArgumentError(
        "AllGatherRows: offsets that are not [R + 1] from 0 to the rows of a dense matrix");
  }
  RankCounts counts;  // AllGatherV refuses those below 0
  for (int r = 0; r < comm.size(); ++r) counts.push_back((offsets[r + 1] - offsets[r]) * cols);
  if (own.cols() != cols || own.stride() != cols || own.rows() * cols != counts[comm.rank()]) {
    return absl::InvalidArgumentError(
        "AllGatherRows: own rows that are not those of the offsets in a dense matrix");
  }
  return comm.AllGatherV<T>(AllOf(own), AllOf(all), counts, stream, site);
}

}  // namespace moe

#endif  // MOE_COMM_ROW_GATHER_H_
