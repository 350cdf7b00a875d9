#include "comm/column_exchange.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "kernels/base/dtype.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Elements that this rank moves between its rows and the columns of each rank.
struct ColumnCounts {
  RankCounts of_columns;  // of `columns`, to or from the rows of each rank
  RankCounts of_rows;     // of `rows`, from or to the columns of each rank
};

template <typename T>
absl::StatusOr<ColumnCounts> CountsOf(const char* function, const ColumnCut<T>& cut,
                                      const Communicator& comm, const Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCpu(function, stream));
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

// The columns of rank r in `rows`, and as a block of their own, after those of the ranks before.
template <typename T, typename Move>
void ForEachBlock(MatrixView<T> rows, absl::Span<const int64_t> col, T* blocks, Move move) {
  for (size_t r = 0; r + 1 < col.size(); ++r) {
    const int64_t cols = col[r + 1] - col[r];
    for (int64_t t = 0; t < rows.rows(); ++t, blocks += cols) {
      move(rows.row(t) + col[r], blocks, cols);
    }
  }
}

template <typename T>
absl::Span<T> AllOf(MatrixView<T> dense) {
  return {dense.data(), static_cast<size_t>(dense.rows() * dense.cols())};
}

}  // namespace

template <typename T>
absl::Status ColumnsToRows(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site) {
  MOE_ASSIGN_OR_RETURN(const ColumnCounts counts, CountsOf("ColumnsToRows", cut, comm, stream));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Matrix<T>(cut.rows.rows(), cut.rows.cols()));
  MOE_ASSIGN_OR_RETURN(const auto col, workspace.Array<int64_t>(std::ssize(cut.col)));
  std::copy(cut.col.begin(), cut.col.end(), col.begin());
  MOE_RETURN_IF_ERROR(comm.AllToAllV<T>(AllOf(cut.columns), counts.of_columns, AllOf(blocks),
                                        counts.of_rows, stream, site));
  return stream.Enqueue([rows = cut.rows, col, blocks] {
    ForEachBlock(rows, col, blocks.data(),
                 [](T* row, const T* block, int64_t cols) { std::copy_n(block, cols, row); });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status RowsToColumns(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site) {
  MOE_ASSIGN_OR_RETURN(const ColumnCounts counts, CountsOf("RowsToColumns", cut, comm, stream));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Matrix<T>(cut.rows.rows(), cut.rows.cols()));
  MOE_ASSIGN_OR_RETURN(const auto col, workspace.Array<int64_t>(std::ssize(cut.col)));
  std::copy(cut.col.begin(), cut.col.end(), col.begin());
  MOE_RETURN_IF_ERROR(stream.Enqueue([rows = cut.rows, col, blocks] {
    ForEachBlock(rows, col, blocks.data(),
                 [](const T* row, T* block, int64_t cols) { std::copy_n(row, cols, block); });
    return absl::OkStatus();
  }));
  return comm.AllToAllV<T>(AllOf(blocks), counts.of_rows, AllOf(cut.columns), counts.of_columns,
                           stream, site);
}

template <typename T>
absl::Status AllGatherColumns(MatrixView<const T> columns, absl::Span<const int64_t> col,
                              MatrixView<T> whole, Communicator& comm, Workspace& workspace,
                              Stream& stream, const Site& site) {
  const int ranks = comm.size(), rank = comm.rank();
  const int64_t rows = whole.rows();
  MOE_RETURN_IF_ERROR(CheckCpu("AllGatherColumns", stream));
  MOE_RETURN_IF_ERROR(CheckGroups("AllGatherColumns", "ranks", col, ranks, whole.cols()));
  const int64_t own = col[rank + 1] - col[rank];
  MOE_RETURN_IF_ERROR(CheckShape("AllGatherColumns", "columns", columns, rows, own));
  MOE_ASSIGN_OR_RETURN(const auto blocks, workspace.Matrix<T>(rows, whole.cols()));
  MOE_ASSIGN_OR_RETURN(const auto kept_col, workspace.Array<int64_t>(std::ssize(col)));
  std::copy(col.begin(), col.end(), kept_col.begin());
  const MatrixView<T> mine(blocks.data() + rows * col[rank], rows, own);
  RankCounts counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(rows * (col[r + 1] - col[r]));
  MOE_RETURN_IF_ERROR(stream.Enqueue([columns, mine] {
    for (int64_t t = 0; t < mine.rows(); ++t) std::copy_n(columns.row(t), mine.cols(), mine.row(t));
    return absl::OkStatus();
  }));
  MOE_RETURN_IF_ERROR(comm.AllGatherV<T>(AllOf(mine), AllOf(blocks), counts, stream, site));
  return stream.Enqueue([whole, kept_col, blocks] {
    ForEachBlock(whole, kept_col, blocks.data(),
                 [](T* row, const T* block, int64_t cols) { std::copy_n(block, cols, row); });
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                                     \
  template absl::Status ColumnsToRows(const ColumnCut<T>&, Communicator&, Workspace&, Stream&, \
                                      const Site&);                                            \
  template absl::Status RowsToColumns(const ColumnCut<T>&, Communicator&, Workspace&, Stream&, \
                                      const Site&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
MOE_INSTANTIATE_FOR_STORAGE(AllGatherColumns)
#undef MOE_INSTANTIATE

}  // namespace moe
