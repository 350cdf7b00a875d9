// comm/mesh.h on threads.
#include "comm/mesh.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

using ::testing::ElementsAreArray;

// Runs body(mesh or error) on every rank of a new world.
void OnMesh(int ranks, int expert_parallel_size,
            const std::function<void(absl::StatusOr<std::unique_ptr<Mesh>>, Stream&)>& body) {
  testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) {
    const auto stream = MakeInlineStream();
    body(Mesh::Create(std::move(world), expert_parallel_size), *stream);
    return absl::OkStatus();
  });
}

std::vector<int32_t> Members(Communicator& group, int world_rank, Stream& stream) {
  const int32_t mine = world_rank;
  std::vector<int32_t> members(group.size(), -1);
  EXPECT_TRUE(group.AllGather<int32_t>({&mine, 1}, absl::MakeSpan(members), stream).ok());
  return members;
}

TEST(MeshTest, SixRanksAsThreeByTwo) {
  OnMesh(6, 2, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream& stream) {
    Mesh& mesh = **made;
    const int rank = mesh.world().rank();
    EXPECT_EQ(mesh.expert_parallel_size(), 2);
    EXPECT_EQ(mesh.expert_data_parallel_size(), 3);
    const int first = rank / 2 * 2;
    EXPECT_THAT(Members(mesh.expert_parallel(), rank, stream),
                ElementsAreArray({first, first + 1}));
    const int lane = rank % 2;
    const std::vector<int32_t> same_experts = {lane, lane + 2, lane + 4};
    EXPECT_EQ(Members(mesh.expert_data_parallel(), rank, stream), same_experts);
    EXPECT_EQ(Members(mesh.expert_gradients(), rank, stream), same_experts);
    EXPECT_THAT(Members(mesh.world_gradients(), rank, stream),
                ElementsAreArray({0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(mesh.world_gradients().rank(), rank);
  });
}

TEST(MeshTest, EverySizeThatDividesIsAccepted) {
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    for (int ep = 0; ep <= ranks; ++ep) {
      OnMesh(ranks, ep, [&](absl::StatusOr<std::unique_ptr<Mesh>> mesh, Stream&) {
        if (ep == 0 || ranks % ep != 0) {
          EXPECT_EQ(mesh.status().code(), absl::StatusCode::kInvalidArgument);
          return;
        }
        ASSERT_TRUE(mesh.ok()) << mesh.status();
        EXPECT_EQ((*mesh)->expert_parallel_size(), ep);
        EXPECT_EQ((*mesh)->expert_parallel().rank(), (*mesh)->world().rank() % ep);
        EXPECT_EQ((*mesh)->expert_data_parallel().rank(), (*mesh)->world().rank() / ep);
      });
    }
  }
}

TEST(MeshTest, GradientGroupsOverlapTokenExchange) {
  OnMesh(4, 2, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream& stream) {
    Mesh& mesh = **made;
    const auto second = MakeStream({}).value();
    std::vector<int64_t> dense(100, 1), expert(100, 1), tokens(100, 1);
    ASSERT_TRUE(
        mesh.world_gradients().AllReduce(absl::MakeSpan(dense), ReduceOp::kSum, *second).ok());
    ASSERT_TRUE(
        mesh.expert_gradients().AllReduce(absl::MakeSpan(expert), ReduceOp::kSum, *second).ok());
    ASSERT_TRUE(
        mesh.expert_parallel().AllReduce(absl::MakeSpan(tokens), ReduceOp::kSum, stream).ok());
    ASSERT_TRUE(second->Synchronize().ok());
    EXPECT_THAT(dense, ::testing::Each(4));
    EXPECT_THAT(expert, ::testing::Each(2));
    EXPECT_THAT(tokens, ::testing::Each(2));
  });
}

TEST(MeshTest, AbortAndSetPhaseReachEveryGroup) {
  OnMesh(4, 2, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream&) {
    Mesh& mesh = **made;
    mesh.SetPhase({.name = "backward", .layer = 1, .step = 9});
    for (Communicator* comm : {&mesh.world(), &mesh.expert_parallel(), &mesh.expert_data_parallel(),
                               &mesh.world_gradients(), &mesh.expert_gradients()}) {
      EXPECT_STREQ(comm->phase().name, "backward");
      EXPECT_EQ(comm->phase().step, 9);
    }
    if (mesh.world().rank() == 3) mesh.Abort(absl::InternalError("stop"));
    EXPECT_EQ(mesh.world_gradients().Barrier().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(mesh.expert_parallel().Barrier().code(), absl::StatusCode::kAborted);
  });
}

}  // namespace
}  // namespace moe
