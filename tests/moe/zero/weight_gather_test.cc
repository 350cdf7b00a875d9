// moe/zero/weight_gather.h: what is in flight ends with the object; results are in shard_cut_test.
#include "moe/zero/weight_gather.h"

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

// Rank 0 starts a gather that no peer joins and gives it up; the peer waits elsewhere and hears it.
TEST(WeightGatherTest, GivenUpInFlightItWaitsForNobodyAndEndsItsPeers) {
  testing::RunSessions(2, {}, [](Session& session) -> absl::Status {
    const Context& context = session.context();
    ParameterStore store(DType::kFloat32, 1);
    MOE_RETURN_IF_ERROR(store.Add({.name = "w", .cols = 8}).status());
    const auto buckets = MakeBuckets(
        store,
        {.bucket_bytes = 1, .element_bytes = 8, .placement = PlacementOf(ZeroStage::kOptimizer)},
        *context.mesh);
    MOE_ASSIGN_OR_RETURN(const auto state, OptimizerState::Create(buckets, store, context));
    if (context.mesh->world().rank() == 0) {
      WeightGather gather(buckets, context, MeshLane::kGradients, session.gradient_stream());
      const BucketBlock& block = state.block(0);
      return gather.Start({.own = block.own, .all = block.bytes, .part_bytes = block.part_bytes},
                          {});
    }
    const absl::Status ended = context.mesh->world().Barrier();
    EXPECT_TRUE(absl::StrContains(ended.message(), "weights of a step were given up")) << ended;
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
