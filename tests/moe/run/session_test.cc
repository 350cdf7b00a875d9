// Session: what ranks must agree on before they run together.
#include "moe/run/session.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

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

// CheckOneTarget of ranks with these targets, on every rank.
std::vector<absl::Status> CheckTargets(const std::vector<const char*>& targets) {
  std::vector<absl::Status> statuses(targets.size());
  testing::RunLocalRanks(
      static_cast<int>(targets.size()), [&](std::unique_ptr<Communicator> world) {
        const int rank = world->rank();
        statuses[rank] = CheckOneTarget(targets[rank], *world, *MakeInlineStream());
        return absl::OkStatus();
      });
  return statuses;
}

TEST(SessionTest, RanksOfOneTargetAgree) {
  for (const char* const target : {"AVX3_AMX", "AVX2", "NEON", "EMU128", "sm_90"}) {
    for (const absl::Status& status : CheckTargets({target, target, target})) {
      EXPECT_TRUE(status.ok()) << target << ": " << status;
    }
  }
}

TEST(SessionTest, RanksMayLackWhatOtherRanksHaveBeyondAVX2) {
  for (const absl::Status& status : CheckTargets({"AVX3", "AVX3_AMX", "AVX2", "AVX3_BF16"})) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(SessionTest, AMixOfTargetsWithOtherBitsIsRefusedOnEveryRankByName) {
  const std::pair<const char*, const char*> mixes[] = {
      {"AVX2", "EMU128"}, {"AVX2", "NEON"}, {"sm_80", "sm_90"}};
  for (const auto& [one, other] : mixes) {
    for (const absl::Status& status : CheckTargets({one, other, one})) {
      EXPECT_THAT(status, StatusIs(kFailedPrecondition, one));
      EXPECT_THAT(status, StatusIs(kFailedPrecondition, other));
    }
  }
}

struct OrderOfRank {
  std::optional<BFloat16Order> given;
  BFloat16Order fastest;
};

// AgreedBFloat16Order of such ranks, on every rank.
std::vector<absl::StatusOr<BFloat16Order>> AgreedOrders(const std::vector<OrderOfRank>& ranks) {
  std::vector<absl::StatusOr<BFloat16Order>> agreed(ranks.size());
  testing::RunLocalRanks(static_cast<int>(ranks.size()), [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    agreed[rank] =
        AgreedBFloat16Order(ranks[rank].given, ranks[rank].fastest, *world, *MakeInlineStream());
    return absl::OkStatus();
  });
  return agreed;
}

TEST(SessionTest, ProductsOfBFloat16AreInTilesWhereTheseAreTheFastestOfEveryRank) {
  using enum BFloat16Order;
  const OrderOfRank tile = {std::nullopt, kTile}, dot = {std::nullopt, kDot};
  for (const auto& order : AgreedOrders({tile, tile, tile})) EXPECT_EQ(order.value(), kTile);
  for (const auto& order : AgreedOrders({tile, tile, dot})) EXPECT_EQ(order.value(), kDot);
  for (const auto& order : AgreedOrders({dot, dot})) EXPECT_EQ(order.value(), kDot);
}

TEST(SessionTest, AGivenOrderOfBFloat16IsTakenWhateverIsFast) {
  for (const auto given : {BFloat16Order::kDot, BFloat16Order::kTile}) {
    for (const auto& order :
         AgreedOrders({{given, BFloat16Order::kTile}, {given, BFloat16Order::kDot}})) {
      EXPECT_EQ(order.value(), given);
    }
    testing::RunSessions(2, {.bfloat16_order = given}, [&](Session& session) {
      EXPECT_EQ(session.context().gemm.bfloat16_order, given);
      return absl::OkStatus();
    });
  }
}

TEST(SessionTest, RanksThatWereGivenDifferentOrdersAreRefusedByName) {
  using enum BFloat16Order;
  for (const auto& order : AgreedOrders({{kTile, kDot}, {std::nullopt, kDot}})) {
    EXPECT_THAT(order.status(), StatusIs(kInvalidArgument, "--bf16-order auto and tile"));
  }
  for (const auto& order : AgreedOrders({{kTile, kDot}, {kDot, kDot}, {kTile, kTile}})) {
    EXPECT_THAT(order.status(), StatusIs(kInvalidArgument, "--bf16-order dot and tile"));
  }
}

TEST(SessionTest, ACudaDeviceHasNoOrderOfBFloat16) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) {
    EXPECT_THAT(
        Session::Create({.device = DeviceKind::kCuda, .bfloat16_order = BFloat16Order::kTile},
                        std::move(world)),
        StatusIs(kInvalidArgument, "--bf16-order tile on a CUDA device, expected auto"));
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
  refused({.mesh = {.expert_tensor = 2, .expert = 2}}, kInvalidArgument,
          "--etp is 2 with --tensor-leaves 1, expected at most as many ranks as leaves");
  refused({.device = DeviceKind::kCuda, .mesh = {.tensor = 2, .expert = 2}, .tensor_leaves = 1},
          kInvalidArgument, "--tp is 2 with --tensor-leaves 1");
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
