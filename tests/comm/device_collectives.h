// What collectives over memory of CUDA devices do on every backend, for three ranks:
// device_comm_test (through the host) and nccl_device_test (in streams).
#ifndef MOE_TESTS_COMM_DEVICE_COLLECTIVES_H_
#define MOE_TESTS_COMM_DEVICE_COLLECTIVES_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/all_reduce.h"
#include "comm/column_exchange.h"
#include "comm/communicator.h"
#include "comm/row_gather.h"
#include "comm/tree_reduce_scatter.h"
#include "tests/comm/tree_sums.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {

inline constexpr int kDeviceRanks = 3;

inline void ExpectCollectivesFollowEachOther(Communicator& comm, const TestDevice& device) {
  using ::testing::ElementsAre;
  Stream& stream = device.stream();
  const int r = comm.rank();
  const auto sum = device.Copy<int64_t>({r, 10 + r});
  const auto all = device.Copy(std::vector<int64_t>(2 * kDeviceRanks));
  const auto largest = device.Copy<float>({-1});
  const auto parts = device.Copy<float>({1, 2, static_cast<float>(r)});
  EXPECT_OK(comm.AllReduce<int64_t>(sum.span(), ReduceOp::kSum, stream));
  EXPECT_OK(comm.AllGather<int64_t>(sum.span(), all.span(), stream));
  EXPECT_OK(comm.ReduceScatter<float>(parts.span(), largest.span(), ReduceOp::kMax, stream));
  EXPECT_OK(comm.Fence(stream));
  EXPECT_OK(comm.Broadcast<int64_t>(sum.span().first(1), 2, stream));
  EXPECT_THAT(device.Read(all), ElementsAre(3, 33, 3, 33, 3, 33));
  EXPECT_THAT(device.Read(largest), ElementsAre(r == 0 ? 1 : 2));
  EXPECT_THAT(device.Read(sum), ElementsAre(3, 33));
}

inline void ExpectInPlaceAndFromARoot(Communicator& comm, const TestDevice& device) {
  using ::testing::ElementsAre;
  Stream& stream = device.stream();
  const int r = comm.rank();
  const auto all = device.Copy<int32_t>({-1, -1, -1});
  const auto own = all.span().subspan(static_cast<size_t>(r), 1);
  EXPECT_OK(stream.Upload(&r, own.data(), sizeof(int32_t)));
  EXPECT_OK(comm.AllGather<int32_t>(own, all.span(), stream));
  const auto scattered = device.Copy<int32_t>({r, 10 * r, 100 * r});
  const auto mine = scattered.span().subspan(static_cast<size_t>(r), 1);
  EXPECT_OK(comm.ReduceScatter<int32_t>(scattered.span(), mine, ReduceOp::kSum, stream));
  const std::vector<int64_t> counts = {0, 1, 2};  // unequal parts
  const auto ragged = device.Copy<int64_t>({r, 10 * r, 100 * r});
  const auto part = ragged.span().subspan(r == 2 ? 1 : 0, static_cast<size_t>(r));
  EXPECT_OK(comm.ReduceScatterV<int64_t>(ragged.span(), counts, part, ReduceOp::kSum, stream));
  EXPECT_OK(comm.AllGatherV<int64_t>(part, ragged.span(), counts, stream));
  const auto roots = device.Copy<int32_t>({r, r});
  EXPECT_OK(comm.Broadcast<int32_t>(roots.span(), 2, stream));
  EXPECT_THAT(device.Read(all), ElementsAre(0, 1, 2));
  const std::vector<int> sums = {3, 30, 300};
  EXPECT_EQ(device.Read(scattered)[static_cast<size_t>(r)], sums[static_cast<size_t>(r)]);
  EXPECT_THAT(device.Read(ragged), ElementsAre(3, 30, 300));
  EXPECT_THAT(device.Read(roots), ElementsAre(2, 2));
}

// Rank r sends r + 1 elements to each, nothing to rank 1.
inline void ExpectAllToAllVOfUnequalParts(Communicator& comm, const TestDevice& device) {
  const int r = comm.rank();
  std::vector<float> values(static_cast<size_t>(2 * (r + 1)));
  std::iota(values.begin(), values.end(), 10.0f * static_cast<float>(r));
  const auto send = device.Copy(values);
  const auto recv = device.Copy(std::vector<float>(r == 1 ? 0 : 6));
  const std::vector<int64_t> out = {r + 1, 0, r + 1};
  const std::vector<int64_t> in =
      r == 1 ? std::vector<int64_t>{0, 0, 0} : std::vector<int64_t>{1, 2, 3};
  EXPECT_OK(comm.AllToAllV<float>(send.span(), out, recv.span(), in, device.stream()));
  const std::vector<float> expected[kDeviceRanks] = {
      {0, 10, 11, 20, 21, 22}, {}, {1, 12, 13, 23, 24, 25}};
  EXPECT_EQ(device.Read(recv), expected[r]);
  EXPECT_OK(comm.Fence(device.stream()));
}

inline void ExpectSendRecvInOrderAndToItself(Communicator& comm, const TestDevice& device) {
  const int r = comm.rank();
  const int next = (r + 1) % kDeviceRanks, previous = (r + kDeviceRanks - 1) % kDeviceRanks;
  const auto from = device.Copy<int32_t>({10 * r, 10 * r + 1, 10 * r + 2});
  const auto to = device.Copy<int32_t>({-1, -1, -1});
  int32_t *const out = from.span().data(), *const in = to.span().data();
  const SendRecvOp ops[] = {{.peer = next, .send = out, .bytes = 4},
                            {.peer = next, .send = out + 1, .bytes = 4},
                            {.peer = previous, .recv = in, .bytes = 4},
                            {.peer = previous, .recv = in + 1, .bytes = 4},
                            {.peer = r, .send = out + 2, .bytes = 4},
                            {.peer = r, .recv = in + 2, .bytes = 4},
                            {.peer = next, .bytes = 0}};
  EXPECT_OK(comm.SendRecv(ops, device.stream()));
  EXPECT_THAT(device.Read(to),
              ::testing::ElementsAre(10 * previous, 10 * previous + 1, 10 * r + 2));
}

// `other`: the algorithm beside the ring.
inline void ExpectReducersSum(AllReduceAlgorithm other, Communicator& comm,
                              const TestDevice& device) {
  for (const auto algorithm : {AllReduceAlgorithm::kRing, other}) {
    const auto x = device.Copy<float>({1, static_cast<float>(comm.rank()), 3, 4});
    const auto reducer = AllReducer::Create(algorithm, comm).value();
    EXPECT_OK(reducer->Sum(x.span(), device.stream()));
    EXPECT_THAT(device.Read(x), ::testing::ElementsAre(3, 3, 9, 12));
  }
}

// Nodes of three ranks, of which one has two, become rows; one rank has none.
template <typename T>
void ExpectNodesBecomeRows(const TreeCut& cut, Communicator& comm, const TestDevice& device) {
  constexpr int64_t kCols = 6, kOffsets[] = {0, 2, 2, 5};
  const int r = comm.rank();
  const TreeNodes mine = NodesOf(cut, r, kDeviceRanks);
  const auto width = std::ssize(mine) * kCols, own = kOffsets[r + 1] - kOffsets[r];
  std::vector<float> nodes(static_cast<size_t>(kOffsets[kDeviceRanks] * width));
  for (int64_t i = 0; i < std::ssize(nodes); ++i) {
    const TreeNode& node = mine[static_cast<size_t>(i % width / kCols)];
    nodes[i] = NodeSum(cut, node.first, node.last, i / width, i % kCols).value();
  }
  const auto there = device.Copy(nodes);
  const auto out = device.Copy(std::vector<T>(static_cast<size_t>(own * kCols), T(-1.0f)));
  Workspace workspace(device.memory());
  EXPECT_OK(TreeReduceScatter<T>({.cut = cut,
                                  .row_offsets = kOffsets,
                                  .nodes = there.view(kOffsets[kDeviceRanks], width, width),
                                  .out = out.view(own, kCols, kCols)},
                                 comm, workspace, device.stream()));
  std::vector<T> want;
  for (int64_t i = 0; i < own * kCols; ++i) {
    const auto sum = NodeSum(cut, 0, cut.leaves, kOffsets[r] + i / kCols, i % kCols);
    want.push_back(T(sum.value_or(0.0f)));
  }
  EXPECT_EQ(device.Read(out), want) << cut.leaves << " leaves of " << cut.extent;
}

// Rank r has columns 2 r and 2 r + 1 of 5 rows, or rows 0 1, 2, 3 4.
inline void ExpectRowsAndColumnsOfATensorGroup(Communicator& comm, const TestDevice& device) {
  constexpr int64_t kRow[] = {0, 2, 3, 5}, kCol[] = {0, 2, 4, 6};
  const int r = comm.rank();
  Workspace workspace(device.memory());
  std::vector<float> all(30), columns, rows;
  std::iota(all.begin(), all.end(), 0.0f);
  for (int64_t i = 0; i < 30; ++i) {
    if (i % 6 / 2 == r) columns.push_back(all[i]);
    if (i / 6 >= kRow[r] && i / 6 < kRow[r + 1]) rows.push_back(all[i]);
  }
  const auto cols = device.Copy(columns), back = device.Copy(std::vector<float>(10));
  const auto own = device.Copy(std::vector<float>(rows.size()));
  const auto whole = device.Copy(std::vector<float>(30));
  const int64_t count = kRow[r + 1] - kRow[r];
  EXPECT_OK(ColumnsToRows<float>({kRow, kCol, cols.view(5, 2, 2), own.view(count, 6, 6)}, comm,
                                 workspace, device.stream()));
  EXPECT_OK(RowsToColumns<float>({kRow, kCol, back.view(5, 2, 2), own.view(count, 6, 6)}, comm,
                                 workspace, device.stream()));
  EXPECT_EQ(device.Read(own), rows);
  EXPECT_EQ(device.Read(back), columns);
  EXPECT_OK(AllGatherRows<float>(own.view(count, 6, 6), whole.view(5, 6, 6), kRow, comm,
                                 device.stream()));
  EXPECT_EQ(device.Read(whole), all);
}

// What the ranks of a tensor group exchange.
inline void ExpectTensorExchanges(Communicator& comm, const TestDevice& device) {
  for (const int leaves : {4, 8, 16}) {
    for (const int64_t extent : {int64_t{640}, int64_t{48}, int64_t{0}}) {
      ExpectNodesBecomeRows<float>({leaves, extent, 16}, comm, device);
    }
    ExpectNodesBecomeRows<BFloat16>({leaves, 640, 16}, comm, device);
  }
  ExpectRowsAndColumnsOfATensorGroup(comm, device);
}

// All of these, one after the other.
inline void ExpectDeviceCollectives(AllReduceAlgorithm other, Communicator& comm,
                                    const TestDevice& device) {
  ExpectCollectivesFollowEachOther(comm, device);
  ExpectInPlaceAndFromARoot(comm, device);
  ExpectAllToAllVOfUnequalParts(comm, device);
  ExpectSendRecvInOrderAndToItself(comm, device);
  ExpectReducersSum(other, comm, device);
  ExpectTensorExchanges(comm, device);
}

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_DEVICE_COLLECTIVES_H_
