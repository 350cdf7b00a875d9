// Runs whose state the ranks share out (ZeRO), against one rank that keeps all of it.
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/create.h"
#include "moe/lm/stage.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

using ::moe::testing::kThreadSanitized;
using ::moe::testing::Layout;

// Under ThreadSanitizer what has threads of its own: types and numbers of ranks repeat it.
std::vector<DType> Types() {
  if (kThreadSanitized) return {DType::kBFloat16};
  return {DType::kFloat32, DType::kBFloat16};
}
std::vector<Layout> Layouts() {
  const Layout direct = {.ranks = 2, .all_reduce = AllReduceAlgorithm::kDirect};
  const Layout experts = {.ranks = 8, .expert_parallel = 4};
  if (kThreadSanitized) return {direct, experts};
  return {Layout{}, direct, Layout{.ranks = 3}, experts};
}

constexpr ZeroStage kStages[] = {ZeroStage::kNone, ZeroStage::kOptimizer, ZeroStage::kGradients,
                                 ZeroStage::kWeights};

std::string NameOf(ZeroStage zero, const Layout& layout) {
  return absl::StrCat("zero ", static_cast<int>(zero), ", ", layout.ranks, " ranks, EP ",
                      layout.expert_parallel);
}

TrainConfig With(TrainConfig config, ZeroStage zero) {
  config.trainer.zero = zero;
  return config;
}

TEST(ZeroTest, EveryStageHasTheSameBitsAtAnyNumberOfRanks) {
  for (const DType dtype : Types()) {
    TrainConfig config = ZeroConfig(dtype);
    if (kThreadSanitized) config.steps = 5;
    const Trace expected = TrainIn(config);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    for (const Layout& layout : Layouts()) {
      int64_t bytes = std::numeric_limits<int64_t>::max();
      for (const ZeroStage zero : kStages) {
        SCOPED_TRACE(NameOf(zero, layout));
        const Trace got = TrainIn(With(config, zero), layout);
        ExpectSameTrace(got, expected);
        // Two buckets, and two modules, are much here.
        if (zero >= ZeroStage::kGradients || layout.ranks == 1) continue;
        EXPECT_LT(got.report.state_bytes, std::exchange(bytes, got.report.state_bytes));
      }
    }
  }
}

// Both forwards and the backward of a layer read what is gathered once.
TEST(ZeroTest, LayersThatAreComputedAgainLeaseAgain) {
  TrainConfig config = ZeroConfig(DType::kBFloat16);
  config.steps = 3;
  const Trace expected = TrainIn(config);
  config.model.recompute = Recompute::kLayer;
  ExpectSameTrace(
      TrainIn(With(config, ZeroStage::kWeights), {.ranks = 4, .expert_parallel = 2, .overlap = 2}),
      expected);
}

// What does not fit goes a round of its own: every parameter a bucket, in buffers that backward has
// open all at once.
TEST(ZeroTest, BucketsOfOneParameterTravelInEveryRound) {
  TrainConfig config = ZeroConfig(DType::kFloat32);
  config.steps = 2;
  config.trainer.bucket_bytes = 1;
  const Trace expected = TrainIn(config);
  for (const ZeroStage zero : kStages) {
    SCOPED_TRACE(static_cast<int>(zero));
    ExpectSameTrace(TrainIn(With(config, zero), {.ranks = 4, .expert_parallel = 2}), expected);
  }
}

TEST(ZeroTest, FastNumericsTrainsAlike) {
  TrainConfig config = ZeroConfig(DType::kFloat32);
  config.trainer.session.numerics = Numerics::kFast;
  config.steps = 3;
  const Trace expected = TrainIn(config, {.ranks = 2});
  for (const ZeroStage zero : kStages) {
    const Trace got = TrainIn(With(config, zero), {.ranks = 2});
    ASSERT_TRUE(got.status.ok()) << got.status;
    // Sums of six float32 partials in another order.
    for (size_t i = 0; i < expected.loss.size(); ++i) {
      EXPECT_NEAR(got.loss[i], expected.loss[i], 1e-4) << i;
    }
  }
}

// A checkpoint has no stage: any goes on from any.
TEST(ZeroTest, ACheckpointGoesOnAtAnyStage) {
  if (kThreadSanitized) GTEST_SKIP() << "passes as in the other tests";
  for (const DType dtype : Types()) {
    TrainConfig config = ZeroConfig(dtype);
    config.steps = 3;
    std::vector<LaidOutRun> saved, resumed;
    for (const ZeroStage zero : kStages) {
      for (const Layout& layout : {Layout{.ranks = 4, .expert_parallel = 2}, Layout{.ranks = 3}}) {
        (layout.ranks == 4 ? saved : resumed)
            .push_back({NameOf(zero, layout), With(config, zero), layout});
      }
    }
    ExpectResumes(saved, resumed, TrainIn(config));
  }
}

// float16 with a loss scale that overflows at first: the steps are skipped on every rank alike.
TEST(ZeroTest, OverflowsAreSkippedAtEveryStage) {
  TrainConfig config = ZeroConfig(DType::kFloat16);
  config.steps = 6;
  config.loss_scale.initial = 0x1p20;
  config.loss_scale.hysteresis = 1;
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  EXPECT_GT(expected.skipped.size(), 0u);
  EXPECT_LT(expected.skipped.size(), 6u);
  for (const ZeroStage zero : kStages) {
    SCOPED_TRACE(static_cast<int>(zero));
    ExpectSameTrace(TrainIn(With(config, zero), {.ranks = 3}), expected);
  }
}

// All matrices have whole lines of 64 bytes, and all ranks all experts.
TEST(ZeroTest, AStepGathersAsManyBytesAsTheFormulaSays) {
  TrainConfig config = ZeroConfig(DType::kFloat32);
  config.model.num_layers = 4;
  const auto bytes_of_a_step = [&](ZeroStage zero) {
    int64_t bytes[2] = {};
    for (const int steps : {1, 2}) {
      config.steps = steps;
      const Trace trace = TrainIn(With(config, zero), {.ranks = 2});
      EXPECT_TRUE(trace.status.ok()) << trace.status;
      bytes[steps - 1] = trace.report.all_reduce_bytes;
    }
    return bytes[1] - bytes[0];
  };
  int64_t table = 0, layer = 0, head = 0;  // bytes
  ::moe::testing::RunTrainers({}, {}, [&](Trainer& trainer) -> absl::Status {
    ParameterStore& store = trainer.parameters();
    MOE_RETURN_IF_ERROR(Stage<float>::Create(config.model, store, trainer.context()).status());
    for (const auto& p : store.parameters()) {
      if (!p->spec().trainable) continue;
      const int64_t bytes = p->size() * int64_t{sizeof(float)};
      const std::string& name = p->spec().name;
      if (absl::StrContains(name, "embed_tokens")) table += bytes;
      if (absl::StrContains(name, "layers.1.")) layer += bytes;
      if (!absl::StrContains(name, "embed_tokens") && !absl::StrContains(name, ".layers.")) {
        head += bytes;
      }
    }
    return absl::OkStatus();
  });
  ASSERT_GT(table * layer * head, 0);
  // Five micro-batches on two ranks: three rounds. Stage 2 gathers everything once.
  const int64_t rounds = 3, layers = 4;
  const int64_t gathered =
      rounds * (table + head) + (rounds + 1 + rounds + (layers - 2) * 2 * rounds) * layer;
  EXPECT_EQ(bytes_of_a_step(ZeroStage::kWeights) - gathered,
            bytes_of_a_step(ZeroStage::kGradients) - (table + head + layers * layer));
}

// Sums of gradients and state are small here beside two modules; the formula has both.
TEST(ZeroTest, ARankHasAsManyBytesAsTheFormulaSays) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TrainConfig config = ZeroConfig(dtype);
    config.model.hidden_size = 64;
    config.model.num_layers = 3;
    config.steps = 2;
    for (const Layout& layout : {Layout{.ranks = 2}, Layout{.ranks = 4, .expert_parallel = 2}}) {
      const Trace got = TrainIn(With(config, ZeroStage::kWeights), layout);
      ASSERT_TRUE(got.status.ok()) << got.status;
      EXPECT_NEAR(static_cast<double>(got.report.state_bytes) /
                      static_cast<double>(got.report.state_bytes_formula),
                  1, 0.05);
    }
  }
}

// A rank that does not come to a gather of step 2, one for a module that is needed or one ahead of
// it: the others end at their deadline, and say where.
TEST(ZeroTest, ARankThatIsMissedInAGatherIsNamedWithStepAndLayer) {
  TrainConfig config = With(ZeroConfig(DType::kFloat32), ZeroStage::kWeights);
  const Corpus corpus = MakeCorpus();
  for (const int at : {1, 4}) {
    const auto death = std::make_shared<::moe::testing::Death>();
    std::atomic<int> gathers{0};
    death->comes = [&](const Site& site) {
      if (site.step == 2 && absl::string_view(site.name) == "weights" && ++gathers == at) {
        absl::SleepFor(absl::Seconds(2));
      }
      return false;
    };
    std::array<absl::Status, 3> ended;
    const RunOptions options = {.plan = {.ranks = 3}, .timeout = absl::Seconds(1)};
    (void)RunRanks(options, [&](std::unique_ptr<Communicator> world) {
      const int rank = world->rank();
      if (rank == 1) {
        world = std::make_unique<::moe::testing::DyingCommunicator>(std::move(world), death);
      }
      ended[rank] = Train(config, corpus, std::move(world), {}).status();
      return ended[rank];
    });
    for (const int rank : {0, 2}) {
      EXPECT_THAT(std::string(ended[rank].message()),
                  ::testing::ContainsRegex(absl::StrCat("weights, ", at == 1 ? "" : "layer 0, ",
                                                        "step 2.: waited .*for rank 1")));
    }
  }
}

}  // namespace
}  // namespace moe::lm::testing
