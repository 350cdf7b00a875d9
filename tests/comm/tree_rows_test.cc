// Exchanges of a tensor group: nodes of a tree to the owners of rows, and rows to all. Linked once
// per backend.
#include <algorithm>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "comm/column_exchange.h"
#include "comm/row_gather.h"
#include "comm/tree_reduce_scatter.h"
#include "tests/comm/comm_env.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/tree_sums.h"

namespace moe {
namespace {

using testing::kSanitized;
using testing::NodeSum;

class TreeRowsTest : public testing::CommTest {};

// Counts what a rank sends to others.
class CountingCommunicator final : public testing::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  int64_t sent() const { return sent_; }

 private:
  absl::Status Before(int64_t bytes, Stream& /*stream*/, const Site& /*site*/) override {
    sent_ += bytes;
    return absl::OkStatus();
  }
  int64_t sent_ = 0;
};

struct TreeCase {
  TreeCut cut;
  std::vector<int64_t> offsets;  // [R + 1]
  int64_t cols;
};

template <typename T>
void CheckScatter(const TreeCase& given, Communicator& comm, Stream& stream) {
  const int rank = comm.rank();
  const TreeCut& cut = given.cut;
  const int64_t rows = given.offsets.back(), cols = given.cols;
  const auto mine = NodesOf(cut, rank, comm.size());
  const auto width = static_cast<int64_t>(mine.size()) * cols;
  std::vector<float> nodes(static_cast<size_t>(rows * width));
  for (int64_t i = 0; i < std::ssize(nodes); ++i) {
    const TreeNode& node = mine[i % width / cols];
    nodes[i] = *NodeSum(cut, node.first, node.last, i / width, i % cols);
  }
  const int64_t first = given.offsets[rank], own = given.offsets[rank + 1] - first;
  std::vector<T> out(static_cast<size_t>(own * cols), T(-1.0f));
  Workspace workspace;
  CountingCommunicator counting(comm);
  testing::ExpectDone(TreeReduceScatter<T>({.cut = cut,
                                            .row_offsets = given.offsets,
                                            .nodes = {nodes.data(), rows, width},
                                            .out = {out.data(), own, cols}},
                                           counting, workspace, stream),
                      stream);
  EXPECT_EQ(counting.sent(), 4 * width * (rows - own));
  for (int64_t i = 0; i < std::ssize(out); ++i) {
    const float want = NodeSum(cut, 0, cut.leaves, first + i / cols, i % cols).value_or(0.0f);
    ASSERT_EQ(static_cast<float>(out[i]), static_cast<float>(static_cast<T>(want)))
        << comm.size() << " ranks, " << cut.leaves << " leaves of " << cut.extent << ", element "
        << i;
  }
}

TEST_P(TreeRowsTest, NodesBecomeTheRowsOfOneRanksSum) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    std::vector<int64_t> uneven = {0};
    for (int r = 0; r < ranks; ++r) uneven.push_back(uneven.back() + (r % 3 == 1 ? 0 : 2 * r + 1));
    const std::vector<int64_t> none(ranks + 1, 0);
    std::vector<int64_t> even_rows;
    for (int r = 0; r <= ranks; ++r) even_rows.push_back(11 * r / ranks);
    for (int leaves = 1; leaves <= kMaxTreeLeaves; leaves *= 2) {
      // 40 items; 3 items, so that leaves are empty; no item.
      for (const int64_t extent : {int64_t{640}, int64_t{48}, int64_t{0}}) {
        const TreeCut cut = {leaves, extent, 16};
        CheckScatter<float>({cut, uneven, 70}, comm, stream);
        CheckScatter<BFloat16>({cut, even_rows, 3}, comm, stream);
        CheckScatter<Float16>({cut, even_rows, 1}, comm, stream);
        CheckScatter<float>({cut, none, 5}, comm, stream);
      }
    }
  });
}

TEST_P(TreeRowsTest, RowsOfAllRanksComeToEach) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size(), rank = comm.rank();
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{13}, int64_t{4000}}) {
      RankCounts offsets;
      for (int r = 0; r <= ranks; ++r) offsets.push_back(rows * r / ranks);
      constexpr int64_t kCols = 3;
      std::vector<int32_t> x(static_cast<size_t>(rows * kCols), -1), want = x;
      for (int r = 0; r < ranks; ++r) {
        for (int64_t i = offsets[r] * kCols; i < offsets[r + 1] * kCols; ++i) {
          want[i] = testing::Tagged(r, 0, i);
          if (r == rank) x[i] = want[i];
        }
      }
      const MatrixView<int32_t> all(x.data(), rows, kCols);
      const auto own = RowsOfRank(all, offsets, rank);
      std::vector<int32_t> apart(own.data(), own.data() + own.rows() * kCols);
      // Own rows in their place, then from memory of their own.
      for (const MatrixView<int32_t> from :
           {own, MatrixView<int32_t>(apart.data(), own.rows(), kCols)}) {
        CountingCommunicator counting(comm);
        testing::ExpectDone(AllGatherRows<int32_t>(from, all, offsets, counting, stream), stream);
        EXPECT_EQ(x, want);
        EXPECT_EQ(counting.sent(), 4 * kCols * (offsets[rank + 1] - offsets[rank]) * (ranks - 1));
        std::fill(x.begin(), x.end(), -1);
      }
    }
  });
}

template <typename T>
void CheckColumns(const std::vector<int64_t>& row, const std::vector<int64_t>& col,
                  Communicator& comm, Stream& stream) {
  const int rank = comm.rank();
  const int64_t own_rows = row[rank + 1] - row[rank], own_cols = col[rank + 1] - col[rank];
  const auto at = [&](int64_t r, int64_t c) {
    return T(static_cast<float>(r * 32 + c));
  };
  std::vector<T> columns(static_cast<size_t>(row.back() * own_cols)),
      back = columns, rows(static_cast<size_t>(own_rows * col.back()));
  for (int64_t i = 0; i < std::ssize(columns); ++i) {
    columns[i] = at(i / own_cols, col[rank] + i % own_cols);
  }
  const auto view = [](std::vector<T>& memory, int64_t count, int64_t width) {
    return MatrixView<T>(memory.data(), count, width);
  };
  Workspace workspace;
  CountingCommunicator counting(comm);
  testing::ExpectDone(ColumnsToRows<T>({row, col, view(columns, row.back(), own_cols),
                                        view(rows, own_rows, col.back())},
                                       counting, workspace, stream),
                      stream);
  EXPECT_EQ(counting.sent(), static_cast<int64_t>(sizeof(T)) * (row.back() - own_rows) * own_cols);
  for (int64_t i = 0; i < std::ssize(rows); ++i) {
    ASSERT_EQ(static_cast<float>(rows[i]),
              static_cast<float>(at(row[rank] + i / col.back(), i % col.back())));
  }
  testing::ExpectDone(RowsToColumns<T>({row, col, view(back, row.back(), own_cols),
                                        view(rows, own_rows, col.back())},
                                       counting, workspace, stream),
                      stream);
  for (size_t i = 0; i < back.size(); ++i) {
    ASSERT_EQ(static_cast<float>(back[i]), static_cast<float>(columns[i])) << i;
  }
}

TEST_P(TreeRowsTest, ColumnsBecomeRowsAndColumnsAgain) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    std::vector<int64_t> row = {0}, col = {0};
    for (int r = 0; r < comm.size(); ++r) {
      row.push_back(row.back() + (r % 3 == 1 ? 0 : r + 1));
      col.push_back(col.back() + (r % 4 == 2 ? 0 : 3));
    }
    CheckColumns<float>(row, col, comm, stream);
    CheckColumns<BFloat16>(col, row, comm, stream);
    CheckColumns<Float16>(std::vector<int64_t>(row.size(), 0), col, comm, stream);
  });
}

TEST_P(TreeRowsTest, WhatDoesNotFitIsRefusedOnEachRankAlone) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    Workspace workspace;
    std::vector<float> memory(64);
    const std::vector<int64_t> offsets(ranks + 1, 0), few(ranks, 0);
    const auto scatter = [&](absl::Span<const int64_t> rows, int64_t node_rows) {
      return TreeReduceScatter<float>({.cut = {1, 16, 16},
                                       .row_offsets = rows,
                                       .nodes = {memory.data(), node_rows, 1},
                                       .out = {memory.data(), 0, 1}},
                                      comm, workspace, stream)
          .code();
    };
    EXPECT_EQ(scatter(few, 0), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(scatter(offsets, 1), absl::StatusCode::kInvalidArgument);
    const auto gather = [&](MatrixView<float> own, MatrixView<float> all,
                            absl::Span<const int64_t> rows) {
      return AllGatherRows<float>(own, all, rows, comm, stream).code();
    };
    const MatrixView<float> none(memory.data(), 0, 1);
    EXPECT_EQ(gather(none, {memory.data(), 2, 1}, offsets), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(gather({memory.data(), 2, 1}, none, offsets), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(gather(none, {memory.data(), 0, 1, 2}, few), absl::StatusCode::kInvalidArgument);
    testing::ExpectDone(comm.Barrier(), stream);  // nobody waits for anybody
  });
}

INSTANTIATE_TEST_SUITE_P(
    TensorGroups, TreeRowsTest,
    ::testing::Combine(::testing::ValuesIn(kSanitized ? std::vector<int>{1, 3, 4}
                                                      : std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}),
                       ::testing::Values(testing::EnvStream::kInline, testing::EnvStream::kQueue)),
    testing::CommTestName);

}  // namespace
}  // namespace moe
