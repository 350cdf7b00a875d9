// Training: the loss falls, and the same bits come out of every layout.
#include "moe/lm/training_loop.h"

#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe::lm {
namespace {

using ::moe::testing::Layout;
using testing::ExpectSameTrace;
using testing::MakeCorpus;
using testing::SmallConfig;
using testing::Trace;
using testing::TrainIn;
using enum absl::StatusCode;
using ::moe::testing::StatusIs;

constexpr auto kStaged = DispatchAlgorithm::kStaged;
constexpr auto kDirect = DispatchAlgorithm::kDirect;
constexpr auto kHierarchical = DispatchAlgorithm::kHierarchical;

// Every EP that divides every rank count, and a pairwise cover of the other axes over them.
const Layout kLayouts[] = {
    {.ranks = 2, .expert_parallel = 1, .dispatch = kDirect, .overlap = 4},
    {.ranks = 2, .expert_parallel = 2, .threads = 2},
    {.ranks = 3, .expert_parallel = 1, .threads = 2},
    {.ranks = 3, .expert_parallel = 3, .dispatch = kDirect, .overlap = 4},
    {.ranks = 4, .expert_parallel = 1},
    {.ranks = 4, .expert_parallel = 2, .dispatch = kHierarchical, .node_size = 2, .overlap = 4},
    {.ranks = 4, .expert_parallel = 4, .dispatch = kHierarchical, .node_size = 2, .threads = 2},
    {.ranks = 5, .expert_parallel = 1, .overlap = 4, .all_reduce = AllReduceAlgorithm::kDirect},
    {.ranks = 5, .expert_parallel = 5, .dispatch = kDirect, .threads = 2},
    {.ranks = 6, .expert_parallel = 1, .dispatch = kDirect},
    {.ranks = 6, .expert_parallel = 2, .dispatch = kStaged, .overlap = 4, .threads = 2},
    {.ranks = 6, .expert_parallel = 3, .dispatch = kHierarchical, .node_size = 3},
    {.ranks = 6, .expert_parallel = 6, .dispatch = kHierarchical, .node_size = 2, .overlap = 4},
    {.ranks = 8, .expert_parallel = 1, .dispatch = kHierarchical, .threads = 2},
    {.ranks = 8,
     .expert_parallel = 2,
     .dispatch = kDirect,
     .overlap = 4,
     .threads = 2,
     .all_reduce = AllReduceAlgorithm::kDirect},
    {.ranks = 8, .expert_parallel = 4},
    {.ranks = 8, .expert_parallel = 8, .dispatch = kHierarchical, .node_size = 4, .overlap = 4},
};

class TrainerLayoutTest : public ::testing::TestWithParam<Layout> {};

// Under sanitizers a storage type adds no exchange and no thread to float32's: one layout.
bool IsLeftOut(const Layout& layout) {
  return ::moe::testing::kSanitized && layout.ranks != 4;
}

// Six micro-batches: more than one a rank below six ranks, none for some at eight.
TEST_P(TrainerLayoutTest, TenStepsHaveTheBitsOfOneRank) {
  static const Trace* const one = new Trace(TrainIn(SmallConfig()));
  ASSERT_EQ(one->loss.size(), 10u);
  ExpectSameTrace(TrainIn(SmallConfig(), GetParam()), *one);
}

// The same with what depends on groups of tokens: capacity, and bfloat16 storage.
TEST_P(TrainerLayoutTest, CapacityAndBFloat16HaveTheBitsOfOneRank) {
  if (IsLeftOut(GetParam())) GTEST_SKIP();
  TrainConfig config = SmallConfig();
  config.steps = 3;
  config.trainer.dtype = DType::kBFloat16;
  config.model.moe.router.capacity_factor = 1.0;
  config.model.moe.router.pad_to_capacity = true;
  config.model.moe.router.token_group.tokens = 8;
  config.model.moe.shared_expert_ffn_hidden_size = 8;
  config.model.moe_layer_freq = 2;  // layer 0 is dense
  static const Trace* const one = new Trace(TrainIn(config));
  ExpectSameTrace(TrainIn(config, GetParam()), *one);
}

// What a router learns from a whole step: the expert bias, shares for the balance loss.
TEST_P(TrainerLayoutTest, CountsOfTheWholeStepHaveTheBitsOfOneRank) {
  TrainConfig config = SmallConfig();
  config.steps = 4;
  RouterConfig& router = config.model.moe.router;
  router.gate = "deepseek-v3";
  router.num_zero_experts = 1;
  router.num_groups = 3;
  router.group_top_k = 2;
  router.bias_update_rate = 0.05f;
  router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  static const Trace* const one = new Trace(TrainIn(config));
  ExpectSameTrace(TrainIn(config, GetParam()), *one);
}

// Float16, with a loss scale that overflows at first: every layout skips the same steps.
TrainConfig OverflowingConfig() {
  TrainConfig config = SmallConfig();
  config.trainer.dtype = DType::kFloat16;
  config.loss_scale = {.initial = 0x1p23, .window = 3, .hysteresis = 1};
  return config;
}

TEST_P(TrainerLayoutTest, Float16SkipsTheStepsOfOneRank) {
  if (IsLeftOut(GetParam())) GTEST_SKIP();
  static const Trace* const one = new Trace(TrainIn(OverflowingConfig()));
  ASSERT_FALSE(one->skipped.empty());
  ExpectSameTrace(TrainIn(OverflowingConfig(), GetParam()), *one);
}

// Under sanitizers four of up to five ranks, which have between them every exchange, overlap, pool,
// sum of gradients and rounds without a micro-batch.
std::vector<Layout> LayoutsHere() {
  if (::moe::testing::kSanitized) return {kLayouts[1], kLayouts[3], kLayouts[5], kLayouts[7]};
  return {std::begin(kLayouts), std::end(kLayouts)};
}
INSTANTIATE_TEST_SUITE_P(Layouts, TrainerLayoutTest, ::testing::ValuesIn(LayoutsHere()));

// Random numbers are keyed by the global token, so neither jitter nor noise nor random second
// choices depend on the layout.
TEST(TrainerTest, EveryGateTrainsWithTheBitsOfOneRank) {
  for (const std::string& gate : ::moe::testing::GatesHere(GateNames())) {
    SCOPED_TRACE(gate);
    TrainConfig config = SmallConfig();
    config.steps = 3;
    RouterConfig& router = config.model.moe.router;
    router.gate = gate;
    const GateDefinition& definition = *FindGate(gate);
    if (definition.only_top_k != 0) router.top_k = definition.only_top_k;
    if ((definition.options & kGateJitter) != 0) router.input_jitter = 0.2f;
    router.random_second_expert = (definition.options & kGateRandomSecond) != 0;
    const Trace one = TrainIn(config);
    EXPECT_LT(one.loss.back(), one.loss.front());
    for (const Layout& layout : {kLayouts[5], kLayouts[3], kLayouts[14]}) {
      if (IsLeftOut(layout)) continue;
      ExpectSameTrace(TrainIn(config, layout), one);
    }
  }
}

// Several rounds read one packed copy, and every step makes a new one.
TEST(TrainerTest, PackedWeightsFollowTheirParameters) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (::moe::testing::kSanitized && dtype != DType::kBFloat16) continue;
    TrainConfig config = SmallConfig();
    config.trainer.dtype = dtype;
    config.steps = 4;
    config.model.moe.shared_expert_ffn_hidden_size = 8;
    const Trace plain = TrainIn(config);
    config.model.moe.pack_weights = true;
    for (const Layout& layout : {Layout{}, kLayouts[5], kLayouts[8]}) {
      ExpectSameTrace(TrainIn(config, layout), plain);
    }
  }
}

// Products that are trees have bits of their own, the same at any layout, of packed weights too.
TEST(TrainerTest, TensorLeavesAreOneRunAtAnyLayout) {
  TrainConfig config = SmallConfig();
  config.steps = 4;
  config.model.moe.ffn_hidden_size = 40;  // items of 16, 16 and 8
  config.model.moe.shared_expert_ffn_hidden_size = 32;
  config.model.moe_layer_freq = 2;
  const Trace chains = TrainIn(config);
  config.trainer.session.tensor_leaves = 8;
  const Trace trees = TrainIn(config);
  EXPECT_NE(trees.weights, chains.weights);
  EXPECT_NE(trees.grad_norm, chains.grad_norm);
  for (size_t s = 0; s < trees.loss.size(); ++s) EXPECT_NEAR(trees.loss[s], chains.loss[s], 1e-3);
  config.model.moe.pack_weights = true;
  for (const Layout& layout : {Layout{}, kLayouts[5], kLayouts[8]}) {
    ExpectSameTrace(TrainIn(config, layout), trees);
  }
}

TEST(TrainerTest, FastNumericsRepeatsItsOwnBitsAndStaysNearLayoutInvariant) {
  if (::moe::testing::kSanitized) GTEST_SKIP() << "judges numbers";
  TrainConfig config = SmallConfig();
  const Trace exact = TrainIn(config);
  config.trainer.session.numerics = Numerics::kFast;
  const Layout layout = {.ranks = 4, .expert_parallel = 2, .overlap = 4};
  const Trace fast = TrainIn(config, layout);
  ExpectSameTrace(TrainIn(config, layout), fast);
  // The first losses come from equal weights; later ones part slowly, as float32 sums do.
  EXPECT_EQ(fast.loss[0], exact.loss[0]);
  for (size_t i = 0; i < exact.loss.size(); ++i) {
    EXPECT_NEAR(fast.loss[i], exact.loss[i], 1e-3 * exact.loss[i]) << i;
  }
}

TEST(TrainerTest, LossFallsOnRealStructure) {
  if (::moe::testing::kSanitized) GTEST_SKIP() << "judges numbers";
  TrainConfig config = SmallConfig();
  config.steps = 60;
  config.schedule.total_steps = 60;
  config.trainer.session.numerics = Numerics::kFast;
  const Trace trace = TrainIn(config, {.ranks = 2, .expert_parallel = 2});
  ASSERT_TRUE(trace.status.ok()) << trace.status;
  EXPECT_NEAR(trace.loss.front(), std::log(256.0), 0.6);  // nothing is learnt yet
  EXPECT_LT(trace.loss.back(), 2.5);  // the text has 20 letters: ln 20 = 3.0 is chance among them
}

// An element of d_logits is up to scale / 32 tokens: from 2^21 on it is beyond 65504.
TEST(TrainerTest, ALossScaleThatOverflowsIsHalvedAndTheWeightsStay) {
  TrainConfig config = OverflowingConfig();
  for (const auto numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    config.trainer.session.numerics = numerics;
    const Trace trace = TrainIn(config, {.ranks = 4, .expert_parallel = 2});
    ASSERT_TRUE(trace.status.ok()) << trace.status;
    ASSERT_GE(trace.skipped.size(), 2u);
    EXPECT_EQ(trace.skipped[0], 1);
    EXPECT_EQ(trace.skipped[1], 2);
    EXPECT_EQ(trace.loss_scale[0], 0x1p23);
    EXPECT_EQ(trace.loss_scale[1], 0x1p22);
    EXPECT_EQ(trace.loss_scale[2], 0x1p21);
    for (const int64_t step : trace.skipped) {
      EXPECT_EQ(trace.grad_norm[step - 1], std::numeric_limits<double>::infinity());
    }
    EXPECT_LT(trace.loss.back(), trace.loss.front());
    // The schedule counts steps that were taken, the current one included.
    size_t skips = 0;
    for (size_t i = 0; i < trace.loss.size(); ++i) {
      EXPECT_EQ(trace.learning_rate[i], config.schedule.At(static_cast<int64_t>(i + 1 - skips)));
      skips += trace.skipped.size() > skips && trace.skipped[skips] == static_cast<int64_t>(i + 1);
    }
  }
}

// The scale divides out: of two runs that overflow nowhere only what underflowed differs.
TEST(TrainerTest, Float16StaysNearFloat32AtAnyScale) {
  if (::moe::testing::kSanitized) GTEST_SKIP() << "judges numbers";
  TrainConfig config = SmallConfig();
  const Trace exact = TrainIn(config);
  config.trainer.dtype = DType::kFloat16;
  for (const double scale : {1024.0, 16384.0}) {
    config.loss_scale.constant = scale;
    const Trace half = TrainIn(config);
    ASSERT_TRUE(half.status.ok()) << half.status;
    EXPECT_TRUE(half.skipped.empty());
    // 11 bits of significand: a loss of about 5.5 nats is a difference of sums that each carry some
    // ten roundings of 2^-11.
    for (size_t i = 0; i < exact.loss.size(); ++i) {
      EXPECT_NEAR(half.loss[i], exact.loss[i], 10 * 0x1p-11 * exact.loss[i]) << i;
      EXPECT_NEAR(half.grad_norm[i], exact.grad_norm[i], 0.05 * exact.grad_norm[i]) << i;
    }
  }
}

TEST(TrainerTest, OverflowAtTheLeastLossScaleStopsEveryRank) {
  TrainConfig config = OverflowingConfig();
  config.loss_scale.minimum = config.loss_scale.initial;
  const Trace trace = TrainIn(config, {.ranks = 3});
  EXPECT_THAT(trace.status, StatusIs(kDataLoss, "the loss scale is at its minimum, 8388608"));
}

TEST(TrainerTest, DivergenceStopsEveryRankWithDataLoss) {
  TrainConfig config = SmallConfig();
  config.schedule = {.peak = 1e30, .warmup_steps = 0, .total_steps = 10};
  for (const auto numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    config.trainer.session.numerics = numerics;
    const Trace trace = TrainIn(config, {.ranks = 2, .expert_parallel = 2});
    EXPECT_THAT(trace.status, StatusIs(kDataLoss, "finite"));
  }
}

TEST(ValidateTrainConfigTest, NamesTheFlagAndTheNearestChoice) {
  TrainConfig config = SmallConfig();
  EXPECT_TRUE(ValidateTrainConfig(config, 4).ok());
  config.trainer.session.mesh.expert = 4;
  const absl::Status status = ValidateTrainConfig(config, 6);
  EXPECT_EQ(status.code(), kInvalidArgument);
  EXPECT_EQ(status.message(), "--ep is 4, expected a divisor of the 6 ranks: 1, 2, 3, 6");
  config = SmallConfig();
  config.trainer.micro_batches = 0;
  EXPECT_FALSE(ValidateTrainConfig(config, 1).ok());
  config = SmallConfig();
  config.model.moe.router.top_k = 6;
  EXPECT_FALSE(ValidateTrainConfig(config, 1).ok());
}

// Statuses of ranks that train at once, each with its own settings.
std::vector<absl::Status> StatusesOf(const std::vector<TrainConfig>& configs,
                                     const TrainHooks& hooks) {
  const Corpus corpus = MakeCorpus();
  std::vector<absl::Status> statuses(configs.size());
  ::moe::testing::RunLocalRanks(
      static_cast<int>(configs.size()), [&](std::unique_ptr<Communicator> world) {
        const int rank = world->rank();
        statuses[rank] = Train(configs[rank], corpus, std::move(world), hooks).status();
        return absl::OkStatus();
      });
  return statuses;
}

TEST(TrainerTest, RanksThatRecordDifferentThingsAreRefusedOnAll) {
  const TrainConfig plain = SmallConfig();
  TrainConfig records = plain, traces = plain, later = plain;
  records.record_routing = true;
  traces.trace_first_step = 1;
  traces.trace_last_step = 4;
  later.trace_first_step = 1;
  later.trace_last_step = 5;
  for (const auto& [configs, part] :
       {std::pair(std::vector<TrainConfig>{plain, records}, "--record-routing"),
        {{traces, plain, plain}, "--trace"},
        {{traces, later}, "--profile-step-end"},
        {{records, records}, "without an on_routing hook"},
        {{traces}, "without a trace hook"}}) {
    for (const absl::Status& status : StatusesOf(configs, {})) {
      EXPECT_THAT(status, StatusIs(kInvalidArgument, part));
    }
  }
  later.trace_first_step = 6;
  EXPECT_THAT(std::string(StatusesOf({later}, {})[0].message()),
              ::testing::HasSubstr("traced steps are 6 to 5"));
}

TEST(TrainerTest, RanksWithDifferentSettingsAreRefusedOnAllByFlagAndRanks) {
  const TrainConfig plain = SmallConfig();
  const auto expect = [&](const char* flag, const std::function<void(TrainConfig&)>& change) {
    TrainConfig other = plain;
    change(other);
    for (const absl::Status& status : StatusesOf({plain, plain, other}, {})) {
      EXPECT_THAT(status, StatusIs(kInvalidArgument,
                                   absl::StrCat(") were given a different ", flag, ", expected")));
      EXPECT_THAT(status, StatusIs(kInvalidArgument, " and 2 (host "));
    }
  };
  expect("--seed", [](TrainConfig& c) { c.trainer.seed += uint64_t{1} << 63; });
  expect("--lr", [](TrainConfig& c) { c.schedule.peak = std::nextafter(c.schedule.peak, 1.0); });
  expect("--dtype", [](TrainConfig& c) { c.trainer.dtype = DType::kBFloat16; });
  expect("--numerics", [](TrainConfig& c) { c.trainer.session.numerics = Numerics::kFast; });
  expect("--tensor-leaves", [](TrainConfig& c) { c.trainer.session.tensor_leaves = 2; });
  expect("--bf16-order",
         [](TrainConfig& c) { c.trainer.session.bfloat16_order = BFloat16Order::kTile; });
  expect("--grid-unit-log2", [](TrainConfig& c) { c.trainer.unit_log2 = -60; });
  expect("--router", [](TrainConfig& c) { c.model.moe.router.gate = "qwen3"; });
  expect("--moe-router-topk", [](TrainConfig& c) { c.model.moe.router.top_k = 1; });
  expect("--moe-expert-capacity-factor",
         [](TrainConfig& c) { c.model.moe.router.capacity_factor = 1.0; });
  expect("--weight-decay", [](TrainConfig& c) { c.trainer.optimizer.weight_decay = 0; });
  expect("--clip-grad", [](TrainConfig& c) { c.trainer.optimizer.clip_grad = 0; });
  expect("--adam-beta1", [](TrainConfig& c) { c.trainer.optimizer.beta1 = 0.8f; });
  expect("--lr-warmup-steps", [](TrainConfig& c) { c.schedule.warmup_steps = 1; });
  expect("--seq-length", [](TrainConfig& c) { c.sequence_length = 8; });
  expect("--micro-batches", [](TrainConfig& c) { c.trainer.micro_batches = 5; });
  expect("--eval-sequences", [](TrainConfig& c) { c.evaluation.sequences = 5; });
  expect("--save", [](TrainConfig& c) { c.checkpoints.folder = "only/here"; });
  expect("--save-interval", [](TrainConfig& c) { c.checkpoints.interval = 2; });
  expect("--checkpoint-keep", [](TrainConfig& c) { c.checkpoints.keep = 2; });
  expect("--checkpoint-keep-every", [](TrainConfig& c) { c.checkpoints.keep_every = 2; });
  expect("--checkpoint-async", [](TrainConfig& c) { c.checkpoints.asynchronous = false; });
  expect("--checkpoint-failures", [](TrainConfig& c) { c.checkpoints.max_failures = 2; });
  expect("--resume",
         [](TrainConfig& c) { c.checkpoints.resume = TrainCheckpoints::Resume::kAuto; });
  expect("--allow-numerics-change",
         [](TrainConfig& c) { c.checkpoints.allow_numerics_change = true; });
  // Wrong on one rank alone: the others refuse it, too.
  expect("--micro-batch-size", [](TrainConfig& c) { c.micro_batch_size = 0; });
  expect("--expert-model-parallel-size", [](TrainConfig& c) { c.trainer.session.mesh.expert = 3; });
}

// Rank 1 reads twice the gradient norm in one step, so that clipping moves its weights otherwise.
class SkewedNorm final : public ::moe::testing::ForwardingCommunicator {
 public:
  SkewedNorm(std::unique_ptr<Communicator> inner, bool skews)
      : ForwardingCommunicator(std::move(inner)), skews_(skews) {}

 private:
  std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) override {
    return std::make_unique<SkewedNorm>(std::move(part), skews_);
  }
  absl::Status DoCollective(CollectiveCall call, Stream& stream) override {
    const auto numbers = absl::MakeSpan(reinterpret_cast<double*>(call.recv.data()), call.count());
    const bool norm = call.kind == CollectiveKind::kAllReduce && call.site.step == 3 &&
                      call.site.name == absl::string_view("optimiser");
    MOE_RETURN_IF_ERROR(ForwardingCommunicator::DoCollective(std::move(call), stream));
    if (!skews_ || !norm) return absl::OkStatus();
    return stream.Enqueue([numbers] {
      for (double& number : numbers) number *= 4;
      return absl::OkStatus();
    });
  }

  const bool skews_;
};

TEST(TrainerTest, WeightsThatPartAreFoundAtTheNextComparison) {
  TrainConfig config = SmallConfig();
  config.steps = 9;
  config.verify_replicas = 2;
  config.trainer.session.mesh.expert = 2;
  config.trainer.optimizer.clip_grad = 1e-3;
  const Corpus corpus = MakeCorpus();
  int64_t seen = 0;
  ::moe::testing::RunLocalRanks(4, [&](std::unique_ptr<Communicator> world) {
    const bool first = world->rank() == 0, skews = world->rank() == 1;
    const TrainHooks hooks = {.on_step = [&](const StepMetrics& m) {
      seen = m.step;
      return absl::OkStatus();
    }};
    EXPECT_THAT(Train(config, corpus, std::make_unique<SkewedNorm>(std::move(world), skews),
                      first ? hooks : TrainHooks()),
                StatusIs(kDataLoss, "differs between ranks 0 and 1"));
    return absl::OkStatus();
  });
  EXPECT_EQ(seen, 3);  // step 4 is not reported
}

TEST(TrainerTest, EveryCollectiveFromTheFirstStepOnNamesItsSite) {
  TrainConfig config = SmallConfig();
  config.steps = 2;
  config.verify_replicas = 1;
  config.record_routing = true;
  config.trainer.session.mesh.expert = 2;
  config.trainer.zero = ZeroStage::kGradients;
  const Corpus corpus = MakeCorpus();
  const auto probe = std::make_shared<::moe::testing::Death>();
  std::mutex mu;
  bool begun = false;
  int64_t named = 0, unnamed = 0;
  probe->comes = [&](const Site& at) {
    const std::lock_guard<std::mutex> lock(mu);
    begun = begun || at.step == 1;
    if (begun) ++(*at.name != 0 && at.step >= 1 ? named : unnamed);
    return false;
  };
  ::moe::testing::RunLocalRanks(4, [&](std::unique_ptr<Communicator> world) {
    if (world->rank() == 3) {
      world = std::make_unique<::moe::testing::DyingCommunicator>(std::move(world), probe);
    }
    const TrainHooks hooks = {.on_routing = [](const auto&) {
      return absl::OkStatus();
    }};
    return Train(config, corpus, std::move(world), hooks).status();
  });
  EXPECT_GT(named, 50);
  EXPECT_EQ(unnamed, 0);
}

TEST(TrainerTest, AUnitOfTheExactGridThatIsGivenStaysAndItsLossIsNamed) {
  TrainConfig config = SmallConfig();
  config.steps = 2;
  const Corpus corpus = MakeCorpus();
  const auto train = [&](int64_t unit_log2) {
    config.trainer.unit_log2 = unit_log2;
    absl::StatusOr<TrainReport> report;
    ::moe::testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) {
      report = Train(config, corpus, std::move(world), {});
      return absl::OkStatus();
    });
    return report;
  };
  const auto fine = train(-50), coarse = train(-20);
  ASSERT_TRUE(fine.ok() && coarse.ok()) << fine.status() << coarse.status();
  EXPECT_EQ(fine->grid_unit_log2, -50);
  EXPECT_LE(fine->grid_loss, 1e-6);
  EXPECT_EQ(coarse->grid_unit_log2, -20);
  EXPECT_GT(coarse->grid_loss, 1e-6);
  EXPECT_THAT(coarse->grid_loss_tensor, ::testing::HasSubstr("weight"));
  EXPECT_GT(coarse->grid_loss_step, 0);
  EXPECT_THAT(train(-90).status(), StatusIs(kDataLoss, "are off the grid of --grid-unit-log2 -90"));
}

TEST(TrainerTest, RanksWithDifferentTextsAreRefusedOnAll) {
  TrainConfig config = SmallConfig();
  config.steps = 1;
  ::moe::testing::RunLocalRanks(3, [&](std::unique_ptr<Communicator> world) {
    Corpus corpus = MakeCorpus();
    if (world->rank() > 0) corpus.xxh3 ^= 1;
    EXPECT_THAT(Train(config, corpus, std::move(world), {}),
                StatusIs(kInvalidArgument, ") were given a different text (--data)"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe::lm
