// What moe plan makes of flags, files of moe bench and steps that were measured.
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/layout_settings.h"
#include "moe/cli/plan/calibration_file.h"
#include "moe/cli/plan/plan_check.h"
#include "moe/cli/plan/plan_options.h"
#include "moe/hf/model_rule.h"
#include "moe/plan/checkpoint_interval.h"
#include "moe/plan/step_time.h"
#include "tests/moe/cli/settings_harness.h"
#include "tests/moe/io/io_test.h"

namespace moe::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kModel[] =
    R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
        "vocab_size": 512, "use_cache": true, "attention_chunk_size": 8192})";

TEST(PlanModel, KeysThatNobodyReadsAreNamed) {
  const auto config = hf::ParseModelConfig("config.json", kModel).value();
  EXPECT_THAT(config.unread, ::testing::ElementsAre("attention_chunk_size"));
}

// The line of every mesh, split into words, is taken by moe train, and means the layout.
TEST(PlanLines, AreTakenByTrainAndMeanTheLayout) {
  const lm::TransformerConfig model = hf::ParseModelConfig("config.json", kModel)->model;
  PlanOptions options;
  Settings settings(PlanSettings(options));
  const auto set = [&](const char* name, const char* text) {
    ASSERT_TRUE(settings.Set(*settings.Find(name), {text}, Origin::kFlag, name).ok()) << name;
  };
  set("gpus", "8");
  set("seq-length", "64");
  set("tensor-leaves", "4");
  ASSERT_TRUE(Fill(settings, PlanSettings(options)).ok());
  const Settings train = TrainSettingsOf(model, settings, options, DeviceKind::kCpu).value();
  plan::SearchOptions search = {.base = CheckTrainSettings(train, 8)->train,
                                .ranks = 8,
                                .sequences = 64,
                                .machine = plan::MachineOf(*plan::FindGpu("h100"))};
  const plan::SearchResult result = plan::SearchMeshes(search).value();
  bool tensor = false, expert_tensor = false, pipeline = false;
  for (const plan::Candidate& c : result.fitting) {
    const std::string line = TrainLine(WithLayout(train, c));
    std::vector<std::string> words = absl::StrSplit(line, ' ');
    ASSERT_EQ(words[0] + " " + words[1], "moe train");
    words.erase(words.begin(), words.begin() + 2);
    const auto loaded = testing::Load(words);
    ASSERT_TRUE(loaded.ok()) << loaded.status() << line;
    const auto made = MakeTrainOptions(*loaded, {.ranks = 8});
    ASSERT_TRUE(made.ok()) << made.status() << line;
    lm::TrainConfig expected = search.base;
    plan::SetLayout(c.layout, c.work, expected);
    const lm::TrainConfig& config = made->train;
    EXPECT_EQ(config.trainer.session.mesh, expected.trainer.session.mesh);
    EXPECT_EQ(config.trainer.pipeline_chunks, c.layout.chunks);
    if (c.layout.mesh.pipeline > 1) {
      EXPECT_EQ(PipelineOf(config.trainer).schedule, c.layout.schedule);
    }
    EXPECT_EQ(config.trainer.zero, c.layout.zero);
    EXPECT_EQ(config.model.recompute, c.layout.recompute);
    EXPECT_EQ(config.micro_batch_size, c.layout.micro_batch_size);
    EXPECT_EQ(config.trainer.micro_batches, 64 / c.layout.micro_batch_size);
    EXPECT_EQ(config.model.num_query_groups, 2);
    EXPECT_EQ(config.model.moe.router.num_experts, 8);
    EXPECT_EQ(config.model.vocab_size, 512);
    tensor |= c.layout.mesh.tensor > 1;
    expert_tensor |= c.layout.mesh.expert_tensor > 1;
    pipeline |= c.layout.mesh.pipeline > 1;
  }
  EXPECT_TRUE(tensor && expert_tensor && pipeline);
}

TEST(PlanTableTest, HasEtpWhereRanksShareExperts) {
  PlanRow row;
  row.candidate.layout.mesh = {.tensor = 2, .pipeline = 4, .expert = 8};
  const std::string alone = PlanTable({row});
  EXPECT_THAT(alone, AllOf(HasSubstr("4x2x8"), ::testing::Not(HasSubstr("ETP"))));
  EXPECT_EQ(MeshText(row.candidate.layout.mesh), "4x2x8");
  PlanRow shared = row;
  shared.candidate.layout.mesh.expert_tensor = 2;
  EXPECT_THAT(PlanTable({row, shared}), HasSubstr("PPxTPxEP   ETP"));
  EXPECT_EQ(MeshText(shared.candidate.layout.mesh), "4x2x8 ETP 2");
}

TEST(PlanSizes, HaveUnits) {
  EXPECT_EQ(SizeInBytes("--hbm", "80GiB").value(), 80 * 0x1p30);
  EXPECT_EQ(SizeInBytes("--hbm", "0.5GB").value(), 5e8);
  EXPECT_EQ(SizeInBytes("--hbm", "64e9").value(), 64e9);
  EXPECT_EQ(SizeInBytes("--hbm", "512MiB").value(), 0x1p29);
  for (const char* const wrong : {"", "80 G", "GiB", "-1GiB", "0", "nan", "1e400", "80Gib"}) {
    EXPECT_THAT(testing::ErrorOf(SizeInBytes("--hbm", wrong).status()),
                HasSubstr(absl::StrCat("--hbm is ", wrong)));
  }
}

class CalibrationFileTest : public IoTest {
 protected:
  static std::string Row(const std::string& op, const std::string& more) {
    return absl::StrCat(R"({"op": ")", op, R"(", "status": "ok", "backend": "local", "ranks": 4, )",
                        R"("hosts": 1, "host": "h", "cpu": "c", "gpu": null, "version": "1", )",
                        R"("commit": "a", )", more, "}\n");
  }
  static std::string Expert(double tokens, double gflops) {
    return Row("layer",
               absl::StrCat(R"("dtype": "bf16", "phase": "expert", "experts": 8, )",
                            R"("topk": 2, "expert_parallel_size": 4, "hidden": 64, )",
                            R"("ffn": 64, "tokens": )", tokens, R"(, "gflops_per_s": )", gflops));
  }
  static std::string Gate(double us) {
    return Row("layer", absl::StrCat(R"("dtype": "bf16", "phase": "gate", "tokens": 64, )",
                                     R"("expert_parallel_size": 4, "hidden": 64, "ffn": 64, )",
                                     R"("time_us": )", us));
  }
  static std::string Call(const std::string& op, double size, double us) {
    return Row(op, absl::StrCat(R"("size_bytes": )", size, R"(, "time_us_p50": )", us));
  }
  absl::StatusOr<CalibrationFile> Read(const std::string& text, int ranks = 4) {
    return ReadCalibration({Write("rows.json", text)}, ranks, "bf16");
  }
};

// Experts of 64 and 256 rows at 1 and 2 Gflop/s a rank: 1 / y = 1/2.6 (1 + 102.4 / rows) ...
TEST_F(CalibrationFileTest, RowsBecomeTheConstantsOfAMachine) {
  const std::string text =
      absl::StrCat(Expert(64, 4), Expert(256, 8), Gate(20), Gate(30),
                   // 10 us and 1 GB/s: of 4 ranks three quarters of the bytes leave
                   Call("alltoallv", 4e6, 3010), Call("alltoallv", 8e6, 6010),
                   // an all-reduce sends 2 (n - 1) / n: 0.5 GB/s
                   Call("allreduce", 4e6, 12000), Call("allreduce", 8e6, 24000),
                   Call("memcpy", 1e6, 100), Call("allgather", 1, 1));
  const CalibrationFile file = Read(text).value();
  EXPECT_TRUE(file.on_cpu);
  const plan::Machine m = plan::Calibrate(file.samples, {}).value();
  const double fast = m.ProductSeconds(1e9, 256), slow = m.ProductSeconds(1e9, 64);
  EXPECT_NEAR(fast, 0.5, 1e-9);
  EXPECT_NEAR(slow, 1, 1e-9);
  EXPECT_NEAR(m.layer_s, 50e-6, 1e-12);
  EXPECT_NEAR(m.node.bytes_per_s, 1e9, 1);
  EXPECT_NEAR(m.node.latency_s, 10e-6, 1e-9);
  EXPECT_NEAR(m.sum_speed, 0.5, 1e-6);
  EXPECT_NEAR(m.memory_bytes_per_s, 2e10, 1);
  EXPECT_EQ(m.network.bytes_per_s, m.node.bytes_per_s);
}

TEST_F(CalibrationFileTest, WhatIsMissingOrOfAnotherMachineIsRefused) {
  const std::string all =
      absl::StrCat(Expert(64, 4), Gate(20), Call("alltoallv", 4e6, 3010), Call("memcpy", 1e6, 9));
  EXPECT_TRUE(Read(all).ok());
  // Other ranks share the cores otherwise.
  EXPECT_THAT(testing::ErrorOf(Read(all, 2).status()), HasSubstr("moe bench layer --ranks 2"));
  EXPECT_THAT(testing::ErrorOf(Read(Expert(64, 4) + Gate(20)).status()), HasSubstr("memcpy"));
  EXPECT_THAT(testing::ErrorOf(Read(Expert(64, 4) + Gate(20) + Call("memcpy", 1, 1)).status()),
              HasSubstr("alltoallv"));
  std::string other = Call("memcpy", 1e6, 9);
  other.replace(other.find(R"("cpu": "c")"), 10, R"("cpu": "d")");
  EXPECT_THAT(std::string(Read(all + other).status().message()),
              AllOf(HasSubstr("'cpu' is d, in rows before c"), HasSubstr("(line 5, ")));
  EXPECT_THAT(std::string(Read(Call("memcpy", 0, 1)).status().message()),
              HasSubstr("'size_bytes' is 0, expected a number above 0"));
  EXPECT_THAT(std::string(Read("{\"op\": 3}").status().message()), HasSubstr("'op' is 3"));
  EXPECT_FALSE(Read("[1]").ok());
  EXPECT_FALSE(Read("{").ok());
  EXPECT_THAT(OtherOrigin({.host = "elsewhere"}), HasSubstr("host elsewhere (here "));
}

// A run of 4 ranks on threads: its second and third steps, which are behind the first.
class CalibrationRunTest : public CalibrationFileTest {
 protected:
  static std::string Run(const std::string& settings, int ranks = 4) {
    return absl::StrCat(R"({"schema": "moe.train/1", "provenance": {"host": "h", "cpu": "c", )",
                        R"("version": "1", "commit": "a"}, "ranks": )", ranks,
                        R"(, "backend": "local", "settings": {"data": ["t"], "dtype": )",
                        R"("bf16", "ep": "2")", settings, "}}\n", Step(1, 1), Step(2, 40),
                        Step(3, 30));
  }
  static std::string Step(int step, double ms) {
    return absl::StrCat(R"({"step": )", step, R"(, "step_ms": )", ms, R"(, "attention_ms": 4, )",
                        R"("expert_ms": 6, "layer_ms": 2, "a2a_ms": 3, "output_ms": 1, )",
                        R"("optimizer_ms": 5, "pipeline_ms": 0, "all_reduce_ms": 9})", "\n");
  }
};

TEST_F(CalibrationRunTest, IsItsShortestStepBehindTheFirst) {
  const CalibrationFile file = Read(Run(R"(, "num-experts": "16")") + Run("", 2)).value();
  ASSERT_EQ(file.samples.steps.size(), 1u);  // two ranks share the cores otherwise
  const plan::TrainedStep& step = file.samples.steps[0];
  EXPECT_EQ(step.cost.experts, 16);
  EXPECT_EQ(step.layout.mesh.expert, 2);
  EXPECT_EQ(step.work.ranks, 4);
  EXPECT_NEAR(step.attention, 4e-3, 1e-12);
  EXPECT_NEAR(step.exchange, 3e-3, 1e-12);
  EXPECT_NEAR(step.gradients, 9e-3, 1e-12);  // what is in no other part of 30 ms
  // Of another type it does not count, so that there are no rows.
  EXPECT_THAT(testing::ErrorOf(Read(Run(R"(, "seed": "1")"), 2).status()), HasSubstr("no rows"));
}

TEST_F(CalibrationRunTest, WhoseLinesAreWrongIsRefused) {
  const auto error = [&](const std::string& text) {
    return std::string(Read(text).status().message());
  };
  EXPECT_THAT(error(Run(R"(, "gates": "3")")), HasSubstr("'settings.gates' is no setting"));
  EXPECT_THAT(error(Run(R"(, "steps": 3)")), HasSubstr("'settings.steps' is no setting"));
  EXPECT_THAT(error(Run(R"(, "num-layers": "x")")), HasSubstr("--num-layers is 'x'"));
  EXPECT_THAT(error(Run("", 3)), HasSubstr("no rows of a layer"));
  std::string without = Run("");
  without.replace(without.rfind("a2a_ms"), 3, "aaa");
  EXPECT_THAT(error(without), HasSubstr("'a2a_ms' is absent"));
  EXPECT_THAT(error(R"({"schema": "moe.train/1", "ranks": 4})"), HasSubstr("'provenance' is"));
  EXPECT_THAT(error(R"({"schema": "moe.train/1", "ranks": 4, "provenance": {}})"),
              HasSubstr("'settings' is no object"));
}

// Steps that a machine would take have its constants.
TEST(Calibration, FindsTheMachineOfSteps) {
  const plan::Machine truth = {.flops = 2e11,
                               .half_rows = 80,
                               .core_flops = 3e10,
                               .memory_bytes_per_s = 4e9,
                               .state_bytes_per_s = 9e9,
                               .layer_s = 2e-4,
                               .node = {.latency_s = 3e-5, .bytes_per_s = 1e9},
                               .sum_speed = 2,
                               .overlap = 0};
  lm::TrainConfig config;
  config.model.moe = {.router = {.num_experts = 8, .top_k = 2}, .ffn_hidden_size = 64};
  plan::Calibration samples;
  for (const int64_t size : {1, 2, 4}) {
    plan::TrainedStep step = {.cost = plan::CostOf(config.model),
                              .work = {.ranks = 4, .sequences = 16, .sequence_length = 64},
                              .layout = {.mesh = {.expert = 2}, .micro_batch_size = size}};
    const plan::StepTime time = plan::MeanStep(step.cost, truth, step.work, step.layout);
    step.attention = time.attention;
    step.experts = time.experts;
    step.layers = time.dense + time.memory + time.layers;
    step.exchange = time.exchange;
    step.optimizer = time.optimizer;
    step.gradients = time.gradients;
    samples.steps.push_back(step);
  }
  const plan::Machine found = plan::Calibrate(samples, {.overlap = 0}).value();
  const auto expect = [](double value, double expected) {
    EXPECT_NEAR(value, expected, 1e-6 * expected);
  };
  expect(found.flops, truth.flops);
  expect(found.half_rows, truth.half_rows);
  expect(found.core_flops, truth.core_flops);
  expect(found.memory_bytes_per_s, truth.memory_bytes_per_s);
  expect(found.state_bytes_per_s, truth.state_bytes_per_s);
  expect(found.layer_s, truth.layer_s);
  expect(found.node.latency_s, truth.node.latency_s);
  expect(found.node.bytes_per_s, truth.node.bytes_per_s);
  expect(found.sum_speed, truth.sum_speed);
  // Products that seem to take no time with many rows have their mean rate.
  samples.steps[2].experts /= 100;
  const plan::Machine mean = plan::Calibrate(samples, {.overlap = 0}).value();
  EXPECT_EQ(mean.half_rows, 0);
  EXPECT_GT(mean.flops, 0);
}

// Four ranks on two cores: while all compute each has half a core. Where half of a rank's passes
// are waits, and others use half of these, it has two thirds of one, and would take 4/3 of the time
// if none waited.
TEST(TrainedStep, IsAsLongAsIfAllRanksComputed) {
  const auto step = [](double wait_ms) {
    plan::TrainedStep step;
    step.SetParts([&](const char* key) -> double {
      const std::string name = key;
      if (name == "step_ms") return 41 + wait_ms;
      if (name == "a2a_ms") return wait_ms;
      return name == "expert_ms" ? 30 : name == "attention_ms" ? 8 : name == "output_ms" ? 2 : 0;
    });
    return step;
  };
  EXPECT_NEAR(step(0).gradients, 1e-3, 1e-12);
  for (const auto& [wait_ms, expert_ms] :
       {std::pair(0.0, 30.0), std::pair(40.0, 40.0), std::pair(120.0, 48.0)}) {
    const plan::TrainedStep all = step(wait_ms).WhileAllCompute(2);
    EXPECT_NEAR(all.experts, expert_ms * 1e-3, 1e-12) << wait_ms;
    EXPECT_NEAR(all.attention, expert_ms * 8 / 30 * 1e-3, 1e-12) << wait_ms;
    EXPECT_NEAR(all.exchange, wait_ms * 1e-3, 1e-12);
    EXPECT_NEAR(all.gradients, 1e-3, 1e-12);
    EXPECT_NEAR(step(wait_ms).WhileAllCompute(1).experts, 30e-3, 1e-12);
  }
}

// Stages that wait leave their cores to others: with all four ranks on one, only the way of rows
// is waited for, and a step takes the mean of the ranks. With nearly a core for each it takes what
// they take alone, and somewhat more while all compute.
TEST(PredictStep, OfRanksThatShareCoresHidesWaits) {
  plan::Machine machine = plan::MachineOf(*plan::FindGpu("h100"));
  machine.overlap = 0;
  lm::TrainConfig config;
  config.model.num_layers = 4;
  const plan::ModelCost cost = plan::CostOf(config.model);
  const plan::Workload work = {.ranks = 4, .sequences = 8, .sequence_length = 128};
  const plan::Layout layout = {.mesh = {.pipeline = 4}};
  plan::Bubbles bubbles;
  const plan::StepTime alone = plan::PredictStep(cost, machine, work, layout, bubbles);
  EXPECT_GT(alone.bubble, 0);
  machine.sharers = 1.05;
  const plan::StepTime few = plan::PredictStep(cost, machine, work, layout, bubbles);
  EXPECT_GE(few.passes() + few.bubble, (alone.passes() + alone.bubble) / 1.05);
  EXPECT_LE(few.passes() + few.bubble, alone.passes() + alone.bubble);
  machine.sharers = 4;
  const plan::StepTime shared = plan::PredictStep(cost, machine, work, layout, bubbles);
  const double mean = plan::MeanStep(cost, machine, work, layout).total();
  EXPECT_GE(shared.total(), mean);
  EXPECT_LE(shared.total(), 1.01 * mean);
}

TEST(FitLineTest, IsLeastSquaresOfRelativeErrorsWithoutNegativeTerms) {
  const plan::Line exact = plan::FitLine({{1, 5}, {2, 7}, {10, 23}});
  EXPECT_NEAR(exact.constant, 3, 1e-9);
  EXPECT_NEAR(exact.slope, 2, 1e-9);
  EXPECT_EQ(plan::FitLine({{4, 8}}).constant, 8);
  EXPECT_EQ(plan::FitLine({{1, 8}, {4, 2}}).slope, 0);             // falls
  EXPECT_EQ(plan::FitLine({{1, 1}, {2, 4}, {3, 9}}).constant, 0);  // below 0 at 0
}

TEST(PlannerErrorTest, IsOfMeasuredRowsAlone) {
  const auto row = [](double predicted, double measured) {
    PlanRow row;
    row.candidate.time.experts = predicted;
    if (measured > 0) row.measured = {.seconds = measured, .peak_bytes = 1};
    return row;
  };
  const PlannerError error = PlannerErrorOf({row(1.2, 1), row(0.9, 1), row(0.4, 0.8), row(7, 0)});
  EXPECT_NEAR(error.median_pct, 20, 1e-9);
  EXPECT_NEAR(error.most_pct, 50, 1e-9);
  EXPECT_NEAR(error.first_pct, 25, 1e-9);
}

// A checkpoint that stalls 0.2 s, a failure in 3 h: 0.6 %; one of 81 s every 22 minutes: 12 %.
TEST(CheckpointIntervalTest, LosesLeast) {
  const plan::CheckpointInterval quick = plan::BestInterval(0.2, 3 * 3600);
  EXPECT_NEAR(quick.interval_s, 65.7, 0.1);
  EXPECT_NEAR(quick.lost(), 0.0061, 1e-4);
  EXPECT_DOUBLE_EQ(quick.stalled, quick.done_again);
  const plan::CheckpointInterval slow = plan::BestInterval(81, 3 * 3600);
  EXPECT_NEAR(slow.interval_s / 60, 22, 0.1);
  EXPECT_NEAR(slow.lost(), 0.122, 1e-3);
}

}  // namespace
}  // namespace moe::cli
