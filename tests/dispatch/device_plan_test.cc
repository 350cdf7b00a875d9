// DispatchPlan::BuildOnDevice against Build: the same plan, its rows ordered by a CUDA device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/dispatch_plan.h"
#include "dispatch/dispatcher.h"
#include "kernels/base/device_arrays.h"
#include "tests/comm/local_ranks.h"
#include "tests/dispatch/dispatch_world.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Message;

// A plan's arrays that kernels read, copied to the host.
struct Rows {
  std::vector<int32_t> home_row_of_slot, home_slot, expert_token, return_order;
  bool operator==(const Rows&) const = default;
};

class DevicePlanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = std::move(TestDevices().back());
    if (!IsCuda(stream())) GTEST_SKIP() << "no CUDA device";
    workspace_ = std::make_unique<Workspace>(device_->memory());
  }

  void TearDown() override { EXPECT_TRUE(stream().Synchronize().ok()); }

  Stream& stream() { return device_->stream(); }

  static absl::StatusOr<DispatchPlan> BuildOnHost(const World& world, int overlap,
                                                  Communicator& comm, Workspace& workspace) {
    return DispatchPlan::Build(world.view(0), world.routing[0].micro_batch_offsets,
                               ExpertPlacement(world.experts, 1), {.overlap_degree = overlap}, comm,
                               workspace, *MakeInlineStream());
  }

  absl::StatusOr<DispatchPlan> BuildOnDevice(const World& world, int overlap, Communicator& comm,
                                             Workspace& host) {
    Routing routing = world.view(0);
    MOE_ASSIGN_OR_RETURN(routing.slot_offset,
                         UploadArray(routing.slot_offset, *workspace_, stream()));
    MOE_ASSIGN_OR_RETURN(routing.expert, UploadArray(routing.expert, *workspace_, stream()));
    MOE_ASSIGN_OR_RETURN(routing.dropped, UploadArray(routing.dropped, *workspace_, stream()));
    return DispatchPlan::BuildOnDevice(routing, world.routing[0].micro_batch_offsets,
                                       {.overlap_degree = overlap}, comm, host, *MakeInlineStream(),
                                       *workspace_, stream());
  }

  std::vector<int32_t> Read(absl::Span<const int32_t> array) {
    Workspace host;
    const auto copy = DownloadArray(array, host, stream());
    if (!copy.ok() || !stream().Synchronize().ok()) return {-99};
    return {copy->begin(), copy->end()};
  }

  // Of all chunks.
  Rows ReadRows(const DispatchPlan& plan) {
    Rows rows = {Read(plan.home_row_of_slot()), Read(plan.home_slot()), {}, {}};
    for (int c = 0; c < plan.chunks(); ++c) {
      const auto token = Read(plan.expert_token(c)), order = Read(plan.return_order(c));
      rows.expert_token.insert(rows.expert_token.end(), token.begin(), token.end());
      rows.return_order.insert(rows.return_order.end(), order.begin(), order.end());
    }
    return rows;
  }

  std::unique_ptr<TestDevice> device_;
  std::unique_ptr<Workspace> workspace_;
};

TEST_F(DevicePlanTest, IsThePlanOfTheHost) {
  const auto cases = WorldCases(/*max_ranks=*/1);
  for (const WorldCase& c : cases.at(1)) {
    SCOPED_TRACE(Message() << c);
    const WorkspaceScope scope(*workspace_);
    const World world = MakeWorld(c);
    RunLocalRanks(1, [&](std::unique_ptr<Communicator> comm) -> absl::Status {
      Workspace workspace;
      MOE_ASSIGN_OR_RETURN(const auto on_host, BuildOnHost(world, c.overlap, *comm, workspace));
      MOE_ASSIGN_OR_RETURN(const auto want, on_host.OnDevice(*workspace_, stream()));
      MOE_ASSIGN_OR_RETURN(const auto got, BuildOnDevice(world, c.overlap, *comm, workspace));
      EXPECT_TRUE(ReadRows(got) == ReadRows(want));
      EXPECT_EQ(got.chunks(), want.chunks());
      EXPECT_EQ(got.tokens(), want.tokens());
      EXPECT_EQ(got.kept_slots(), want.kept_slots());
      EXPECT_EQ(got.expert_offsets(), want.expert_offsets());
      EXPECT_EQ(got.segment_offsets(), want.segment_offsets());
      EXPECT_EQ(got.chunk_first_expert(), want.chunk_first_expert());
      EXPECT_EQ(got.max_tokens(), want.max_tokens());
      EXPECT_EQ(got.max_expert_rows(), want.max_expert_rows());
      for (int chunk = 0; chunk < got.chunks(); ++chunk) {
        EXPECT_EQ(got.ExpertRows(chunk, 0, 0), want.ExpertRows(chunk, 0, 0));
        EXPECT_EQ(got.home_begin(chunk), want.home_begin(chunk));
        EXPECT_EQ(got.SendRows(chunk, 0, 0), got.ExpertRows(chunk, 0, 0));
      }
      return absl::OkStatus();
    });
  }
}

// What names peers is not there: empty, in every chunk, and refused where rows would move by it.
TEST_F(DevicePlanTest, HasNoPeersAndIsRefusedWhereTheyAreNeeded) {
  const WorkspaceScope scope(*workspace_);
  const World world = MakeWorld({.name = "chunks", .experts = 4, .tokens = {12}, .overlap = 2});
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> comm) -> absl::Status {
    Workspace workspace;
    MOE_ASSIGN_OR_RETURN(const auto plan, BuildOnDevice(world, 2, *comm, workspace));
    EXPECT_EQ(plan.chunks(), 2);
    for (int c = 0; c < plan.chunks(); ++c) {
      for (const auto& rows :
           {plan.send_token(c), plan.expert_source(c), plan.expert_peer(c), plan.expert_home_row(c),
            plan.return_place(c), plan.home_peer(c), plan.home_source(c)}) {
        EXPECT_TRUE(rows.empty());
      }
    }
    for (const auto algorithm : {DispatchAlgorithm::kDirect, DispatchAlgorithm::kHierarchical}) {
      MOE_ASSIGN_OR_RETURN(const auto dispatcher,
                           Dispatcher<float>::Create({.algorithm = algorithm}, *comm));
      EXPECT_EQ(dispatcher->algorithm(), algorithm);
      std::vector<float> x(plan.tokens()), rows(plan.expert_rows());
      const absl::Status status = dispatcher->Dispatch(plan, 0, {x.data(), plan.tokens(), 1},
                                                       {rows.data(), plan.expert_rows(), 1},
                                                       workspace, *MakeInlineStream());
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("names no peers, expected one of Build"));
    }
    return absl::OkStatus();
  });
}

TEST_F(DevicePlanTest, RefusesAnExpertBeyondItsPaddingAsTheHostDoes) {
  World world = MakeWorld({.name = "padded", .experts = 4, .tokens = {12}, .padded = true});
  world.padded_rows = 1;
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> comm) {
    Workspace workspace;
    const auto want = BuildOnHost(world, 1, *comm, workspace).status();
    EXPECT_THAT(std::string(want.message()), HasSubstr("expected at most 1 (padded_rows)"));
    EXPECT_EQ(BuildOnDevice(world, 1, *comm, workspace).status(), want);
    return absl::OkStatus();
  });
}

TEST_F(DevicePlanTest, RefusesWhatItDoesNotSort) {
  RunLocalRanks(2, [&](std::unique_ptr<Communicator> comm) {
    Workspace workspace;
    if (comm->rank() == 0) {  // it fails before anything is sent
      const auto status = BuildOnDevice(MakeWorld({}), 1, *comm, workspace).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr("2 ranks"));
    }
    return absl::OkStatus();
  });
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> comm) {
    Workspace workspace;
    const auto status = BuildOnDevice(MakeWorld({.experts = 1025}), 1, *comm, workspace).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("E (experts) is 1025"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe::testing
