// Figures, rows, their file and their table.
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/measure/sweep_row.h"
#include "moe/cli/report/rows.h"
#include "moe/cli/sweep/result_file.h"
#include "tests/moe/io/io_test.h"

namespace moe::sweep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Point PointAt(int64_t experts, double capacity_factor) {
  return {.measure = "train",
          .settings = "--num-experts " + std::to_string(experts) + " --data 'a \"b\".txt'",
          .backend = "local",
          .text_xxh3 = "0123456789abcdef",
          .experts = experts,
          .topk = 2,
          .capacity_factor = capacity_factor,
          .ep = 2,
          .tp = 1,
          .pp = 1,
          .ranks = 4,
          .overlap = 1,
          .hidden = 32,
          .ffn = 64,
          .tokens_per_rank = 128,
          .dtype = "f32",
          .router = "mixtral",
          .routing = "",
          .dispatch = "staged",
          .threads = 1,
          .seed = 18446744073709551615u,
          .repetitions = 3};
}

Summary Speed(double tokens_per_s, double loss, double drop = 1) {
  return Summarize(std::vector<Figures>{{.params_total = 1000,
                                         .params_active = 500,
                                         .tokens_per_s = tokens_per_s,
                                         .step_ms = 10,
                                         .a2a_ms = 2,
                                         .all_reduce_ms = 1,
                                         .expert_ms = 3,
                                         .drop_initial_pct = 5,
                                         .drop_final_pct = drop,
                                         .max_violation = 0.5,
                                         .dead_experts = 0,
                                         .validation_loss = loss,
                                         .peak_bytes = 3 * 0x1p20}});
}

TEST(MeanSd, IsThatOfTheSample) {
  // By hand: mean 5, squares 9 1 1 1 0 0 4 16 = 32, sd sqrt(32 / 7).
  const std::vector<double> values = {2, 4, 4, 4, 5, 5, 7, 9};
  EXPECT_DOUBLE_EQ(MeanSdOf(values).mean, 5);
  EXPECT_DOUBLE_EQ(MeanSdOf(values).sd, std::sqrt(32.0 / 7));
  EXPECT_DOUBLE_EQ(MeanSdOf(std::vector<double>{3}).mean, 3);
  EXPECT_TRUE(std::isnan(MeanSdOf(std::vector<double>{3}).sd));
  EXPECT_TRUE(std::isnan(MeanSdOf({}).mean));
  EXPECT_EQ(MeanSdOf(std::vector<double>{3, 3, 3}).sd, 0);
}

TEST(Summarize, TakesMeansAndTheLargestPeak) {
  const Summary s = Summarize(std::vector<Figures>{
      {.tokens_per_s = 90, .drop_final_pct = 1, .validation_loss = 2, .peak_bytes = 7},
      {.tokens_per_s = 110, .drop_final_pct = 3, .validation_loss = 4, .peak_bytes = 5}});
  EXPECT_DOUBLE_EQ(s.mean.tokens_per_s, 100);
  EXPECT_DOUBLE_EQ(s.tokens_per_s_sd, std::sqrt(200.0));  // 10^2 + 10^2, over n - 1 = 1
  EXPECT_DOUBLE_EQ(s.mean.drop_final_pct, 2);
  EXPECT_DOUBLE_EQ(s.validation_loss_sd, std::sqrt(2.0));
  EXPECT_EQ(s.mean.peak_bytes, 7);
  EXPECT_TRUE(std::isnan(s.mean.all_reduce_ms));
}

TEST(TrainFigures, LeaveTheFirstStepOutOfSpeedAndAverageTheLastTenthOfDrops) {
  TrainFigures figures;
  for (int step = 1; step <= 20; ++step) {
    lm::StepMetrics m;
    m.step = step;
    m.step_seconds = step == 1 ? 100 : 0.5;
    m.tokens_per_second = 64 / m.step_seconds;
    m.drop_fraction = step == 1 ? 0.4 : step == 19 ? 0.1 : step == 20 ? 0.2 : 0.9;
    m.max_violation = step == 19 ? 1 : step == 20 ? 2 : 50;
    m.dead_experts = step == 20 ? 1 : 0;
    m.phase_seconds[static_cast<int>(Phase::kDispatch)] = step == 1 ? 50 : 0.02;
    m.phase_seconds[static_cast<int>(Phase::kCombine)] = step == 1 ? 50 : 0.03;
    m.peak_bytes = step == 3 ? 900 : 800;
    figures.Add(m);
  }
  lm::TrainReport report;
  report.validation_loss_after = 2.5f;
  report.parameters_total = 12;
  report.parameters_active = 7;
  const Figures f = figures.Finish(report);
  EXPECT_NEAR(f.tokens_per_s, 128, 1e-9);
  EXPECT_NEAR(f.step_ms, 500, 1e-9);
  EXPECT_NEAR(f.a2a_ms, 50, 1e-9);
  EXPECT_NEAR(f.drop_initial_pct, 40, 1e-9);
  EXPECT_NEAR(f.drop_final_pct, 15, 1e-9);  // two of twenty steps
  EXPECT_NEAR(f.max_violation, 1.5, 1e-9);
  EXPECT_NEAR(f.dead_experts, 0.5, 1e-9);
  EXPECT_EQ(f.validation_loss, 2.5);
  EXPECT_EQ(f.peak_bytes, 900);
  EXPECT_EQ(f.params_active, 7);
}

TEST(TrainFigures, OneStepIsFirstAndLast) {
  TrainFigures figures;
  lm::StepMetrics m;
  m.step_seconds = 2;
  m.tokens_per_second = 32;
  m.drop_fraction = 0.25;
  figures.Add(m);
  const Figures f = figures.Finish({});
  EXPECT_NEAR(f.tokens_per_s, 32, 1e-9);
  EXPECT_NEAR(f.drop_initial_pct, 25, 1e-9);
  EXPECT_NEAR(f.drop_final_pct, 25, 1e-9);
}

TEST(LayerFigures, AddBothPassesAndKeepDropsAsPercent) {
  measure::LayerResult result;
  const auto row = [&](const char* pass, const char* phase, double us) {
    measure::LayerRow added;
    added.pass = pass;
    added.phase = phase;
    added.time_us.p50 = 1.4 * us;  // the slowest rank's: larger than the mean
    if (added.phase == "all") added.time_us.p50 = us;
    added.share_pct = 100 * us / (added.pass == "forward" ? 1500 : 3000);
    result.rows.push_back(added);
  };
  row("forward", "dispatch", 100);
  row("forward", "combine", 200);
  row("forward", "expert", 1000);
  row("forward", "all", 1500);
  row("backward", "dispatch", 300);
  row("backward", "combine", 400);
  row("backward", "expert", 2000);
  row("backward", "all", 3000);
  result.figures.step_us.p50 = 4500;
  result.figures.tokens_per_s = 1e6;
  result.figures.drop_fraction = 0.25;
  result.figures.max_vio = 1.5;
  result.figures.dead_experts = 2;
  result.figures.peak_bytes = 7;
  const Figures f = LayerFigures(result);
  EXPECT_DOUBLE_EQ(f.step_ms, 4.5);
  EXPECT_DOUBLE_EQ(f.a2a_ms, 1);
  EXPECT_DOUBLE_EQ(f.expert_ms, 3);
  EXPECT_EQ(f.tokens_per_s, 1e6);
  EXPECT_EQ(f.drop_initial_pct, 25);
  EXPECT_EQ(f.drop_final_pct, 25);
  EXPECT_EQ(f.max_violation, 1.5);
  EXPECT_EQ(f.dead_experts, 2);
  EXPECT_EQ(f.peak_bytes, 7);
  EXPECT_TRUE(std::isnan(f.all_reduce_ms));
  EXPECT_TRUE(std::isnan(f.validation_loss));
}

TEST(SweepRow, ReadsBackAsItWasWritten) {
  for (const double factor : {0.0, 1.25}) {
    const SweepRow row = MeasuredRow(PointAt(8, factor), Speed(1234.5678901234567, 2.1));
    std::string line = JsonLine(row);
    ASSERT_EQ(line.back(), '\n');
    line.pop_back();
    const auto back = ParseSweepRow(line).value();
    EXPECT_EQ(JsonLine(back), JsonLine(row));
    EXPECT_EQ(IdentityOf(back), IdentityOf(row));
    EXPECT_EQ(back.text("cf"), factor > 0 ? "1.25" : "none");
    EXPECT_EQ(back.text("dp"), "2");
    EXPECT_EQ(back.text("seed"), "18446744073709551615");
    EXPECT_EQ(back.number("tok_s"), 1234.5678901234567);
    EXPECT_EQ(back.number("peak_mib"), 3);
    EXPECT_FALSE(back.failed());
  }
}

// Of 8 ranks. EP times ETP ranks of a stage hold every expert once, and tensor ranks are among
// them.
TEST(SweepRow, DataParallelSizeIsThatOfAStagesExperts) {
  const auto dp = [](int64_t pp, int64_t tp, int64_t ep, int64_t etp = 1) {
    Point point = PointAt(8, 0);
    point.ranks = 8;
    point.pp = pp;
    point.tp = tp;
    point.ep = ep;
    point.etp = etp;
    return ErrorRow(point, "").text("dp");
  };
  EXPECT_EQ(dp(1, 1, 2), "4");
  EXPECT_EQ(dp(2, 1, 2), "2");
  EXPECT_EQ(dp(2, 2, 4), "1");
  EXPECT_EQ(dp(1, 2, 2, 2), "2");
  EXPECT_EQ(dp(2, 1, 8), "");
  EXPECT_EQ(dp(3, 1, 1), "");
}

TEST(SweepRow, ErrorsHaveAReasonAndNoFigures) {
  const SweepRow row = ErrorRow(PointAt(8, 1), "top_k is 9, \"expected\" at most 8");
  EXPECT_TRUE(row.failed());
  EXPECT_THAT(JsonLine(row), HasSubstr(R"("tok_s":null)"));
  EXPECT_EQ(row.text("error"), "top_k is 9, \"expected\" at most 8");
  EXPECT_EQ(IdentityOf(row), IdentityOf(MeasuredRow(PointAt(8, 1), Speed(1, 1))));
}

TEST(SweepRow, IdentityIsWhatChangesResults) {
  const std::string one = IdentityOf(ErrorRow(PointAt(8, 1), ""));
  Point other = PointAt(8, 1);
  other.text_xxh3 = "1123456789abcdef";
  EXPECT_NE(IdentityOf(ErrorRow(other, "")), one);
  other = PointAt(8, 1);
  other.backend = "mpi";
  EXPECT_NE(IdentityOf(ErrorRow(other, "")), one);
  EXPECT_NE(IdentityOf(ErrorRow(PointAt(16, 1), "")), one);
}

TEST(SweepRow, WhatIsNoRowIsRefused) {
  const auto problem = [](const std::string& line) {
    const auto row = ParseSweepRow(line);
    EXPECT_TRUE(absl::IsDataLoss(row.status())) << line;
    return std::string(row.status().message());
  };
  const std::string head = R"({"schema":"moe.sweep/1","status":"ok")";
  EXPECT_TRUE(ParseSweepRow(head + "}").ok());
  EXPECT_THAT(problem("[]"), HasSubstr("no row of a sweep"));
  EXPECT_THAT(problem("{}"), HasSubstr("no row of a sweep"));
  EXPECT_THAT(problem(R"({"schema":"moe.sweep/2"})"), HasSubstr("no row of a sweep"));
  EXPECT_THAT(problem(R"({"schema":7})"), HasSubstr("no row of a sweep"));
  EXPECT_THAT(problem(head), HasSubstr("malformed JSON"));
  EXPECT_THAT(problem(head + R"(,"tok_s":"fast"})"), HasSubstr("tok_s is \"fast\""));
  EXPECT_THAT(problem(head + R"(,"tok_s":"none"})"), HasSubstr("tok_s"));
  EXPECT_THAT(problem(head + R"(,"cf":"all"})"), HasSubstr("cf is \"all\""));
  EXPECT_THAT(problem(head + R"(,"settings":[1]})"), HasSubstr("settings is [1]"));
  EXPECT_THAT(problem(R"({"schema":"moe.sweep/1","status":"maybe"})"), HasSubstr("'maybe'"));
  EXPECT_THAT(problem(R"({"schema":"moe.sweep/1"})"), HasSubstr("status is ''"));
}

TEST(SweepRow, TheReportReadsIt) {
  const std::string lines = JsonLine(MeasuredRow(PointAt(8, 1.25), Speed(100, 2))) +
                            JsonLine(MeasuredRow(PointAt(8, 0), Speed(90, 1.9))) +
                            JsonLine(ErrorRow(PointAt(1, 1), "no"));
  const auto run = report::ParseRun("rows.jsonl", lines).value();
  ASSERT_EQ(run.sweep.size(), 3u);
  EXPECT_EQ(run.sweep[0].capacity_factor, 1.25);
  EXPECT_TRUE(std::isinf(run.sweep[1].capacity_factor));
  EXPECT_EQ(run.sweep[1].validation_loss, 1.9);
  EXPECT_EQ(run.sweep[0].drop_initial_pct, 5);
  EXPECT_EQ(run.sweep[0].dp, 2);
  EXPECT_TRUE(run.sweep[2].failed());
}

class ResultFileTest : public IoTest {
 protected:
  void SetUp() override {
    IoTest::SetUp();
    path_ = Path("rows");
  }
  void Put(const std::string& text) const { Write("rows", text); }
  std::string Content() const { return Read(path_); }

  std::string path_;
  const SweepRow row_ = MeasuredRow(PointAt(8, 1), Speed(100, 2));
  const SweepRow other_ = MeasuredRow(PointAt(16, 1), Speed(80, 1.8));
};

TEST_F(ResultFileTest, GoesOnWhereItStopped) {
  {
    auto file = ResultFile::Create(path_).value();
    ASSERT_TRUE(file.Append(row_).ok());
    EXPECT_EQ(Content(), JsonLine(row_));  // at once, not when it closes
  }
  EXPECT_TRUE(absl::IsAlreadyExists(ResultFile::Create(path_).status()));
  auto file = ResultFile::Continue(path_).value();
  ASSERT_EQ(file.lines().size(), 1u);
  EXPECT_EQ(JsonLine(file.lines()[0].row), JsonLine(row_));
  ASSERT_TRUE(file.Append(other_).ok());
  EXPECT_EQ(Content(), JsonLine(row_) + JsonLine(other_));
}

TEST_F(ResultFileTest, ACutLastLineIsCutOffWhereverItWasCut) {
  const std::string last = JsonLine(other_);
  for (size_t kept = 0; kept < last.size() - 1; kept += kept < 30 ? 1 : 37) {
    Put(JsonLine(row_) + last.substr(0, kept));
    auto file = ResultFile::Continue(path_);
    ASSERT_TRUE(file.ok()) << kept << ": " << file.status();
    EXPECT_EQ(file->lines().size(), 1u) << kept;
    ASSERT_TRUE(file->Append(other_).ok());
    EXPECT_EQ(Content(), JsonLine(row_) + last) << kept;
  }
}

TEST_F(ResultFileTest, AWholeLastLineWithoutItsEndCounts) {
  Put(JsonLine(row_).substr(0, JsonLine(row_).size() - 1));
  auto file = ResultFile::Continue(path_).value();
  EXPECT_EQ(file.lines().size(), 1u);
  ASSERT_TRUE(file.Append(other_).ok());
  EXPECT_EQ(Content(), JsonLine(row_) + JsonLine(other_));
}

TEST_F(ResultFileTest, AFileOfSomethingElseIsNeitherReadNorCut) {
  for (const char* text : {"my notes", "{\"schema\":\"moe.bench/1\"}", "my notes\n", "\x01\xff"}) {
    Put(text);
    EXPECT_TRUE(absl::IsDataLoss(ResultFile::Continue(path_).status())) << text;
    EXPECT_EQ(Content(), text);
  }
  Put(JsonLine(row_) + "x\n" + JsonLine(other_));
  EXPECT_THAT(std::string(ResultFile::Continue(path_).status().message()), HasSubstr("line 2: "));
  EXPECT_TRUE(absl::IsNotFound(ResultFile::Continue(path_ + "none").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ResultFile::Continue("/tmp").status()));
}

TEST_F(ResultFileTest, TooManyRowsAreRefused) {
  std::string rows;
  for (int i = 0; i <= 200'000; ++i) rows += "{\"schema\":\"moe.sweep/1\",\"status\":\"ok\"}\n";
  Put(rows);
  EXPECT_THAT(std::string(ResultFile::Continue(path_).status().message()),
              HasSubstr("200001 lines, expected at most 200000"));
}

TEST_F(ResultFileTest, OneSweepWritesAtATime) {
  auto file = ResultFile::Create(path_).value();
  EXPECT_TRUE(absl::IsFailedPrecondition(ResultFile::Continue(path_).status()));
}

TEST(SweepTable, MarksWhatNoOtherPointBeats) {
  const std::vector<SweepRow> rows = {
      MeasuredRow(PointAt(4, 0), Speed(100, 3)), MeasuredRow(PointAt(8, 0), Speed(90, 2)),
      MeasuredRow(PointAt(16, 0), Speed(80, 2.5)),  // slower and worse than the one before
      ErrorRow(PointAt(32, 0), "no memory"), MeasuredRow(PointAt(64, 0), Speed(10, 1))};
  EXPECT_THAT(ParetoMarks(rows), ElementsAre(true, true, false, false, true));
}

TEST(SweepTable, LayersAreComparedByDrops) {
  const auto layer = [](double speed, double drop) {
    Point point = PointAt(8, 1);
    point.measure = "layer";
    return MeasuredRow(point, Speed(speed, kNone, drop));
  };
  EXPECT_THAT(ParetoMarks(std::vector<SweepRow>{layer(100, 5), layer(90, 5), layer(50, 0)}),
              ElementsAre(true, false, true));
}

TEST(SweepTable, HasTheColumnsAndThoseThatVary) {
  Point wide = PointAt(8, 1.25);
  wide.hidden = 64;
  const std::string table = SweepTable(
      std::vector<SweepRow>{MeasuredRow(PointAt(8, 0), Speed(1234, 2)), ErrorRow(wide, "too big")});
  std::stringstream lines(table);
  std::string head, first, second;
  std::getline(lines, head);
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_THAT(head, HasSubstr("hidden | experts | topk |"));
  EXPECT_THAT(head, HasSubstr("| drop% init→end | MaxVio | dead | val loss | peak MiB | status"));
  EXPECT_THAT(first, HasSubstr("1.00k/500 |     1234 * |"));
  EXPECT_THAT(first, HasSubstr("2.00 (20)"));
  EXPECT_THAT(first, HasSubstr("5.00→1.00"));
  EXPECT_THAT(second, HasSubstr("error: too big"));
  EXPECT_EQ(SweepTable({}), "");
}

}  // namespace
}  // namespace moe::sweep
