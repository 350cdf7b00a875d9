// kernels/expert_sort against DispatchPlan itself: every rank's home rows, sorted on the simulated
// GPU.
#include <cstdint>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "dispatch/dispatch_plan.h"
#include "kernels/expert_sort/expert_sort_cuda.h"
#include "tests/comm/local_ranks.h"
#include "tests/cusim/cusim.h"
#include "tests/dispatch/dispatch_world.h"

namespace moe::testing {
namespace {

struct HomeRows {
  std::vector<int32_t> row_of_slot, slot_of_row;
  bool operator==(const HomeRows&) const = default;
};

// What the plans of all ranks say. Simulated kernels run on one thread: later.
std::vector<HomeRows> PlanHomeRows(const World& world, int overlap) {
  std::vector<HomeRows> rows(world.ranks);
  RunLocalRanks(world.ranks, [&](std::unique_ptr<Communicator> comm) {
    const int rank = comm->rank();
    Workspace workspace;
    const auto stream = MakeInlineStream();
    const auto plan = DispatchPlan::Build(world.view(rank), world.routing[rank].micro_batch_offsets,
                                          ExpertPlacement(world.experts, world.ranks),
                                          {.overlap_degree = overlap}, *comm, workspace, *stream);
    if (!plan.ok()) return plan.status();
    const auto row_of_slot = plan->home_row_of_slot(), home_slot = plan->home_slot();
    rows[rank] = {{row_of_slot.begin(), row_of_slot.end()}, {home_slot.begin(), home_slot.end()}};
    return absl::OkStatus();
  });
  return rows;
}

// Experts by (chunk, rank, expert).
std::vector<int32_t> HomeOrder(const World& world) {
  std::vector<int32_t> order;
  for (int chunk = 0; chunk < world.chunks; ++chunk) {
    for (int32_t e = 0; e < world.experts; ++e) {  // ranks have their experts in ascending blocks
      if (world.ChunkOf(e) == chunk) order.push_back(e);
    }
  }
  return order;
}

HomeRows SortedHomeRows(const World& world, int rank) {
  const RankRouting& routing = world.routing[rank];
  const auto order = HomeOrder(world);
  const auto slots = static_cast<int64_t>(routing.expert.size());
  const int64_t padded = world.experts * world.micro_batches * world.padded_rows;
  HomeRows rows = {std::vector<int32_t>(slots), std::vector<int32_t>(padded > 0 ? padded : slots)};
  std::vector<int64_t> expert_begin(world.experts + 1);
  std::vector<int32_t> count(world.micro_batches * world.experts);
  expert_sort::CudaExpertSort sort = {
      .slots = slots,
      .expert = routing.expert.data(),
      .dropped = routing.dropped.empty() ? nullptr : routing.dropped.data(),
      .num_experts = world.experts,
      .order = order.data(),
      .micro_batches = static_cast<int32_t>(world.micro_batches),
      .micro_batch_offsets = routing.micro_batch_offsets.data(),
      .slot_offset = routing.slot_offset.data(),
      .padded_rows = world.padded_rows,
      .row_of_slot = rows.row_of_slot.data(),
      .slot_of_row = rows.slot_of_row.data(),
      .expert_begin = expert_begin.data(),
      .count = count.data()};
  std::vector<int32_t> scratch(ScratchElements(sort));
  sort.scratch = scratch.data();
  EXPECT_EQ(expert_sort::Run(sort, nullptr), cudaSuccess);
  rows.slot_of_row.resize(expert_begin.back());
  return rows;
}

TEST(ExpertSortPlanTest, RowsAreTheHomeRowsOfThePlan) {
  for (const auto& [ranks, cases] : WorldCases(/*max_ranks=*/3)) {
    for (const WorldCase& c : cases) {
      SCOPED_TRACE(::testing::Message() << c);
      const World world = MakeWorld(c);
      const auto want = PlanHomeRows(world, c.overlap);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_TRUE(SortedHomeRows(world, rank) == want[rank]) << rank;
      }
    }
  }
}

}  // namespace
}  // namespace moe::testing
