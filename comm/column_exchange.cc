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

// `rows`, and memory for the columns of each rank as a block of its own, one behind the other.
template <typename T>
struct ColumnBlocks {
  MatrixView<T> rows, blocks;
  absl::Span<int64_t> col;
};

template <typename T>
absl::StatusOr<ColumnBlocks<T>> BlocksOf(MatrixView<T> rows, absl::Span<const int64_t> col,
                                         Workspace& workspace) {
  ColumnBlocks<T> of = {.rows = rows};
  MOE_ASSIGN_OR_RETURN(of.blocks, workspace.Matrix<T>(rows.rows(), rows.cols()));
  MOE_ASSIGN_OR_RETURN(of.col, workspace.Array<int64_t>(std::ssize(col)));
  std::copy(col.begin(), col.end(), of.col.begin());
  return of;
}

// Enqueues the copy of all blocks from the rows, or of the rows from all blocks.
enum class BlockWay : bool { kFromRows, kToRows };
template <typename T>
absl::Status CopyBlocks(const ColumnBlocks<T>& of, BlockWay way, Stream& stream) {
  return stream.Enqueue([of, to_rows = way == BlockWay::kToRows] {
    T* block = of.blocks.data();
    for (size_t r = 0; r + 1 < of.col.size(); ++r) {
      const int64_t cols = of.col[r + 1] - of.col[r];
      for (int64_t t = 0; t < of.rows.rows(); ++t, block += cols) {
        T* const row = of.rows.row(t) + of.col[r];
        std::copy_n(to_rows ? block : row, cols, to_rows ? row : block);
      }
    }
    return absl::OkStatus();
  });
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
  MOE_ASSIGN_OR_RETURN(const auto of, BlocksOf(cut.rows, cut.col, workspace));
  MOE_RETURN_IF_ERROR(comm.AllToAllV<T>(AllOf(cut.columns), counts.of_columns, AllOf(of.blocks),
                                        counts.of_rows, stream, site));
  return CopyBlocks(of, BlockWay::kToRows, stream);
}

template <typename T>
absl::Status RowsToColumns(const ColumnCut<T>& cut, Communicator& comm, Workspace& workspace,
                           Stream& stream, const Site& site) {
  MOE_ASSIGN_OR_RETURN(const ColumnCounts counts, CountsOf("RowsToColumns", cut, comm, stream));
  MOE_ASSIGN_OR_RETURN(const auto of, BlocksOf(cut.rows, cut.col, workspace));
  MOE_RETURN_IF_ERROR(CopyBlocks(of, BlockWay::kFromRows, stream));
  return comm.AllToAllV<T>(AllOf(of.blocks), counts.of_rows, AllOf(cut.columns), counts.of_columns,
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
  MOE_ASSIGN_OR_RETURN(const auto of, BlocksOf(whole, col, workspace));
  const MatrixView<T> mine(of.blocks.data() + rows * col[rank], rows, own);
  RankCounts counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(rows * (col[r + 1] - col[r]));
  MOE_RETURN_IF_ERROR(stream.Enqueue([columns, mine] {
    for (int64_t t = 0; t < mine.rows(); ++t) std::copy_n(columns.row(t), mine.cols(), mine.row(t));
    return absl::OkStatus();
  }));
  MOE_RETURN_IF_ERROR(comm.AllGatherV<T>(AllOf(mine), AllOf(of.blocks), counts, stream, site));
  return CopyBlocks(of, BlockWay::kToRows, stream);
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
