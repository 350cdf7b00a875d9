// Session: what ranks must agree on before they run together.
#include "moe/run/session.h"

#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/state/parameter.h"
#include "moe/state/parameter_hash.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

using enum absl::StatusCode;
using testing::StatusIs;

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
    EXPECT_EQ(status.code(), kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(::testing::HasSubstr("AVX2"), ::testing::HasSubstr("AVX3")));
    return absl::OkStatus();
  });
}

TEST(SessionTest, ZeroThreadsAndUnevenGroupsAreRefused) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) {
    EXPECT_EQ(Session::Create({.threads = 0}, std::move(world)).status().code(), kInvalidArgument);
    return absl::OkStatus();
  });
  testing::RunLocalRanks(3, [](std::unique_ptr<Communicator> world) {
    EXPECT_EQ(Session::Create({.mesh = {.expert = 2}}, std::move(world)).status().code(),
              kInvalidArgument);
    return absl::OkStatus();
  });
}

TEST(SessionTest, MeshesThatDoNotFitAreRefusedWithOneThatDoes) {
  const auto refused = [](const SessionOptions& options, absl::StatusCode code, const char* why) {
    EXPECT_THAT(CheckMesh(options, 4), StatusIs(code, why));
  };
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  refused({.mesh = {.expert_tensor = 2, .expert = 2}}, kUnimplemented,
          "a mesh of expert-tensor 2, expert 2");
  refused({.device = DeviceKind::kCuda, .mesh = {.tensor = 2, .expert = 2}, .tensor_leaves = 1},
          kUnimplemented, "--tp is 2 on a CUDA device, expected 1");
  refused({.mesh = {.tensor = 2, .expert = 2}}, kInvalidArgument, "--tensor-leaves 8");
  refused({.mesh = {.tensor = 4, .expert = 2}, .tensor_leaves = 8}, kInvalidArgument,
          "a divisor of --ep 2: 1, 2; or --ep 4");
  refused({.mesh = {.tensor = 3, .expert = 4}, .tensor_leaves = 8}, kInvalidArgument,
          "a divisor of --ep 4: 1, 2, 4");
  refused({.mesh = {.tensor = 3, .expert = 3}, .tensor_leaves = 8}, kInvalidArgument,
          "expected a divisor of 4 ranks");
  EXPECT_TRUE(CheckMesh({.mesh = {.tensor = 4, .expert = 4}, .tensor_leaves = 4}, 4).ok());
}

TEST(SessionTest, LeavesThatNoTreeHasAreRefused) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) {
    EXPECT_THAT(Session::Create({.tensor_leaves = 3}, std::move(world)),
                StatusIs(kInvalidArgument, "expected 1, 2, 4, 8 or 16"));
    return absl::OkStatus();
  });
}

// Ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1; `changed` is another on rank 3 alone.
absl::Status CheckReplicasWith(const std::string& changed, Session& session) {
  const Context& context = session.context();
  const int rank = context.mesh->world().rank();
  ParameterStore store(DType::kFloat32, 7);
  for (const std::string& name : {std::string("norm"), absl::StrCat("experts.", rank % 2)}) {
    MOE_ASSIGN_OR_RETURN(
        Parameter* const parameter,
        store.Add({.name = name,
                   .rows = 3,
                   .holders = name == "norm" ? MeshGroup::kStage : MeshGroup::kExpertData}));
    if (rank == 3 && name == changed) parameter->master()[2] += 1;
  }
  return CheckReplicas(store, context);
}

TEST(SessionTest, ACopyOfAWeightThatDiffersIsNamedOnEveryRank) {
  testing::RunSessions(4, {.mesh = {.expert = 2}}, [](Session& session) -> absl::Status {
    EXPECT_TRUE(CheckReplicasWith("", session).ok());
    for (const auto& [changed, expected] :
         {std::pair("norm", "tensor 'norm' differs between ranks 0 and 3,"),
          {"experts.1", "tensor 'experts.1' differs between ranks 1 and 3,"}}) {
      EXPECT_THAT(CheckReplicasWith(changed, session), StatusIs(kDataLoss, expected));
    }
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
