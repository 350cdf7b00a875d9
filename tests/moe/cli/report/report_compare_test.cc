// Differences of two runs beyond their noise, and bounds on figures.
#include <cmath>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/measure/statistics.h"
#include "moe/cli/report/compare.h"
#include "moe/cli/report/rows.h"

namespace moe::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Run BenchRun(const std::vector<double>& busbw, double cv_pct) {
  Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  for (const double value : busbw) {
    run.bench.push_back({.op = "alltoall", .size_bytes = 1024, .cv_pct = cv_pct, .busbw = value});
  }
  return run;
}

Difference Only(const Run& a, const Run& b) {
  const auto comparison = Compare(a, b);
  EXPECT_TRUE(comparison.ok()) << comparison.status();
  if (!comparison.ok() || comparison->differences.size() != 1) {
    ADD_FAILURE() << "expected one difference";
    return {};
  }
  return comparison->differences[0];
}

TEST(SampleTest, ByHand) {
  const Sample s = SampleOf(std::vector<double>{1, 2, 3});  // s = 1, over sqrt(3)
  EXPECT_DOUBLE_EQ(s.mean, 2);
  EXPECT_DOUBLE_EQ(s.error, 1 / std::sqrt(3));
  EXPECT_EQ(s.degrees, 2);
  EXPECT_TRUE(std::isnan(SampleOf(std::vector<double>{4}).error));
  EXPECT_DOUBLE_EQ(SampleOf(200, 10).error, 10);
}

TEST(SampleTest, StudentsQuantiles) {
  // Exact values from tables of the distribution, to their number of digits.
  for (const auto& [degrees, exact] : {std::pair(1.0, 12.706),
                                       {2.0, 4.303},
                                       {14.0, 2.145},
                                       {15.0, 2.131},
                                       {30.0, 2.042},
                                       {120.0, 1.980},
                                       {1e9, 1.960}}) {
    EXPECT_NEAR(StudentT975(degrees), exact, 0.01 * exact) << degrees;
  }
}

TEST(SampleTest, BatchMeansSeeSlowDrift) {
  std::vector<double> drifting, alternating;
  for (int i = 0; i < 100; ++i) {
    drifting.push_back(i < 50 ? 0 : 1);
    alternating.push_back(i % 2);
  }
  EXPECT_GT(SampleOfSeries(drifting).error, 0.1);
  EXPECT_EQ(SampleOfSeries(alternating).error, 0);
  EXPECT_TRUE(std::isnan(SampleOfSeries(std::vector<double>(19, 1)).error));
}

TEST(CompareTest, AChangeCountsOnlyBeyondItsNoise) {
  // cv 3 % on both sides: noise = 1.96 * sqrt(2) * 3 % = 8.3 % (of b's side a little less or more).
  const Difference small = Only(BenchRun({100}, 3), BenchRun({95}, 3));
  EXPECT_DOUBLE_EQ(small.change_pct, -5);
  EXPECT_NEAR(small.noise_pct, 1.96 * std::hypot(3, 2.85), 0.01);
  EXPECT_EQ(small.verdict, Verdict::kWithinNoise);
  EXPECT_EQ(small.worse_pct(), 0);
  const Difference large = Only(BenchRun({100}, 3), BenchRun({80}, 3));
  EXPECT_EQ(large.verdict, Verdict::kWorse);
  EXPECT_DOUBLE_EQ(large.worse_pct(), 20);
  EXPECT_EQ(Only(BenchRun({80}, 3), BenchRun({100}, 3)).verdict, Verdict::kBetter);
  EXPECT_EQ(Only(BenchRun({80}, 3), BenchRun({80}, 3)).verdict, Verdict::kEqual);
  EXPECT_EQ(Only(BenchRun({80}, kNone), BenchRun({100}, 3)).verdict, Verdict::kUnknownNoise);
}

TEST(CompareTest, RepeatedRowsBringTheirOwnNoise) {
  // Means 100 and 90, s = 1 on both sides, n = 3: noise = t(4) * sqrt(2 / 3).
  const Difference d = Only(BenchRun({99, 100, 101}, 50), BenchRun({89, 90, 91}, 50));
  EXPECT_DOUBLE_EQ(d.change_pct, -10);
  EXPECT_NEAR(d.noise_pct, 2.776 * std::sqrt(2.0 / 3), 0.001);
  EXPECT_EQ(d.verdict, Verdict::kWorse);
}

TEST(CompareTest, SizesThatAreWrittenAlikeAreNoRepetitions) {
  report::Run a = BenchRun({1, 2}, 1);
  a.bench[0].size_bytes = 1 << 20;
  a.bench[1].size_bytes = (1 << 20) + 256;  // with three digits this is 1 MiB as well
  const auto comparison = Compare(a, a).value();
  ASSERT_EQ(comparison.differences.size(), 2u);
  EXPECT_EQ(comparison.differences[0].what, "1 MiB");
  EXPECT_EQ(comparison.differences[1].what, "1,048,832 B");
}

// Two points of a sweep that differ in one setting, as rows of `moe sweep -J`: a fast and a slow
// one.
report::Run TwoPoints(const std::string& first, const std::string& second, double slow = 50) {
  const auto row = [](const std::string& differs, double speed) {
    return absl::StrCat(R"({"schema":"moe.sweep/1","measure":"layer","experts":8,"topk":2,)",
                        R"("cf":1.25,"ep":2,"dp":1,"tok_per_rank":1024,)", differs, R"(,"tok_s":)",
                        speed, R"(,"status":"ok"})", "\n");
  };
  auto run = ParseRun("sweep.jsonl", row(first, 100) + row(second, slow));
  EXPECT_TRUE(run.ok()) << run.status();
  return run.ok() ? *std::move(run) : report::Run();
}

TEST(CompareTest, SweepPointsAreAsManyAsTheirSettings) {
  // Whatever else two rows of a point contain, they are not repetitions if their settings differ.
  const std::pair<const char*, const char*> kPairs[] = {
      {R"("hidden":64,"settings":"--hidden-size 64")",
       R"("hidden":128,"settings":"--hidden-size 128")"},
      {R"("router":"mixtral","settings":"--router mixtral")",
       R"("router":"switch","settings":"--router switch")"},
      {R"("dtype":"f32","settings":"")", R"("dtype":"bf16","settings":"--dtype bf16")"},
      {R"("dispatch":"staged","settings":"")",
       R"("dispatch":"direct","settings":"--dispatch direct")"},
      {R"("overlap":1,"settings":"")", R"("overlap":2,"settings":"--moe-overlap-degree 2")"},
      {R"("ranks":2,"settings":"--ranks 2")", R"("ranks":4,"settings":"--ranks 4")"},
      {R"("settings":"--seed 1")", R"("settings":"--seed 2")"},
      {R"("text_xxh3":"a")", R"("text_xxh3":"b")"},
      {R"("backend":"local")", R"("backend":"mpi")"},
      {R"("hidden":64)", R"("hidden":128)"}};  // from another program, without settings
  for (const auto& [first, second] : kPairs) {
    const report::Run run = TwoPoints(first, second);
    const auto comparison = Compare(run, run).value();
    ASSERT_EQ(comparison.differences.size(), 2u) << second;
    EXPECT_EQ(comparison.differences[0].a, 100) << second;
    EXPECT_EQ(comparison.differences[1].a, 50) << second;
    EXPECT_NE(comparison.differences[0].what, comparison.differences[1].what) << second;
  }
  const report::Run run = TwoPoints(R"("settings":"--seed 1")", R"("settings":"--seed 1")");
  EXPECT_EQ(Compare(run, run)->differences.size(), 1u);
}

TEST(CompareTest, RowsOfABenchmarkAreAsManyAsTheirSettings) {
  const auto row = [](const char* settings, double time) {
    return absl::StrCat(R"({"op":"layer","pass":"forward","phase":"all","tokens":8,"topk":2,)",
                        R"("router":"deepseek-v3","dispatch":"hierarchical","time_us":)", time,
                        R"(,"settings":")", settings, R"("})", "\n");
  };
  const auto run =
      ParseRun("layer.jsonl", row("", 10) + row("--node-size 2", 20) +
                                  row("--moe-router-num-groups 4", 40) + row("--node-size 2", 30))
          .value();
  const auto comparison = Compare(run, run).value();
  ASSERT_EQ(comparison.differences.size(), 3u);
  EXPECT_EQ(comparison.differences[1].a, 25);
  EXPECT_EQ(comparison.differences[1].what, "layer · moe-router-num-groups default · node-size 2");
  EXPECT_EQ(comparison.differences[2].what, "layer · moe-router-num-groups 4 · node-size default");
}

TEST(CompareTest, LayersOfOtherTopKOrSeedAreNoRepetitions) {
  const auto row = [](int top_k, int seed) {
    return absl::StrCat(R"({"op":"layer","pass":"forward","phase":"expert","tokens":64,"topk":)",
                        top_k, R"(,"seed":)", seed, R"(,"time_us":10,"gflops_per_s":5})", "\n");
  };
  const auto run = ParseRun("layer.jsonl", row(1, 0) + row(2, 0) + row(2, 1) + row(2, 1)).value();
  const auto comparison = Compare(run, run).value();
  ASSERT_EQ(comparison.differences.size(), 3u);
  EXPECT_NE(comparison.differences[0].what, comparison.differences[1].what);
  EXPECT_NE(comparison.differences[1].what, comparison.differences[2].what);
}

TEST(CompareTest, LowerLossIsBetterAndHasNoNoise) {
  report::Run a = {.name = "a", .path = "a"}, b = a;
  a.totals = TrainTotals{.validation_loss = 4, .weights_hash = "x"};
  b.totals = TrainTotals{.validation_loss = 3, .weights_hash = "x"};
  const auto comparison = Compare(a, b).value();
  EXPECT_TRUE(comparison.same_weights);
  EXPECT_EQ(comparison.differences[0].change_pct, -25);
  EXPECT_EQ(comparison.differences[0].verdict, Verdict::kUnknownNoise);
}

TEST(CompareTest, RefusesWhatHasNothingInCommon) {
  report::Run other = BenchRun({1}, 1);
  other.bench[0].size_bytes = 2048;
  EXPECT_THAT(std::string(Compare(BenchRun({1}, 1), other).status().message()),
              HasSubstr("no row of 'r' has a counterpart"));
  other.kind = RunKind::kSweep;
  EXPECT_THAT(std::string(Compare(BenchRun({1}, 1), other).status().message()),
              HasSubstr("moe bench and 'r' of moe sweep"));
}

TEST(ChecksTest, BoundsAreOnTheColumnsThatAreThere) {
  const std::vector<report::Run> runs = {BenchRun({100, 80}, 3)};
  const auto rows = CheckRows(runs, nullptr);
  ASSERT_EQ(rows.size(), 2u);
  const auto failed = RowsThatFail("busbw < 90 && size >= 1024", rows).value();
  EXPECT_THAT(failed, ElementsAre(rows[1].name));
  // Nothing was measured that could violate this bound.
  EXPECT_EQ(RowsThatFail("val_loss > 4", rows).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ChecksTest, WorseIsABoundOnTheComparison) {
  const std::vector<report::Run> runs = {BenchRun({100}, 3), BenchRun({80}, 3)};
  const auto comparison = Compare(runs[0], runs[1]).value();
  const auto rows = CheckRows(runs, &comparison);
  EXPECT_EQ(RowsThatFail("worse_pct > 15", rows)->size(), 1u);
  EXPECT_EQ(RowsThatFail("worse_pct > 25", rows)->size(), 0u);
  EXPECT_EQ(RowsThatFail("busbw_change_pct < -15", rows)->size(), 1u);
}

TEST(ChecksTest, BaseIsTheOtherRunsValueOfTheColumn) {
  // Means of B: 80 and 50; of A: 100, and none for 2048 bytes.
  std::vector<report::Run> runs = {BenchRun({90, 110}, 3), BenchRun({79, 81}, 3)};
  runs[0].bench[1].time_us = 10;
  runs[1].bench[0].time_us = 12;
  runs[1].bench.push_back({.op = "alltoall", .size_bytes = 2048, .busbw = 50});
  const auto comparison = Compare(runs[0], runs[1]).value();
  const auto rows = CheckRows(runs, &comparison);
  const auto failed = [&](const std::string& text) {
    const auto names = RowsThatFail(text, rows, measure::FailIf::Base::kPresent);
    EXPECT_TRUE(names.ok()) << names.status();
    return names.ok() ? static_cast<int>(names->size()) : -1;
  };
  EXPECT_EQ(failed("busbw < 0.81*base"), 1);
  EXPECT_EQ(failed("busbw < 0.79*base"), 0);
  EXPECT_EQ(failed("busbw < base * 0.81"), 1);
  EXPECT_EQ(failed("busbw < base"), 1);
  EXPECT_EQ(failed("busbw < base/1.2"), 1);  // 83.3
  EXPECT_EQ(failed("busbw < base/1.3"), 0);  // 76.9
  EXPECT_EQ(failed("time > 1.1*base"), 1);   // not the figure of its group, but a column
  EXPECT_EQ(failed("cv > 0.5*base"), 1);     // 2048 bytes: neither has a base
  EXPECT_EQ(failed("busbw < 0.9*base && size > 1024"), 0);
  EXPECT_EQ(failed("busbw < 0.9*base && size <= 1024"), 1);
  // Only rows of B count: 80 and 50, not A's 90.
  EXPECT_EQ(failed("busbw < 1000"), 2);
  EXPECT_EQ(failed("busbw < 60"), 1);
  EXPECT_EQ(failed("busbw > 85"), 0);
}

TEST(ChecksTest, EverySweepPointIsJudgedAlone) {
  const char* const kNarrow = R"("hidden":64,"settings":"--hidden-size 64")";
  const char* const kWide = R"("hidden":128,"settings":"--hidden-size 128")";
  // Their means, 75 and 70, would pass.
  const std::vector<report::Run> runs = {TwoPoints(kNarrow, kWide), TwoPoints(kNarrow, kWide, 40)};
  const auto comparison = Compare(runs[0], runs[1]).value();
  const auto failed = RowsThatFail("tok_s < 0.9*base", CheckRows(runs, &comparison),
                                   measure::FailIf::Base::kPresent)
                          .value();
  EXPECT_THAT(failed, ElementsAre(HasSubstr("H 128")));
  const auto alone =
      RowsThatFail("tok_s < 45", CheckRows(absl::MakeConstSpan(runs).subspan(1), nullptr)).value();
  EXPECT_THAT(alone, ElementsAre(HasSubstr("H 128")));
}

TEST(ChecksTest, BaseOfATrainingRun) {
  report::Run a = {.name = "a", .path = "a"};
  a.steps = {{.step = 1, .loss = 4, .step_ms = 90}, {.step = 2, .loss = 3, .step_ms = 10}};
  report::Run b = a;
  b.steps[1].step_ms = 12;
  const std::vector<report::Run> runs = {a, b, a};
  const auto comparison = Compare(a, b).value();
  const auto rows = CheckRows(runs, &comparison);
  const auto present = measure::FailIf::Base::kPresent;
  EXPECT_EQ(RowsThatFail("step_ms > 1.1*base", rows, present)->size(), 1u);
  EXPECT_EQ(RowsThatFail("step_ms > 1.3*base", rows, present)->size(), 0u);
  EXPECT_EQ(RowsThatFail("loss > 0", rows, present)->size(), 2u);  // B and the third
}

}  // namespace
}  // namespace moe::report
