// Session: what ranks must agree on before they run together.
#include "moe/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/local_ranks.h"

namespace moe {
namespace {

TEST(SessionTest, RanksOfOneSimdTargetAgree) {
  testing::RunLocalRanks(3, [](std::unique_ptr<Communicator> world) {
    return CheckOneTarget("AVX3", *world, *MakeInlineStream());
  });
}

TEST(SessionTest, AMixOfSimdTargetsIsRefusedOnEveryRankByName) {
  testing::RunLocalRanks(3, [](std::unique_ptr<Communicator> world) {
    const auto stream = MakeInlineStream();
    const absl::Status status =
        CheckOneTarget(world->rank() == 1 ? "AVX2" : "AVX3", *world, *stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(::testing::HasSubstr("AVX2"), ::testing::HasSubstr("AVX3")));
    return absl::OkStatus();
  });
}

TEST(SessionTest, ZeroThreadsAndUnevenGroupsAreRefused) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) {
    EXPECT_EQ(Session::Create({.threads = 0}, std::move(world)).status().code(),
              absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  });
  testing::RunLocalRanks(3, [](std::unique_ptr<Communicator> world) {
    EXPECT_EQ(Session::Create({.expert_parallel_size = 2}, std::move(world)).status().code(),
              absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
