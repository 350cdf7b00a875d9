// DispatchPlan::BuildOnDevice against Build: the same plan, its rows ordered by a CUDA device.
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/dispatch_plan.h"
#include "dispatch/dispatcher.h"
#include "tests/comm/local_ranks.h"
#include "tests/dispatch/dispatch_world.h"
#include "tests/kernels/device_memory.h"
#include "tests/moe/status_is.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Message;
using enum absl::StatusCode;

class DevicePlanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = std::move(TestDevices().back());
    if (!IsCuda(stream())) GTEST_SKIP() << "no CUDA device";
    workspace_ = std::make_unique<Workspace>(device_->memory());
    comm_ = std::move(MakeLocalWorld({.ranks = 1})[0]);
  }

  void TearDown() override { EXPECT_TRUE(stream().Synchronize().ok()); }

  Stream& stream() { return device_->stream(); }

  static absl::StatusOr<DispatchPlan> BuildOnHost(const World& world, Workspace& workspace) {
    std::optional<absl::StatusOr<DispatchPlan>> plan;
    RunLocalRanks(1, [&](std::unique_ptr<Communicator> comm) {
      plan = DispatchPlan::Build({.routing = world.view(0),
                                  .micro_batch_offsets = world.routing[0].micro_batch_offsets,
                                  .placement = {world.experts, 1},
                                  .comm = *comm},
                                 workspace, *MakeInlineStream());
      return absl::OkStatus();
    });
    return *plan;
  }

  absl::StatusOr<DispatchPlan> BuildOnDevice(const World& world, Workspace& host) {
    MOE_ASSIGN_OR_RETURN(const Routing routing, world.OnDevice(0, *workspace_, stream()));
    return DispatchPlan::BuildOnDevice({.routing = routing,
                                        .micro_batch_offsets = world.routing[0].micro_batch_offsets,
                                        .placement = {world.experts, 1},
                                        .comm = *comm_},
                                       host, *workspace_, stream());
  }

  template <typename T>
  std::vector<T> Read(absl::Span<const T> array) {
    return ReadArray(array, stream());
  }

  std::unique_ptr<TestDevice> device_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Communicator> comm_;
};

// `rows` of the host's plan, and empty places up to the rows that the device has room for.
std::vector<int32_t> WithPlaces(absl::Span<const int32_t> rows, int64_t most) {
  std::vector<int32_t> all(rows.begin(), rows.end());
  all.resize(most, -1);
  return all;
}

TEST_F(DevicePlanTest, IsThePlanOfTheHostWithARowForEverySlot) {
  const auto cases = WorldCases(/*max_ranks=*/1);
  for (const WorldCase& c : cases.at(1)) {
    SCOPED_TRACE(Message() << c);
    const WorkspaceScope scope(*workspace_);
    const World world = MakeWorld(c);
    Workspace workspace;
    const DispatchPlan want = BuildOnHost(world, workspace).value();
    const DispatchPlan got = BuildOnDevice(world, workspace).value();
    const int64_t rows = got.expert_rows();
    EXPECT_EQ(rows, c.padded ? want.expert_rows() : want.slots());
    EXPECT_EQ(Read(got.home_row_of_slot()), WithPlaces(want.home_row_of_slot(), want.slots()));
    EXPECT_EQ(Read(got.home_slot()), WithPlaces(want.home_slot(), rows));
    EXPECT_EQ(Read(got.expert_token(0)), WithPlaces(want.expert_token(0), rows));
    std::vector<int32_t> own(rows);
    std::iota(own.begin(), own.end(), 0);
    EXPECT_EQ(Read(got.return_order(0)), own);
    EXPECT_EQ(got.chunks(), 1);
    EXPECT_EQ(got.tokens(), want.tokens());
    EXPECT_EQ(absl::MakeConstSpan(Read(got.kept_slots())), want.kept_slots());
    EXPECT_EQ(got.segments(), want.segments());
    for (const auto& [on_device, on_host] :
         {std::pair(got.expert_offsets(), want.expert_offsets()),
          std::pair(got.segment_offsets(), want.segment_offsets())}) {
      EXPECT_EQ(absl::MakeConstSpan(Read(on_device.device())), on_host.host());
      EXPECT_EQ(on_device.host(), c.padded ? on_host.host() : absl::Span<const int64_t>());
    }
    EXPECT_EQ(got.chunk_first_expert(), want.chunk_first_expert());
    for (const int64_t count :
         {got.return_rows(), got.send_rows(), got.recv_rows(), got.ExpertRows(0, 0, 0),
          got.SendRows(0, 0, 0), got.expert_begin(1), got.home_begin(1)}) {
      EXPECT_EQ(count, rows);
    }
  }
}

// What names peers is not there, and refused where rows would move by it.
TEST_F(DevicePlanTest, HasNoPeersAndIsRefusedWhereTheyAreNeeded) {
  const WorkspaceScope scope(*workspace_);
  const World world = MakeWorld({.name = "plain", .experts = 4, .tokens = {12}});
  Workspace workspace;
  const DispatchPlan plan = BuildOnDevice(world, workspace).value();
  for (const auto& rows :
       {plan.send_token(0), plan.expert_source(0), plan.expert_peer(0), plan.expert_home_row(0),
        plan.return_place(0), plan.home_peer(0), plan.home_source(0)}) {
    EXPECT_TRUE(rows.empty());
  }
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> comm) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(
        const auto dispatcher,
        Dispatcher<float>::Create({.algorithm = DispatchAlgorithm::kDirect}, *comm));
    EXPECT_EQ(dispatcher->algorithm(), DispatchAlgorithm::kDirect);
    std::vector<float> x(plan.tokens()), rows(plan.expert_rows());
    const auto stream = MakeInlineStream();
    EXPECT_THAT(dispatcher->Dispatch({plan, 0, workspace, *stream}, {x.data(), plan.tokens(), 1},
                                     {rows.data(), plan.expert_rows(), 1}),
                StatusIs(kInvalidArgument, "reads_peers = 0 and node_size = 0, expected 1 and 0"));
    return absl::OkStatus();
  });
}

TEST_F(DevicePlanTest, GivesSlotsBeyondThePaddingNoRow) {
  World world = MakeWorld({.name = "padded", .experts = 4, .tokens = {12}, .padded = true});
  world.padded_rows = 1;
  Workspace workspace;
  EXPECT_THAT(std::string(BuildOnHost(world, workspace).status().message()),
              HasSubstr("expected at most 1 (padded_rows)"));
  const DispatchPlan plan = BuildOnDevice(world, workspace).value();
  const std::vector<int32_t> row = Read(plan.home_row_of_slot());
  EXPECT_LE(std::count_if(row.begin(), row.end(), [](int32_t r) { return r >= 0; }),
            plan.expert_rows());
  EXPECT_GT(std::count(row.begin(), row.end(), -1), 0);
}

TEST_F(DevicePlanTest, RefusesWhatItDoesNotSort) {
  Workspace workspace;
  EXPECT_THAT(BuildOnDevice(MakeWorld({.experts = 1025}), workspace),
              StatusIs(kInvalidArgument, "E (experts) is 1025"));
}

}  // namespace
}  // namespace moe::testing
