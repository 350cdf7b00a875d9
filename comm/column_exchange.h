// Rows of which each rank of a group holds some columns become whole rows on some rank, and back.
#ifndef MOE_COMM_COLUMN_EXCHANGE_H_
#define MOE_COMM_COLUMN_EXCHANGE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

// Of a matrix [N, C] rank r of R holds columns [col[r], col[r + 1]) of all rows, `columns`, or rows
// [row[r], row[r + 1]), `rows`. Both [R + 1], from 0 on, host memory, the same on all ranks.
template <typename T>
struct ColumnCut {
  absl::Span<const int64_t> row, col;
  MatrixView<T> columns;  // [N, own columns], dense
  MatrixView<T> rows;     // [own rows, C]
};

// Writes `rows` from the `columns` of all ranks, and the reverse. Collective, enqueued; a rank
// sends what it holds less what stays: with even cuts (R - 1) / R^2 of N C sizeof(T) bytes.
// Scratch, as large as `rows`, is memory of `workspace`, which the caller releases once the stream
// has passed. All but the offsets is memory of stream.device(). T: float, BFloat16, Float16.
// Errors: kInvalidArgument if shapes disagree; those of AllToAllV.
template <typename T>
absl::Status ColumnsToRows(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site = {});
template <typename T>
absl::Status RowsToColumns(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site = {});

}  // namespace moe

#endif  // MOE_COMM_COLUMN_EXCHANGE_H_
