#include "comm/column_exchange.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/device_arrays.h"
#include "kernels/base/dtype.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

// Elements that this rank moves between its rows and the columns of each rank.
struct ColumnCounts {
  RankCounts of_columns;  // of `columns`, to or from the rows of each rank
  RankCounts of_rows;     // of `rows`, from or to the columns of each rank
};

template <typename T>
absl::StatusOr<ColumnCounts> CountsOf(const char* function, const ColumnCut<T>& cut,
                                      const Communicator& comm) {
  const int ranks = comm.size(), rank = comm.rank();
  for (const auto& offsets : {cut.row, cut.col}) {
    MOE_RETURN_IF_ERROR(
        CheckGroups(function, "ranks", offsets, ranks, offsets.empty() ? 0 : offsets.back()));
  }
  const int64_t rows = cut.row[rank + 1] - cut.row[rank];
  const int64_t cols = cut.col[rank + 1] - cut.col[rank];
  MOE_RETURN_IF_ERROR(CheckShape(function, "columns", cut.columns, cut.row.back(), cols));
  MOE_RETURN_IF_ERROR(CheckShape(function, "rows", cut.rows, rows, cut.col.back()));
  if (cut.columns.stride() != cols) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": columns with stride ",
                                                   cut.columns.stride(), ", expected ", cols));
  }
  ColumnCounts counts;
  for (int r = 0; r < ranks; ++r) {
    counts.of_columns.push_back((cut.row[r + 1] - cut.row[r]) * cols);
    counts.of_rows.push_back(rows * (cut.col[r + 1] - cut.col[r]));
  }
  return counts;
}

// Enqueues the copy of `rows` to or from `blocks`, of as many elements, which has the columns of
// each rank as a block of its own, one behind the other.
enum class BlockWay : bool { kFromRows, kToRows };
template <typename T>
absl::Status CopyBlocks(MatrixView<T> rows, absl::Span<const int64_t> col, MatrixView<T> blocks,
                        BlockWay way, Stream& stream) {
  for (size_t r = 0; r + 1 < col.size(); ++r) {
    const MatrixView<T> columns = ColumnRange(rows, col[r], col[r + 1]);
    const MatrixView<T> block(blocks.data() + rows.rows() * col[r], rows.rows(), columns.cols());
    const bool to_rows = way == BlockWay::kToRows;
    MOE_RETURN_IF_ERROR(CopyRows<T>(to_rows ? block : columns, to_rows ? columns : block, stream));
  }
  return absl::OkStatus();
}

}  // namespace

template <typename T>
absl::Status ColumnsToRows(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site) {
  MOE_ASSIGN_OR_RETURN(const ColumnCounts counts, CountsOf("ColumnsToRows", cut, comm));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Matrix<T>(cut.rows.rows(), cut.rows.cols()));
  MOE_RETURN_IF_ERROR(comm.AllToAllV<T>(AllOf(cut.columns), counts.of_columns, AllOf(blocks),
                                        counts.of_rows, stream, site));
  return CopyBlocks(cut.rows, cut.col, blocks, BlockWay::kToRows, stream);
}

template <typename T>
absl::Status RowsToColumns(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site) {
  MOE_ASSIGN_OR_RETURN(const ColumnCounts counts, CountsOf("RowsToColumns", cut, comm));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Matrix<T>(cut.rows.rows(), cut.rows.cols()));
  MOE_RETURN_IF_ERROR(CopyBlocks(cut.rows, cut.col, blocks, BlockWay::kFromRows, stream));
  return comm.AllToAllV<T>(AllOf(blocks), counts.of_rows, AllOf(cut.columns), counts.of_columns,
                           stream, site);
}

#define MOE_INSTANTIATE(T)                                                                     \
  template absl::Status ColumnsToRows(const ColumnCut<T>&, Communicator&, Workspace&, Stream&, \
                                      const Site&);                                            \
  template absl::Status RowsToColumns(const ColumnCut<T>&, Communicator&, Workspace&, Stream&, \
                                      const Site&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
