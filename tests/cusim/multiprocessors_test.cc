// Blocks on the multiprocessors of a simulated device: how many there are at a time, which of the
// waiting ones begin, and what runs beside what.
#include "tests/cusim/multiprocessors.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include "tests/cusim/fake_streams.h"
#include "tests/cusim/intrinsics.h"

namespace {

constexpr size_t kFull =
    200 << 10;  // shared memory of a block that has a multiprocessor for itself

// Blocks of `grid` on one multiprocessor.
int BlocksOnOne(const cusim::Grid& grid) {
  cusim::Multiprocessors one;
  one.Resize(1);
  cusim::GridBlocks blocks = {.needs = cusim::NeedsOf(grid), .waiting = 100};
  one.Begin(blocks);
  return static_cast<int>(blocks.on.size());
}

TEST(Multiprocessors, HoldBlocksByThreadsRegistersAndSharedMemory) {
  EXPECT_EQ(BlocksOnOne({.grid = 1, .block = 32}), 32);   // 64 registers a thread
  EXPECT_EQ(BlocksOnOne({.grid = 1, .block = 1024}), 1);  // all registers
  EXPECT_EQ(BlocksOnOne({.grid = 1, .block = 256}), 4);
  EXPECT_EQ(BlocksOnOne({.grid = 1, .block = 128, .dynamic_shared_bytes = 75 << 10}), 3);
  EXPECT_EQ(BlocksOnOne({.grid = 1, .block = 128, .dynamic_shared_bytes = kFull}), 1);
}

TEST(Multiprocessors, FillOneAfterTheOtherAndAreFreeAgain) {
  cusim::Multiprocessors two;
  two.Resize(2);
  cusim::GridBlocks a = {.needs = {.threads = 1024}, .waiting = 3}, b = a;
  two.Begin(a);
  EXPECT_EQ(a.on, std::vector<size_t>({0, 1, 0}));
  two.Begin(b);
  EXPECT_EQ(b.on, std::vector<size_t>({1}));
  EXPECT_EQ(b.waiting, 2);
  EXPECT_FALSE(two.HasRoom(b.needs));
  two.End(a);
  two.Begin(b);
  EXPECT_EQ(b.waiting, 0);
}

class Room : public ::testing::Test {
 protected:
  cudaStream_t MakeStream(int priority) {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority), cudaSuccess);
    return stream;
  }
  // A kernel that appends `letter` to order_ as it ends.
  void Launch(cudaStream_t stream, char letter, unsigned blocks) {
    const auto body = [this, letter] {
      if (cusim::BlockIndex().x == 0) order_ += letter;
    };
    ASSERT_EQ(
        cusim::LaunchGrid(
            {.grid = dim3(blocks), .block = dim3(1), .dynamic_shared_bytes = kFull, .body = body},
            stream),
        cudaSuccess);
  }
  // All that order_ was under several orders of the streams.
  template <typename Body>
  std::set<std::string> OnSeeds(const Body& body) {
    std::set<std::string> orders;
    for (uint32_t seed = 1; seed <= 40; ++seed) {
      cusim::SeedStreams(seed);
      order_.clear();
      body();
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      orders.insert(order_);
    }
    return orders;
  }

  const cusim::ScopedMachine machine_{{.multiprocessors = 4, .room = true}};
  std::string order_;
};

// Both wait while a grid is under way, half of whose blocks wait, too.
TEST_F(Room, BlocksOfHigherPriorityBeginFirst) {
  cudaStream_t const low = MakeStream(0), other = MakeStream(0), high = MakeStream(-1);
  const auto behind_a_full_device = [&](cudaStream_t second) {
    return OnSeeds([&] {
      Launch(low, 'f', 8);
      cusim::Streams::Get().RunSome();
      Launch(low, 'a', 4);
      Launch(second, 'b', 4);
    });
  };
  EXPECT_EQ(behind_a_full_device(other), std::set<std::string>({"fab", "fba", "bfa"}));
  EXPECT_EQ(behind_a_full_device(high), std::set<std::string>({"bfa"}));
}

TEST_F(Room, ATransferRunsBesideAGridThatLeavesItRoomAlone) {
  cudaStream_t const low = MakeStream(0), high = MakeStream(-1);
  const auto overlaps = [&](unsigned blocks) {
    const int64_t before = cusim::Overlaps();
    OnSeeds([&] {
      Launch(low, 'a', blocks);
      cusim::Streams::Get().RunSome();
      cusim::EnqueueTransfer(high, 2);
    });
    return cusim::Overlaps() - before;
  };
  EXPECT_GT(overlaps(2), 0);
  EXPECT_EQ(overlaps(3), 0);
  EXPECT_EQ(overlaps(4), 0);
}

}  // namespace
