// Runs whose weights or moments are NaN or infinite: they end, and nobody goes on from them.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/watch/rank_watch.h"
#include "moe/checkpoint/manifest.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/file.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

namespace fs = std::filesystem;
using ::moe::testing::StatusIs;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using Resume = TrainCheckpoints::Resume;

class NotFiniteTest : public ::testing::Test {
 protected:
  NotFiniteTest() { fs::remove_all(folder_); }
  ~NotFiniteTest() override { fs::remove_all(folder_); }

  TrainConfig Saving(int64_t steps, Resume resume = Resume::kNone) const {
    TrainConfig config = SmallConfig();
    config.steps = steps;
    config.evaluation.interval = 0;
    config.checkpoints = {
        .folder = folder_, .interval = 1, .asynchronous = false, .resume = resume};
    return config;
  }
  std::string StepPath(int64_t step) const { return folder_ + "/" + StepFolderName(step); }

  const std::string folder_ = ::testing::TempDir() + "not_finite_" +
                              ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

// The gradients of the first step are finite, the weights that it makes are not.
TEST_F(NotFiniteTest, WeightsEndEveryRankInTheirStepAndAreNotSaved) {
  TrainConfig config = Saving(3);
  config.schedule = {.peak = 1e39, .warmup_steps = 0, .total_steps = 3};
  for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kGradients}) {
    for (const bool asynchronous : {false, true}) {
      fs::remove_all(folder_);
      config.trainer.zero = zero;
      config.checkpoints.asynchronous = asynchronous;
      const Trace trace = TrainIn(config, {.ranks = 4, .expert_parallel = 2});
      EXPECT_THAT(trace.status, StatusIs(kDataLoss, "step 1: "));
      EXPECT_THAT(std::string(trace.status.message()),
                  ::testing::ContainsRegex("[0-9]+ values of weights or their moments are not "
                                           "finite, the first in tensor '.*weight' of rank 0, "
                                           "expected finite ones: lower --lr"));
      EXPECT_FALSE(fs::exists(StepPath(1)));
    }
  }
}

// As a version that did not look at weights would have left it: hashes of boxes are right.
TEST_F(NotFiniteTest, ACheckpointWithSuchValuesIsPassedOver) {
  ASSERT_TRUE(TrainIn(Saving(2)).status.ok());
  auto reader = CheckpointReader::Open(StepPath(2)).value();
  CheckpointManifest manifest = reader.manifest();
  ManifestBox& box = manifest.boxes.front();
  const ManifestTensor& tensor = manifest.tensors[box.tensor];
  std::vector<float> values(box.box.rows() * box.box.cols());
  const MatrixView<float> rows(values.data(), box.box.rows(), box.box.cols());
  ASSERT_TRUE(reader.ReadBox(tensor.name, tensor.states[box.state], box.box, rows).ok());
  const auto* const data = reinterpret_cast<const char*>(values.data());
  const size_t size = values.size() * sizeof(float);
  const std::string shard = StepPath(2) + "/" + manifest.files[box.file].name;
  std::stringstream stored;
  stored << std::ifstream(shard, std::ios::binary).rdbuf();
  const auto at = static_cast<int64_t>(stored.view().find({data, size}));
  values[0] = std::numeric_limits<float>::infinity();
  box.xxh3 = CheckpointHash({reinterpret_cast<const uint8_t*>(data), size});
  std::fstream(shard, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(at)
      .write(data, static_cast<int64_t>(size));
  std::ofstream(StepPath(2) + "/" + kManifestName) << SerializeManifest(manifest).value();

  TrainConfig config = Saving(4, Resume::kPath);
  config.checkpoints.path = StepPath(2);
  const absl::Status refused = TrainIn(config, {.ranks = 2}).status;
  EXPECT_EQ(FileFaultOf(refused), FileFault::kContent);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("1 values that are not finite"));
  const Trace resumed = TrainIn(Saving(4, Resume::kAuto), {.ranks = 3});
  EXPECT_TRUE(resumed.status.ok()) << resumed.status;
  EXPECT_EQ(resumed.report.first_step, 1);
}

// A run in which one value of one rank is replaced.
struct Replaced {
  absl::Status status;                  // of the rank that failed of itself
  std::vector<StepMetrics> steps = {};  // that ended
  uint64_t weights = 0;
};

Replaced RunWith(const Fault& fault, const TrainConfig& given,
                 const ::moe::testing::Layout& layout = {}, const TrainHooks& more = {}) {
  static const Corpus& corpus = *new Corpus(MakeCorpus());
  const TrainConfig config = LaidOut(given, layout);
  Replaced run;
  std::mutex mu;
  ::moe::testing::RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) {
    world->Attach(std::make_shared<RankWatch>(world->rank(), layout.ranks, fault), "world");
    TrainHooks hooks = more;
    hooks.on_step = [&](const StepMetrics& metrics) {
      run.steps.push_back(metrics);
      return absl::OkStatus();
    };
    const auto report = Train(config, corpus, std::move(world), hooks);
    const std::lock_guard<std::mutex> lock(mu);
    if (run.status.ok() || absl::IsAborted(run.status)) run.status = report.status();
    if (report.ok()) run.weights = report->weights_xxh3;
    return absl::OkStatus();
  });
  return run;
}

TrainConfig ShortConfig(int64_t steps) {
  TrainConfig config = SmallConfig();
  config.model.hidden_size = 32;
  config.model.num_attention_heads = 4;
  config.model.moe.ffn_hidden_size = 32;
  config.model.moe.router.num_experts = 4;
  config.steps = steps;
  config.evaluation.interval = 0;
  config.evaluation.sequences = 1;
  config.schedule = {.peak = 1e-2, .decay = LearningRateDecay::kConstant};
  return config;
}

enum class Stage : uint8_t { kFirst, kAny, kLast };

// Where a value is replaced, and what the message says then: R is the rank.
struct Place {
  const char* phase;
  std::string text;
  Stage stage = Stage::kAny;  // of a pipeline, which comes to the phase
};

std::vector<Place> Places() {
  const std::string made =
      R"( \(.*step 2\): the value at \[[0-9]+, [0-9]+\] of \[.* is -?(nan|inf))";
  const auto at = [&](const char* phase, Stage stage = Stage::kAny) {
    return Place{phase, absl::StrCat("rank R on host [^ ]+ in ", phase, made), stage};
  };
  return {
      at("embedding", Stage::kFirst),
      at("attention"),
      {"gate", R"(rank R on host [^ ]+ in gate \(.*step 2\): layer [01]: the router's logit of )"},
      at("experts"),
      at("combine"),
      at("loss", Stage::kLast),
      at("combine backward"),
      at("experts backward"),
      at("dispatch backward"),
      at("gate backward"),
      at("attention backward"),
      {"embedding backward", "step 2: .*; first in the gradient of 'model.embed_tokens.weight'",
       Stage::kFirst},
      {"optimiser",
       "step 2: [0-9]+ values of weights or their moments are not finite, the first in tensor "
       "'.+' of rank R"}};
}

struct LaidOutPlace {
  ::moe::testing::Layout layout = {};
  int pipeline = 1;
  ZeroStage zero = ZeroStage::kNone;
  Numerics numerics = Numerics::kLayoutInvariant;
};
constexpr LaidOutPlace kLayouts[] = {
    {},
    {.layout = {.ranks = 4}},
    {.layout = {.ranks = 4, .expert_parallel = 4, .overlap = 2}},
    {.layout = {.ranks = 4, .expert_parallel = 2}, .zero = ZeroStage::kOptimizer},
    {.layout = {.ranks = 4}, .zero = ZeroStage::kWeights},
    {.layout = {.ranks = 2}, .pipeline = 2},
    {.layout = {.ranks = 2, .expert_parallel = 2, .tensor = 2}},
    {.layout = {.ranks = 4, .expert_parallel = 2}, .numerics = Numerics::kFast},
    {.layout = {.ranks = 4, .expert_parallel = 2}, .pipeline = 2, .zero = ZeroStage::kGradients}};

// Every place with every value, and every value in every layout.
TEST(ReplacedValueTest, EndsEveryRankBeforeTheStepDoesAndIsNamed) {
  const FaultKind kinds[] = {FaultKind::kNaN, FaultKind::kInfinity, FaultKind::kNegativeInfinity};
  const std::vector<Place> places = Places();
  for (size_t p = 0; p < places.size(); ++p) {
    for (size_t k = 0; k < std::size(kinds); ++k) {
      if (::moe::testing::kSanitized && k != p % std::size(kinds)) continue;
      const LaidOutPlace& run = kLayouts[(p + 3 * k) % std::size(kLayouts)];
      TrainConfig config = ShortConfig(3);
      config.trainer.session.numerics = run.numerics;
      config.trainer.session.mesh.pipeline = run.pipeline;
      config.trainer.session.tensor_leaves = run.layout.tensor > 1 ? 8 : 1;
      config.trainer.zero = run.zero;
      const int rank = places[p].stage == Stage::kFirst ? 0 : run.layout.ranks - 1;
      const Fault fault = {.ranks = {rank}, .step = 2, .phase = places[p].phase, .kind = kinds[k]};
      SCOPED_TRACE(absl::StrCat(places[p].phase, ", ", NameOf(kinds[k], kFaultKindWords), ", run ",
                                (p + 3 * k) % std::size(kLayouts)));
      const Replaced got = RunWith(fault, config, run.layout);
      EXPECT_THAT(got.status, StatusIs(kDataLoss, ""));
      EXPECT_THAT(std::string(got.status.message()),
                  ::testing::ContainsRegex(
                      absl::StrReplaceAll(places[p].text, {{"R", absl::StrCat(rank)}})));
      EXPECT_EQ(got.steps.size(), 1);
    }
  }
}

TEST(ReplacedValueTest, AnOverflowOnOneRankSkipsTheStepOnAll) {
  TrainConfig config = ShortConfig(1);
  config.trainer.dtype = DType::kFloat16;
  config.loss_scale = {.initial = 1024, .window = 2, .hysteresis = 1};
  const Fault fault = {
      .ranks = {2}, .step = 2, .phase = "experts backward", .kind = FaultKind::kInfinity};
  const ::moe::testing::Layout layout = {.ranks = 3, .expert_parallel = 3};
  const uint64_t after_one_step = RunWith({}, config, layout).weights;
  config.steps = 2;
  EXPECT_EQ(RunWith(fault, config, layout).weights, after_one_step);
  config.steps = 6;
  const Replaced run = RunWith(fault, config, layout);
  EXPECT_TRUE(run.status.ok()) << run.status;
  std::vector<double> scales;
  for (const StepMetrics& step : run.steps) {
    EXPECT_EQ(step.skipped, step.step == 2) << step.step;
    scales.push_back(step.loss_scale);
  }
  EXPECT_THAT(scales, ::testing::ElementsAre(1024, 1024, 512, 512, 1024, 1024));
  config.loss_scale.minimum = 1024;
  const Replaced stopped = RunWith(fault, config, layout);
  EXPECT_THAT(std::string(stopped.status.message()),
              ::testing::ContainsRegex("the loss scale is at its minimum, 1024, .*; first rank 2 "
                                       "on host [^ ]+ in experts backward "));
}

// Of ranks that hold the same weights one alone counts them; here it is another one.
TEST(ReplacedValueTest, AMomentOfOneReplicaEndsTheRun) {
  const Fault fault = {.ranks = {1}, .step = 2, .phase = "optimiser", .kind = FaultKind::kNaN};
  const Replaced run = RunWith(fault, ShortConfig(3), {.ranks = 2});
  EXPECT_THAT(std::string(run.status.message()),
              ::testing::ContainsRegex("step 2: .* the first in tensor '.+' of rank 1"));
  EXPECT_EQ(run.steps.size(), 1);
}

TEST(ReplacedValueTest, AWeightThatIsNotFiniteIsNamed) {
  const TrainHooks hooks = {.load_weights = [](ParameterStore& store, const Context& context) {
    if (context.mesh->world().rank() != 1) return absl::OkStatus();
    for (const auto& parameter : store.parameters()) {
      if (parameter->spec().name != "model.layers.0.mlp.experts.3.down_proj.weight") continue;
      parameter->master()[0] = std::numeric_limits<float>::quiet_NaN();
    }
    return absl::OkStatus();
  }};
  const Replaced run = RunWith({}, ShortConfig(1), {.ranks = 2, .expert_parallel = 2}, hooks);
  EXPECT_THAT(std::string(run.status.message()),
              ::testing::ContainsRegex(
                  "rank 1 on host [^ ]+ in experts .*; a weight of "
                  "'model.layers.0.mlp.experts.3.down_proj.weight' on that rank is not finite"));
}

}  // namespace
}  // namespace moe::lm::testing
