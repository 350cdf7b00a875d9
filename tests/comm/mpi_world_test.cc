// Worlds of communicators that the program has made, under MPI that the program has started.
#include "comm/mpi/mpi_world.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mpi.h>

#include "tests/comm/comm_env.h"

namespace moe::testing {
namespace {

std::unique_ptr<Communicator> WorldOf(MPI_Comm comm) {
  auto world = MakeMpiWorld({.comm = MPI_Comm_c2f(comm), .timeout = kPatience});
  EXPECT_TRUE(world.ok()) << world.status();
  return *std::move(world);
}

int RankIn(MPI_Comm comm) {
  int rank = -1;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

// Copies of an attribute, which come and go with duplicates of the communicator that has it.
int copies = 0;
int CountCopy(MPI_Comm, int, void*, void* from, void* to, int* copied) {
  ++copies;
  *static_cast<void**>(to) = from;
  *copied = 1;
  return MPI_SUCCESS;
}
int CountDelete(MPI_Comm, int, void*, void*) {
  --copies;
  return MPI_SUCCESS;
}

TEST(MpiWorldTest, FreesItsDuplicatesOfTheProgramsCommunicator) {
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(CountCopy, CountDelete, &key, nullptr);
  MPI_Comm_set_attr(own, key, &copies);
  auto world = WorldOf(own);
  EXPECT_GT(copies, 0);
  auto part = world->Split(0, 0).value();
  world.reset();
  part.reset();
  EXPECT_EQ(copies, 0);
  MPI_Comm_delete_attr(own, key);
  MPI_Comm_free_keyval(&key);
  copies = 0;
  MPI_Comm_free(&own);
}

// On each rank a world of all and one of a half, whose ranks are numbered backwards.
TEST(MpiWorldTest, WorldsOfAllAndOfPartsWorkAtOnceAndDieAlone) {
  const int rank = RankIn(MPI_COMM_WORLD);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  const auto all = WorldOf(MPI_COMM_WORLD), part = WorldOf(half);
  EXPECT_EQ(part->rank(), RankIn(half));
  const auto sum = [&](Communicator& world, int64_t value) -> int64_t {
    const auto stream = MakeInlineStream();
    const absl::Status status = world.AllReduce<int64_t>({&value, 1}, ReduceOp::kSum, *stream);
    return status.ok() ? value : -1;
  };
  int64_t of_half = 0;
  for (int r = rank % 2; r < all->size(); r += 2) of_half += r;
  std::thread other([&] {
    for (int i = 0; i < 100; ++i) EXPECT_EQ(sum(*part, rank), of_half);
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sum(*all, 1), all->size());
  other.join();
  if (rank % 2 == 0) part->Abort(absl::AbortedError("enough"));
  EXPECT_EQ(sum(*part, rank), rank % 2 == 0 ? -1 : of_half);
  EXPECT_EQ(sum(*all, 1), all->size());
  MPI_Comm_free(&half);
}

TEST(MpiWorldTest, RefusesTheCommunicatorOfOtherRanks) {
  const auto world = MakeMpiWorld({.comm = MPI_Comm_c2f(MPI_COMM_NULL)});
  EXPECT_EQ(world.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(world.status().message()), ::testing::HasSubstr("MPI_COMM_NULL"));
}

}  // namespace
}  // namespace moe::testing
