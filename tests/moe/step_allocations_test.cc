// From the second step on a training step takes nothing from the heap.
#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include "gating/gate.h"
#include "tests/comm/local_ranks.h"
#include "tests/counting_new.h"
#include "tests/moe/lm/train_harness.h"

namespace moe::lm {
namespace {

using ::moe::testing::Layout;
using testing::SmallConfig;

constexpr auto kDirect = DispatchAlgorithm::kDirect;
constexpr auto kSumInPlace = AllReduceAlgorithm::kDirect;

struct Case {
  Numerics numerics;
  Layout layout;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << (c.numerics == Numerics::kFast ? "fast, " : "layout-invariant, ") << c.layout;
}

// Calls of operator new, on all threads of all ranks, between the ends of steps 2 and 5 on rank 0:
// the first step grows workspaces, the last one validates, and no rank is a whole step ahead.
// oneTBB keeps pools of its own, which take from malloc and are not counted.
int64_t AllocationsOfLaterSteps(const TrainConfig& given, const Layout& layout) {
  TrainConfig config = testing::LaidOut(given, layout);
  config.steps = 6;
  config.evaluation.interval = 0;
  const Corpus corpus = testing::MakeCorpus();
  int64_t after_two = -1, after_five = -2;
  const TrainHooks hooks = {.on_step = [&](const StepMetrics& metrics) {
    if (metrics.step == 2) after_two = Allocations();
    if (metrics.step == 5) after_five = Allocations();
    return absl::OkStatus();
  }};
  ::moe::testing::RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) {
    return Train(config, corpus, std::move(world), hooks).status();
  });
  return after_five - after_two;
}

class StepAllocationsTest : public ::testing::TestWithParam<Case> {};

TEST_P(StepAllocationsTest, NoneAfterTheFirstStep) {
  TrainConfig config = SmallConfig();
  config.trainer.session.numerics = GetParam().numerics;
  config.trainer.zero = GetParam().layout.zero;
  if (GetParam().layout.dispatch == kDirect) {
    // Peer memory grows with the most rows that a rank has had: here always as many.
    config.model.moe.router.capacity_factor = 1.0;
    config.model.moe.router.pad_to_capacity = true;
  }
  EXPECT_EQ(AllocationsOfLaterSteps(config, GetParam().layout), 0);
}

constexpr Case kCases[] = {
    {Numerics::kFast, {}},
    {Numerics::kFast, {.threads = 2}},
    {Numerics::kLayoutInvariant, {}},
    {Numerics::kFast, {.ranks = 4, .expert_parallel = 2}},
    {Numerics::kFast, {.ranks = 4, .expert_parallel = 2, .all_reduce = kSumInPlace}},
    {Numerics::kFast, {.ranks = 4, .expert_parallel = 2, .dispatch = kDirect, .threads = 2}},
    {Numerics::kLayoutInvariant, {.ranks = 4, .expert_parallel = 2, .threads = 2}},
    {Numerics::kLayoutInvariant, {.ranks = 4, .expert_parallel = 2, .all_reduce = kSumInPlace}},
    {Numerics::kLayoutInvariant, {.ranks = 4, .expert_parallel = 2, .dispatch = kDirect}},
    {Numerics::kLayoutInvariant, {.ranks = 2, .expert_parallel = 2, .overlap = 2}},
    {Numerics::kLayoutInvariant,
     {.ranks = 4, .expert_parallel = 2, .overlap = 2, .zero = ZeroStage::kWeights}},
};
INSTANTIATE_TEST_SUITE_P(Layouts, StepAllocationsTest, ::testing::ValuesIn(kCases));

// With what each gate reads beside its k: jitter, random second choices, groups.
TEST(StepAllocationsOfGatesTest, NoneAfterTheFirstStep) {
  for (const std::string& gate : GateNames()) {
    SCOPED_TRACE(gate);
    const GateDefinition& definition = *FindGate(gate);
    TrainConfig config = SmallConfig();
    RouterConfig& router = config.model.moe.router;
    router.gate = gate;
    if (definition.only_top_k != 0) router.top_k = definition.only_top_k;
    if ((definition.options & kGateJitter) != 0) router.input_jitter = 0.2f;
    router.random_second_expert = (definition.options & kGateRandomSecond) != 0;
    if ((definition.options & kGateGroups) != 0) {
      router.num_groups = 5;
      router.group_top_k = 3;
    }
    EXPECT_EQ(AllocationsOfLaterSteps(config, {.threads = 2}), 0);
  }
}

// With passes that take turns: an event and a hand-off for each.
TEST(StepAllocationsOfTurnsTest, NoneAfterTheFirstStep) {
  TrainConfig config = SmallConfig();
  config.trainer.pipeline_schedule = ScheduleKind::k1F1BOverlap;
  EXPECT_EQ(AllocationsOfLaterSteps(config, {.ranks = 2, .expert_parallel = 2}), 0);
}

// With state in a file, which a thread of its own reads and writes.
TEST(StepAllocationsOfOffloadTest, NoneAfterTheFirstStep) {
  for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kOptimizer}) {
    TrainConfig config = SmallConfig();
    config.trainer.dtype = DType::kBFloat16;
    config.trainer.zero = zero;
    config.trainer.bucket_bytes = 20'000;
    config.trainer.offload = {.optimizer = OffloadTo::kFile,
                              .file = {.folder = ::testing::TempDir(), .page_bytes = 8192}};
    EXPECT_EQ(AllocationsOfLaterSteps(config, {.ranks = 2}), 0) << static_cast<int>(zero);
  }
}

}  // namespace
}  // namespace moe::lm
