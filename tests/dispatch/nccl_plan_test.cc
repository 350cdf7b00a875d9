// DispatchPlan::BuildOnDevice of several ranks over NCCL: the plan that Build makes on the host.
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/dispatch_plan.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/dispatch/dispatch_world.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe::testing {
namespace {

using enum absl::StatusCode;

// One rank of a world, its routing in memory of its device.
class Rank {
 public:
  Rank(const World& world, Communicator& comm, const TestDevice& device)
      : world_(world), comm_(comm), stream_(device.stream()), workspace_(device.memory()) {}
  ~Rank() { EXPECT_TRUE(stream_.Synchronize().ok()); }

  absl::StatusOr<DispatchPlan> Build(int overlap) {
    return DispatchPlan::Build(Inputs(world_.view(comm_.rank()), {.overlap_degree = overlap}),
                               host_, *MakeInlineStream());
  }
  absl::StatusOr<DispatchPlan> BuildOnDevice(const DispatchPlanOptions& options) {
    MOE_ASSIGN_OR_RETURN(const Routing routing, world_.OnDevice(comm_.rank(), workspace_, stream_));
    return DispatchPlan::BuildOnDevice(Inputs(routing, options), host_, workspace_, stream_);
  }
  std::vector<int32_t> Read(absl::Span<const int32_t> array) const {
    return ReadArray(array, stream_);
  }

 private:
  DispatchPlanInputs Inputs(const Routing& routing, const DispatchPlanOptions& options) const {
    return {.routing = routing,
            .micro_batch_offsets = world_.routing[comm_.rank()].micro_batch_offsets,
            .placement = {world_.experts, comm_.size()},
            .options = options,
            .comm = comm_};
  }

  const World& world_;
  Communicator& comm_;
  Stream& stream_;
  Workspace host_, workspace_;
};

void ExpectEqual(const DispatchPlan& got, const DispatchPlan& want, Rank& rank) {
  const auto begins = [](const DispatchPlan& plan, int c) {
    return std::vector<int64_t>{plan.send_begin(c), plan.recv_begin(c), plan.expert_begin(c),
                                plan.home_begin(c)};
  };
  const auto expect_rows = [&](absl::Span<const int32_t> device, absl::Span<const int32_t> host) {
    EXPECT_EQ(absl::MakeConstSpan(rank.Read(device)), host);
  };
  ASSERT_EQ(got.chunks(), want.chunks());
  for (int c = 0; c <= want.chunks(); ++c) ASSERT_EQ(begins(got, c), begins(want, c));
  for (int c = 0; c < want.chunks(); ++c) {
    expect_rows(got.send_token(c), want.send_token(c));
    expect_rows(got.expert_source(c), want.expert_source(c));
    expect_rows(got.return_order(c), want.return_order(c));
    expect_rows(got.return_place(c), want.return_place(c));
    for (int source = 0; source < want.ranks(); ++source) {
      for (int to = 0; to < want.ranks(); ++to) {
        EXPECT_EQ(got.SendRows(c, source, to), want.SendRows(c, source, to));
        EXPECT_EQ(got.ExpertRows(c, source, to), want.ExpertRows(c, source, to));
      }
    }
  }
  expect_rows(got.home_slot(), want.home_slot());
  expect_rows(got.home_row_of_slot(), want.home_row_of_slot());
  EXPECT_EQ(got.kept_slots(), want.kept_slots());
  EXPECT_EQ(got.chunk_first_expert(), want.chunk_first_expert());
  EXPECT_EQ(got.expert_offsets().host(), want.expert_offsets().host());
  EXPECT_EQ(got.segment_offsets().host(), want.segment_offsets().host());
  EXPECT_EQ(got.tokens(), want.tokens());
  EXPECT_EQ(got.segments(), want.segments());
}

TEST(NcclPlanTest, IsThePlanOfTheHost) {
  auto groups = WorldCases(/*max_ranks=*/kSanitized ? 2 : 3);
  groups.erase(1);
  for (auto& [ranks, cases] : groups) {
    // More micro-batches than come at once.
    cases.push_back({.name = "many micro-batches",
                     .ranks = ranks,
                     .experts = 6,
                     .tokens = {30, 0, 7},
                     .micro_batches = 7,
                     .overlap = 2});
    OnNcclRanks({.ranks = ranks, .seed = static_cast<uint32_t>(ranks)},
                [&, &cases = cases](Communicator& comm, const TestDevice& device) {
                  for (const WorldCase& c : cases) {
                    SCOPED_TRACE(::testing::Message() << c << ", rank " << comm.rank());
                    const World world = MakeWorld(c);
                    Rank rank(world, comm, device);
                    const auto want = rank.Build(c.overlap).value();
                    const auto got = rank.BuildOnDevice({.overlap_degree = c.overlap}).value();
                    ExpectEqual(got, want, rank);
                  }
                });
  }
}

// No rank compares the lengths of what NCCL gathers in a CUDA stream.
TEST(NcclPlanTest, RanksThatDisagreeAreRefusedOnAllOfThem) {
  World world = MakeWorld({.ranks = 2, .experts = 4, .tokens = {2}});
  const auto refused = [&](int overlap_of_one, const char* message) {
    OnNcclRanks({.ranks = 2}, [&](Communicator& comm, const TestDevice& device) {
      const int overlap = comm.rank() == 1 ? overlap_of_one : 1;
      EXPECT_THAT(Rank(world, comm, device).BuildOnDevice({.overlap_degree = overlap}),
                  StatusIs(kInvalidArgument, message));
    });
  };
  refused(2, "overlap degree 2 on rank 1, expected 1 as on rank 0");
  for (const auto& [few, many] : {std::pair(1, 2), std::pair(1, 9), std::pair(8, 9)}) {
    world.routing[0].micro_batch_offsets.assign(few, 0);
    world.routing[0].micro_batch_offsets.push_back(2);
    world.routing[1].micro_batch_offsets.assign(many, 0);
    world.routing[1].micro_batch_offsets.push_back(2);
    refused(1, absl::StrCat("micro-batches ", many, " on rank 1, expected ", few).c_str());
  }
}

TEST(NcclPlanTest, ReadsNoPeers) {
  const World world = MakeWorld({.ranks = 1, .experts = 4, .tokens = {2}});
  OnNcclRanks({.ranks = 1}, [&](Communicator& comm, const TestDevice& device) {
    EXPECT_EQ(Rank(world, comm, device).BuildOnDevice({.reads_peers = true}).status().code(),
              kUnimplemented);
  });
}

}  // namespace
}  // namespace moe::testing
