// Some rows of a matrix, in memory of their own for a pass that reads no others, and back.
#ifndef MOE_MOE_RUN_ROW_SUBSET_H_
#define MOE_MOE_RUN_ROW_SUBSET_H_

#include <algorithm>
#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/permute/permute.h"
#include "moe/run/pass.h"

namespace moe {

// n of the T rows of a matrix. Arrays are memory of the pass's device, as long as it keeps them.
struct RowSubset {
  absl::Span<const int32_t> rows;    // [n] in ascending order
  absl::Span<const int32_t> places;  // [T] of each row among these; -1 = it is none of them

  int64_t size() const { return std::ssize(rows); }
  int64_t whole() const { return std::ssize(places); }  // T
};

// rows: memory of the host, which stays as long as what `pass` keeps.
inline absl::StatusOr<RowSubset> MakeRowSubset(absl::Span<const int32_t> rows, int64_t whole,
                                               const Pass& pass) {
  RowSubset subset;
  MOE_ASSIGN_OR_RETURN(const auto places, pass.kept_host().Array<int32_t>(whole));
  std::fill(places.begin(), places.end(), -1);
  for (size_t i = 0; i < rows.size(); ++i) {
    places[static_cast<size_t>(rows[i])] = static_cast<int32_t>(i);
  }
  MOE_ASSIGN_OR_RETURN(subset.rows, KeptOnDevice<int32_t>(rows, pass));
  MOE_ASSIGN_OR_RETURN(subset.places, KeptOnDevice<int32_t>(places, pass));
  return subset;
}

// The rows of `subset` [n, H] of whole [T, H], in `workspace`. Enqueued on the compute stream, as
// Spread.
template <typename T>
absl::StatusOr<MatrixView<T>> Gathered(MatrixView<const T> whole, const RowSubset& subset,
                                       Workspace& workspace, Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const auto rows, workspace.Matrix<T>(subset.size(), whole.cols()));
  MOE_RETURN_IF_ERROR(GatherRows<T>(whole, subset.rows, rows, stream));
  return rows;
}

// whole [T, H] = `rows` [n, H] where the subset has them, 0 elsewhere; they overlap nowhere.
template <typename T>
absl::Status Spread(MatrixView<const T> rows, const RowSubset& subset, MatrixView<T> whole,
                    Stream& stream) {
  return GatherRows<T>(rows, subset.places, whole, stream);
}

}  // namespace moe

#endif  // MOE_MOE_RUN_ROW_SUBSET_H_
