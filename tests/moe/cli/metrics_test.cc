#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/metrics_file.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/sweep/sweep_output.h"
#include "moe/cli/train/live_curves.h"
#include "moe/cli/train/progress.h"
#include "tests/moe/cli/settings_harness.h"
#include "tests/moe/io/io_test.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

void SetPhase(lm::StepMetrics& metrics, Phase phase, double seconds) {
  metrics.phase_seconds[static_cast<int>(phase)] = seconds;
}

// The step of the interface's example line.
lm::StepMetrics Example() {
  lm::StepMetrics m;
  m.step = 120;
  m.loss = 3.4215f;
  m.learning_rate = 2.95e-4;
  m.grad_norm = 0.873;
  m.step_seconds = 0.0412;
  m.tokens_per_second = 198312;
  m.drop_fraction = 0.0042;
  m.max_violation = 0.31;
  m.aux_loss = 1.02e-2;
  m.peak_bytes = int64_t{812} << 20;
  SetPhase(m, Phase::kDispatch, 0.0081);
  SetPhase(m, Phase::kCombine, 0.0040);
  SetPhase(m, Phase::kExpert, 0.0098);
  SetPhase(m, Phase::kAllReduce, 0.0032);
  m.expert_load = {{3, 5}, {8, 0}};
  return m;
}

TEST(ProgressTest, TheLineIsTheInterfaces) {
  EXPECT_EQ(ProgressText(Example(), 1000, 36.3),
            "step   120/1000 | loss 3.4215 | lr 2.95e-04 | gnorm 0.873 | 41.2 ms | 198,312 tok/s | "
            "moe: a2a 12.1 ms 29% expert 9.8 ms drop 0.42% maxvio 0.31 dead 0 aux 1.02e-02 | ar "
            "3.2 ms 8% | 812 MiB | eta 00:00:36");
}

TEST(ProgressTest, Float16ShowsItsLossScale) {
  lm::StepMetrics m = Example();
  m.loss_scale = 32768;
  EXPECT_THAT(ProgressText(m, 1000, 0), HasSubstr("| gnorm 0.873 | scale 32768 | 41.2 ms |"));
  m.grad_norm = std::numeric_limits<double>::infinity();
  m.skipped = true;
  EXPECT_THAT(ProgressText(m, 1000, 0), HasSubstr("| gnorm inf | scale 32768 skipped | 41.2 ms |"));
}

// The text that `show` writes to a file.
std::string Written(const std::function<void(std::FILE*)>& show) {
  std::FILE* const file = std::tmpfile();
  show(file);
  std::rewind(file);
  std::string text(1 << 16, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

// The text of Progress without a terminal, or with a simulated one.
std::string Shown(const ProgressOptions& options, const Terminal& terminal,
                  const std::vector<lm::StepMetrics>& steps) {
  return Written([&](std::FILE* file) {
    Progress progress(options, terminal, file);
    for (const lm::StepMetrics& m : steps) progress.Show(m);
  });
}

std::vector<lm::StepMetrics> Steps(int64_t count) {
  std::vector<lm::StepMetrics> steps(count, Example());
  for (int64_t i = 0; i < count; ++i) steps[i].step = i + 1;
  return steps;
}

TEST(ProgressTest, PlainLinesComeEveryInterval) {
  std::vector<int> shown;
  std::istringstream lines(Shown({.steps = 8, .log_interval = 3}, {}, Steps(8)));
  for (std::string line; std::getline(lines, line);) shown.push_back(std::stoi(line.substr(4)));
  EXPECT_THAT(shown, ElementsAre(1, 3, 6, 8));
  EXPECT_EQ(Shown({.steps = 3, .quiet = true}, {}, Steps(3)), "");
}

TEST(ProgressTest, NarrowLinesHaveEtaAndSpeedFirst) {
  const auto text = [](size_t columns) {
    return ProgressText(Example(), 1000, 36.3, columns);
  };
  EXPECT_EQ(text(60), "step   120/1000 | eta 00:00:36 | 198,312 tok/s | loss 3.4215");
  EXPECT_EQ(text(59), "step   120/1000 | eta 00:00:36 | 198,312 tok/s");
  EXPECT_EQ(text(29), "step   120/1000");
  EXPECT_EQ(text(6), "step  ");
  EXPECT_EQ(
      text(100),
      "step   120/1000 | eta 00:00:36 | 198,312 tok/s | loss 3.4215 | 41.2 ms | lr 2.95e-04 | "
      "gnorm 0.873");
  const std::string whole = ProgressText(Example(), 1000, 36.3);
  EXPECT_EQ(text(whole.size()), whole);
  EXPECT_NE(text(whole.size() - 1), whole);
}

TEST(ProgressTest, ATerminalHasOneRefreshedLine) {
  const std::string text =
      Shown({.steps = 2, .log_interval = 100}, {.present = true, .columns = 80}, Steps(2));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);  // the end of the last state
  EXPECT_EQ(std::count(text.begin(), text.end(), '\r'), 2);
  EXPECT_THAT(text,
              HasSubstr("\r[######------] step     1/2 | eta 00:00:00 | 198,312 tok/s | loss"));
  EXPECT_THAT(text,
              HasSubstr("\r[############] step     2/2 | eta 00:00:00 | 198,312 tok/s | loss"));
  EXPECT_EQ(text.find("\033[36m"), text.npos);
  EXPECT_THAT(Shown({.steps = 1}, {.present = true, .color = true}, Steps(1)),
              HasSubstr("\033[36m"));
  const size_t first = text.find('\r');
  EXPECT_LE(text.find("\033[K") - first - 1, 79u);  // one column stays free: no line break
  EXPECT_THAT(Shown({.steps = 1}, {.present = true, .columns = 50}, Steps(1)),
              HasSubstr("\rstep     1/1 | eta 00:00:00 | 198,312 tok/s\033[K"));
}

TEST(ProgressTest, ValidationHasALineOfItsOwn) {
  std::vector<lm::StepMetrics> steps = Steps(1);
  steps[0].has_validation = true;
  steps[0].validation_loss = static_cast<float>(2 * std::log(2.0));
  EXPECT_THAT(Shown({.steps = 1}, {}, steps), HasSubstr("2.0000 bits per byte\n"));
}

TEST(SweepProgressTest, TheEtaIsSeenOnNarrowTerminals) {
  // The text on a terminal when point 7 of 36 starts.
  const auto shown = [](size_t columns) {
    return Written([&](std::FILE* file) {
      SweepProgress progress({.points = 36, .to_run = 30}, {.present = true, .columns = columns},
                             file);
      progress.Start(7, "E=16 k=2 cf=1.25");
    });
  };
  EXPECT_EQ(shown(80), "\r[ 7/36] E=16 k=2 cf=1.25 eta --:--:--\033[K\n");
  EXPECT_EQ(shown(38), "\r[ 7/36] E=16 k=2 cf=1.25 eta --:--:--\033[K\n");
  EXPECT_EQ(shown(37), "\r[ 7/36] eta --:--:-- E=16 k=2 cf=1.2\033[K\n");
  EXPECT_EQ(shown(21), "\r[ 7/36] eta --:--:--\033[K\n");
}

TEST(TextTest, NumbersForPeople) {
  EXPECT_EQ(Counted(1, "rank"), "1 rank");
  EXPECT_EQ(Counted(0, "rank"), "0 ranks");
  EXPECT_EQ(WithCommas(0), "0");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(1000), "1,000");
  EXPECT_EQ(WithCommas(-1234567), "-1,234,567");
  EXPECT_EQ(Counted(1234, "rank"), "1,234 ranks");
  EXPECT_EQ(Counted(0, "micro-batch"), "0 micro-batches");
  EXPECT_EQ(ClockText(0.4), "00:00:00");
  EXPECT_EQ(ClockText(3661.6), "01:01:02");
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(999), "999 B");
  EXPECT_EQ(BytesText(1000), "1.00 kB");
  EXPECT_EQ(BytesText(12345), "12.3 kB");
  EXPECT_EQ(BytesText(2.5e9), "2.50 GB");
  EXPECT_EQ(BytesText(999999), "1.00 MB");
}

TEST(HexTest, ReadsBackToTheSameBits) {
  EXPECT_EQ(HexOf(1.0f), "0x1p+0");
  EXPECT_EQ(HexOf(5.5f), "0x1.6p+2");
  for (const float value : {3.4215f, 1e-45f, 3.4e38f, -0.0f, 0.1f, 2.0f / 3.0f}) {
    const float back = std::strtof(HexOf(value).c_str(), nullptr);
    EXPECT_EQ(std::signbit(back), std::signbit(value));
    EXPECT_EQ(back, value);
  }
}

TEST(StartLineTest, HasTheBuildTheRanksAndAllSettings) {
  const auto settings = testing::Load({"--data", "a", "--data", "b\xff", "--steps", "7"}).value();
  const World world = {.ranks = 3, .backend = Backend::kMpi};
  const Json line = Json::parse(StartLine({{"version", "1"}, {"host", "h"}}, world, settings));
  std::vector<std::string> keys;
  for (const auto& [key, value] : line.items()) keys.push_back(key);
  EXPECT_THAT(keys, ElementsAre("schema", "provenance", "ranks", "backend", "line", "settings"));
  EXPECT_EQ(line["schema"], "moe.train/1");
  EXPECT_EQ(line["provenance"].dump(), R"({"version":"1","host":"h"})");
  EXPECT_EQ(line["ranks"], 3);
  EXPECT_EQ(line["backend"], "mpi");
  EXPECT_EQ(line["line"], "moe train --data a --data 'b\uFFFD' --steps 7");
  const Json& values = line["settings"];
  EXPECT_EQ(values["data"], Json({"a", "b\uFFFD"}));
  EXPECT_EQ(values["steps"], "7");
  EXPECT_EQ(values["adam-beta2"], "0.95");            // a default
  EXPECT_FALSE(values.contains("train-batch-size"));  // no value
  EXPECT_FALSE(values.contains("help"));
}

TEST(StepLineTest, HasEveryKeyInOrder) {
  const Json line = Json::parse(StepLine(Example()));
  std::vector<std::string> keys;
  for (const auto& [key, value] : line.items()) keys.push_back(key);
  EXPECT_THAT(keys,
              ElementsAre("step", "loss", "loss_hex", "val_loss", "val_loss_hex", "lr", "grad_norm",
                          "loss_scale", "skipped", "grid_loss", "tokens_per_s", "step_ms", "a2a_ms",
                          "expert_ms", "all_reduce_ms", "attention_ms", "output_ms", "optimizer_ms",
                          "layer_ms", "pipeline_ms", "drop_fraction", "max_vio", "dead_experts",
                          "aux_loss", "router_entropy", "peak_bytes", "expert_load"));
  EXPECT_EQ(line["step"], 120);
  EXPECT_EQ(line["loss"].get<float>(), 3.4215f);
  EXPECT_EQ(std::strtof(line["loss_hex"].get<std::string>().c_str(), nullptr), 3.4215f);
  EXPECT_TRUE(line["val_loss"].is_null());
  EXPECT_TRUE(line["val_loss_hex"].is_null());
  EXPECT_NEAR(line["a2a_ms"].get<double>(), 12.1, 1e-9);
  EXPECT_NEAR(line["step_ms"].get<double>(), 41.2, 1e-9);
  EXPECT_EQ(line["expert_load"], Json::parse("[[3,5],[8,0]]"));
}

TEST(StepLineTest, LossScaleIsThereForFloat16) {
  lm::StepMetrics m = Example();
  const Json without = Json::parse(StepLine(m));
  EXPECT_TRUE(without["loss_scale"].is_null());
  EXPECT_EQ(without["skipped"], false);
  m.loss_scale = 1024;
  m.skipped = true;
  m.grad_norm = std::numeric_limits<double>::infinity();
  const Json with = Json::parse(StepLine(m));
  EXPECT_EQ(with["loss_scale"], 1024);
  EXPECT_EQ(with["skipped"], true);
  EXPECT_TRUE(with["grad_norm"].is_null());
}

TEST(StepLineTest, ValidationIsThereWhenMeasured) {
  lm::StepMetrics metrics = Example();
  metrics.has_validation = true;
  metrics.validation_loss = 1.25f;
  const Json line = Json::parse(StepLine(metrics));
  EXPECT_EQ(line["val_loss"], 1.25);
  EXPECT_EQ(line["val_loss_hex"], "0x1.4p+0");
}

TEST(FinalLineTest, HasTheHashAndBothLosses) {
  lm::TrainReport report;
  report.steps = 3;
  report.validation_loss_before = 5.5f;
  report.validation_loss_after = 2.5f;
  report.weights_xxh3 = 0xabc;
  report.state_bytes = 7;
  report.state_bytes_formula = 6;
  const Json line = Json::parse(FinalLine(report));
  EXPECT_EQ(line["weights_xxh3"], "0000000000000abc");
  EXPECT_EQ(line["val_loss_before"], 5.5);
  EXPECT_EQ(line["val_loss"], 2.5);
  EXPECT_EQ(line["val_loss_hex"], "0x1.4p+1");
  EXPECT_EQ(line["steps"], 3);
  EXPECT_EQ(line["state_bytes"], 7);
  EXPECT_EQ(line["state_bytes_formula"], 6);
  EXPECT_EQ(line["bf16_order"], nullptr);
  report.bfloat16_order = BFloat16Order::kTile;
  EXPECT_EQ(Json::parse(FinalLine(report))["bf16_order"], "tile");
}

// refusals_test and cli_train have impossible folders, earlier runs and full disks.
class MetricsFileTest : public IoTest {};

TEST_F(MetricsFileTest, MakesTheFolderAndWritesLines) {
  const fs::path folder = root_ / "a/b";
  auto file = MetricsFile::Create(folder.string() + "/").value();
  EXPECT_TRUE(file->Append("{\"step\":1}").ok());
  EXPECT_EQ(Read(folder / "metrics.jsonl"), "{\"step\":1}\n");  // while the run continues
  EXPECT_TRUE(file->Append("{\"step\":2}").ok());
  file.reset();
  EXPECT_EQ(Read(folder / "metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n");
}

TEST_F(MetricsFileTest, LeavesNothingWithoutALine) {
  { ASSERT_TRUE(MetricsFile::Create((root_ / "a/b").string()).ok()); }
  EXPECT_FALSE(fs::exists(root_ / "a"));
  EXPECT_TRUE(fs::exists(root_));
}

TEST(LiveCurvesTest, PrometheusTextHasTheStepsNumbersAndEachLayers) {
  lm::StepMetrics m = Example();
  m.grad_norm = std::numeric_limits<double>::infinity();
  const std::string text = PrometheusText(m, 2, 1000, absl::FromUnixSeconds(1'500'000'000));
  EXPECT_THAT(text, StartsWith("# HELP moe_train_step The step that was taken last, from 1.\n"
                               "# TYPE moe_train_step gauge\n"
                               "moe_train_step 120\n"));
  EXPECT_THAT(text, HasSubstr("\nmoe_train_step_time_seconds 1500000000\n"));
  EXPECT_THAT(text, HasSubstr("\nmoe_train_grad_norm inf\n"));
  EXPECT_THAT(text, HasSubstr("\nmoe_train_a2a_ms 12.1\n"));
  EXPECT_THAT(text, Not(HasSubstr("val_loss")));
  EXPECT_THAT(text, EndsWith("\n# TYPE moe_train_layer_max_vio gauge\n"
                             "moe_train_layer_max_vio{layer=\"0\"} 0.25\n"
                             "moe_train_layer_max_vio{layer=\"1\"} 1\n"));
}

TEST_F(MetricsFileTest, PrometheusReadsTheNewestStepAtMostOnceASecond) {
  const std::string path = (root_ / "m.prom").string(), run(16, 'a');
  std::ofstream(path + "." + std::string(16, 'b')) << "half a te";  // of a process that was killed
  PrometheusFile file(path, run);
  lm::StepMetrics m = Example();
  const absl::Time start = absl::FromUnixSeconds(1'500'000'000);
  const auto show = [&](int64_t step, absl::Duration at) {
    m.step = step;
    file.Show(m, 2, 9, start + at);
    const std::string text = Read(path);
    return text.substr(text.find("\nmoe_train_step ") + 1, 16);
  };
  m.has_validation = true;
  m.validation_loss = 3;
  EXPECT_EQ(show(1, absl::ZeroDuration()), "moe_train_step 1");
  m.has_validation = false;
  EXPECT_EQ(show(2, absl::Milliseconds(999)), "moe_train_step 1");
  EXPECT_EQ(show(3, absl::Seconds(1)), "moe_train_step 3");
  EXPECT_THAT(Read(path), HasSubstr("\nmoe_train_val_loss 3\n"));  // still
  EXPECT_EQ(show(4, absl::Milliseconds(1001)), "moe_train_step 3");
  file.End();
  EXPECT_THAT(Read(path), HasSubstr("\nmoe_train_step 4\n"));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1);
}

TEST_F(MetricsFileTest, EventFilesSortInTheOrderOfTheirRuns) {
  const std::string folder = (root_ / "events").string();
  EventFile::Create(folder, EarlierRun::kRefused).IgnoreError();
  EXPECT_FALSE(fs::exists(folder));  // no step, no file
  fs::create_directories(folder);
  const std::string ahead = folder + "/events.out.tfevents.9000000000.host.1";  // another clock
  std::ofstream(ahead) << "events";
  EXPECT_THAT(std::string(EventFile::Create(folder, EarlierRun::kRefused).status().message()),
              HasSubstr("which holds an earlier run, expected a new folder"));
  const auto resumed = EventFile::Create(folder, EarlierRun::kContinued).value();
  EXPECT_GT(resumed->path(), ahead);
  ASSERT_TRUE(resumed->Append(Example(), 2, absl::Now()).ok());
  const auto first_bytes = fs::file_size(resumed->path());
  ASSERT_TRUE(resumed->Append(Example(), 2, absl::Now()).ok());
  EXPECT_LT(fs::file_size(resumed->path()), 2 * first_bytes);  // version and restart once
}

TEST_F(MetricsFileTest, AnEmptyFileIsNoRun) {
  std::ofstream(root_ / "metrics.jsonl");
  auto file = MetricsFile::Create(root_.string());
  ASSERT_TRUE(file.ok() && (*file)->Append("{}").ok());
  EXPECT_EQ(Read(root_ / "metrics.jsonl"), "{}\n");
}

TEST_F(MetricsFileTest, OneRunAtATimeWritesToAFolder) {
  auto first = MetricsFile::Create(root_.string());
  ASSERT_TRUE(first.ok() && (*first)->Append("{}").ok());
  const absl::Status status = MetricsFile::Create(root_.string()).status();
  EXPECT_EQ(ExitCodeOf(status), ExitCode::kUsage) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("is being written by another run"));
  EXPECT_EQ(Read(root_ / "metrics.jsonl"), "{}\n");
  first->reset();
  fs::remove(root_ / "metrics.jsonl");
  EXPECT_TRUE(MetricsFile::Create(root_.string()).ok());
}

// A resumed run replaces the file by the lines that it keeps, and reports those that it leaves out.
TEST_F(MetricsFileTest, WhatIsWrongWithAnEarlierRunIsCounted) {
  const auto lines_before = [&](int64_t step, const std::string& text) {
    std::ofstream(root_ / "metrics.jsonl") << text;
    const auto file = MetricsFile::Create(root_.string(), EarlierRun::kContinued);
    return (*file)->LinesBefore(step).value();
  };
  const std::string start = "{\"schema\":\"moe.train/1\"}\n", end = "{\"weights_xxh3\":\"ab\"}\n";
  const auto steps = [](const std::vector<int>& numbers) {
    std::string text;
    for (const int step : numbers) text += "{\"step\":" + std::to_string(step) + "}\n";
    return text;
  };
  const auto damage = [&](int64_t step, const std::string& text) {
    const std::string said = lines_before(step, text).damage;
    return said.empty() ? said : said.substr(said.find(": ") + 2);
  };
  // A run that ended, one that was killed after its checkpoint, one that was started with another
  // --out.
  EXPECT_EQ(lines_before(3, start + steps({1, 2, 3}) + end).text, start + steps({1, 2}));
  EXPECT_EQ(damage(3, start + steps({1, 2, 3}) + end), "");
  EXPECT_EQ(damage(3, start + steps({1, 2})), "");
  EXPECT_EQ(damage(8, start + steps({6, 7})), "");
  EXPECT_EQ(damage(8, ""), "");

  EXPECT_EQ(lines_before(4, start + steps({1}) + "\0{{\n[2]\n" + steps({3})).text,
            start + steps({1, 3}));
  EXPECT_EQ(damage(4, start + steps({1}) + "{\"ste\n[2]\n" + steps({3}) + "{\"step\":"),
            "3 lines of no run left out, the first is line 3; 1 step missing, the first is step 2");
  EXPECT_EQ(damage(11, start + steps({1, 2, 5})), "7 steps missing, the first is step 3");
  const std::string twice =
      start + steps({3, 4, 5, 3}) + "{\"step\":4,\"second\":1}\n" + steps({5});
  EXPECT_EQ(damage(6, twice), "3 lines of a step that has a later one left out");
  EXPECT_EQ(lines_before(6, twice).text,
            start + steps({3}) + "{\"step\":4,\"second\":1}\n" + steps({5}));
}

TEST_F(MetricsFileTest, AFolderThatIsDeletedIsAnIoError) {
  auto file = MetricsFile::Create((root_ / "a").string());
  ASSERT_TRUE(file.ok() && (*file)->Append("{}").ok());
  fs::remove_all(root_ / "a");
  const absl::Status status = (*file)->Append("{}");
  EXPECT_EQ(ExitCodeOf(status), ExitCode::kIo) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("metrics.jsonl': it was deleted"));
}

}  // namespace
}  // namespace moe::cli
