// Inputs of moe report: what is read, and errors that name their position.
#include <cmath>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/report/compare.h"
#include "moe/cli/report/page.h"
#include "moe/cli/report/rows.h"
#include "tests/moe/io/io_test.h"

namespace moe::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kStep[] = R"({"step":1,"loss":5.5,"val_loss":null,"drop_fraction":0.25,)"
                         R"("expert_load":[[3,1],[0,4]]})";
constexpr char kBench[] = R"({"op":"alltoall","algorithm":"ring","size_bytes":1024,"time_us":2,)"
                          R"("busbw_gbytes_per_s":0.5,"imb_tx":1,"imb_rx":2.5,"nwrong":null})";

std::string ErrorOf(const std::string& document) {
  const auto run = ParseRun("f", document);
  EXPECT_FALSE(run.ok()) << document;
  if (run.ok()) return "";
  EXPECT_EQ(run.status().code(), absl::StatusCode::kDataLoss);
  return std::string(run.status().message());
}

TEST(ParseRunTest, ATrainingRun) {
  const auto run = ParseRun("f", R"({"schema":"moe.train/1","provenance":{"host":"h"}})" +
                                     std::string("\n") + kStep + "\n\n" +
                                     R"({"step":2,"loss":5,"val_loss":4.5,"new_key":{"x":[1]},)" +
                                     R"("expert_load":[[2,2],[2,2]]})" + "\n" +
                                     R"({"steps":2,"tokens":64,"weights_xxh3":"ab"})" + "\n")
                       .value();
  EXPECT_EQ(run.kind, RunKind::kTrain);
  ASSERT_EQ(run.steps.size(), 2u);
  EXPECT_EQ(run.steps[0].drop_fraction, 0.25);
  EXPECT_TRUE(std::isnan(run.steps[0].validation_loss));
  EXPECT_EQ(run.steps[1].validation_loss, 4.5);
  EXPECT_THAT(run.steps[0].expert_load, ElementsAre(3, 1, 0, 4));
  EXPECT_EQ(run.num_layers, 2);
  EXPECT_EQ(run.num_experts, 2);
  EXPECT_EQ(run.totals->weights_hash, "ab");
}

TEST(ParseRunTest, WhereResultsComeFromIsReadAndShown) {
  const std::string origin = R"("version":"1.2.3","commit":"ab12","host":"<h>","cpu":"Z 80",)";
  const std::string day = R"("date":"2026-11-2)";
  // The first line of a training run, and a training run from before that line existed.
  const std::string head =
      R"({"schema":"moe.train/1","provenance":{)" + origin + day + R"(4"},"ranks":2})" + "\n";
  const auto run = ParseRun("f", head + kStep).value();
  EXPECT_EQ(run.steps.size(), 1u);
  EXPECT_THAT(Page("t", {run}, {}), HasSubstr("version 1.2.3 · commit ab12 · host &lt;h&gt; · cpu "
                                              "Z 80 · date 2026-11-24<"));
  EXPECT_TRUE(ParseRun("f", kStep)->origin.empty());
  EXPECT_THAT(ErrorOf(head), HasSubstr("holds no rows"));
  EXPECT_THAT(ErrorOf(R"({"provenance":{"version":1}})"), HasSubstr("version is 1"));
  EXPECT_THAT(ErrorOf(R"({"provenance":"x"})"), HasSubstr("provenance is no object"));
  // Rows have their own provenance.
  const std::string row = "{" + origin + R"("experts":8,"topk":2,)" + day;
  const auto sweep = ParseRun("f", row + "5\"}\n" + row + "4\"}\n").value();
  EXPECT_THAT(Page("t", {sweep}, {}), HasSubstr("date 2026-11-24 to 2026-11-25<"));
  const auto bench =
      ParseRun("f", R"({"provenance":{"host":"h"},)" + std::string(kBench).substr(1)).value();
  EXPECT_EQ(bench.bench.size(), 1u);
  EXPECT_EQ(bench.origin.size(), 1u);
}

TEST(ParseRunTest, BenchRowsAsAListARowOrLines) {
  const std::string row = kBench;
  for (const std::string& document : {"[" + row + ",\n" + row + "]", row + "\n" + row, row}) {
    const auto run = ParseRun("f", document).value();
    EXPECT_EQ(run.kind, RunKind::kBench);
    EXPECT_EQ(run.bench.size(), document == row ? 1u : 2u);
    EXPECT_EQ(run.bench[0].busbw, 0.5);
    EXPECT_EQ(run.bench[0].imbalance(), 2.5);
    EXPECT_TRUE(std::isnan(run.bench[0].wrong));
  }
}

TEST(ParseRunTest, ASweepPointWithoutACapacityFactorIsDropless) {
  for (const char* cf : {"null", "\"none\""}) {
    const auto run =
        ParseRun("f", std::string(R"({"experts":8,"topk":2,"cf":)") + cf + "}").value();
    EXPECT_EQ(run.kind, RunKind::kSweep);
    EXPECT_TRUE(std::isinf(run.sweep[0].capacity_factor));
  }
}

TEST(ParseRunTest, WhatIsWrongIsNamedWithItsLine) {
  EXPECT_THAT(ErrorOf(R"({"schema":"moe.train/1","provenance":{}})"), HasSubstr("holds no rows"));
  const std::string step = std::string(kStep) + "\n";
  EXPECT_THAT(ErrorOf(""), HasSubstr("f: holds no rows"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("f: holds no rows"));
  EXPECT_THAT(ErrorOf(R"({"steps":2,"weights_xxh3":"ab"})"), HasSubstr("holds no steps"));
  EXPECT_THAT(ErrorOf(step + "{\"step\":\n"), HasSubstr("malformed JSON"));
  EXPECT_THAT(ErrorOf(step + "{\"step\":\n"), HasSubstr("(line 2, "));
  EXPECT_THAT(ErrorOf(step + R"({"a":1})"), HasSubstr("a row of no known command"));
  EXPECT_THAT(ErrorOf(step + kBench),
              HasSubstr("a row of moe bench stands among rows of moe train"));
  EXPECT_THAT(ErrorOf(step + step), HasSubstr("step 1 stands after step 1"));
  EXPECT_THAT(ErrorOf("[" + std::string(kBench) + ",\n3]"), HasSubstr("a row is a JSON number"));
  EXPECT_THAT(ErrorOf("[" + std::string(kBench) + ",\n3]"), HasSubstr("(line 2, "));
  EXPECT_THAT(ErrorOf("<html>"), HasSubstr("malformed JSON"));
  EXPECT_THAT(ErrorOf(R"({"step":1,"loss":"x"})"), HasSubstr("loss is \"x\", expected a number"));
  EXPECT_THAT(ErrorOf(R"({"step":1,"loss":1,"drop_fraction":1.5})"),
              HasSubstr("drop_fraction is 1.5, expected from 0 to 1"));
  EXPECT_THAT(ErrorOf(R"({"step":1,"step":2,"loss":1})"), HasSubstr("stands there twice"));
  EXPECT_THAT(ErrorOf(R"({"step":1,"loss":1e999})"), HasSubstr("malformed JSON"));
}

TEST(ParseRunTest, ExpertLoadsKeepTheirShape) {
  const auto step = [](const char* load) {
    return std::string(R"({"step":1,"loss":1,"expert_load":)") + load + "}\n";
  };
  EXPECT_THAT(ErrorOf(step("3")), HasSubstr("expert_load is no list"));
  EXPECT_THAT(ErrorOf(step("[3]")), HasSubstr("a layer that is no list"));
  EXPECT_THAT(ErrorOf(step("[[1],[1,2]]")), HasSubstr("2 experts in a layer, expected the 1"));
  EXPECT_THAT(ErrorOf(step("[[-1]]")), HasSubstr("something else than counts"));
  EXPECT_THAT(ErrorOf(std::string(kStep) + "\n" + R"({"step":2,"loss":1,"expert_load":[[1,1]]})"),
              HasSubstr("1 layers, expected the 2"));
  EXPECT_THAT(ErrorOf(std::string(kStep) + "\n" + R"({"step":2,"loss":1})"),
              HasSubstr("expert_load is not there"));
}

TEST(ColumnsTest, AFieldWithAHeadingIsReadShownAndBound) {
  const auto bench = ParseRun("f", R"({"op":"alltoall","size_bytes":8,"time_us":1,"wait_pct":7})");
  const auto sweep = ParseRun("g", R"({"experts":8,"topk":2,"status":"ok","max_vio":0.25})");
  ASSERT_TRUE(bench.ok() && sweep.ok());
  EXPECT_THAT(BenchSection({*bench}).body, HasSubstr(">wait (%)<"));
  EXPECT_THAT(BenchSection({*bench}).body, HasSubstr("<td data-value=\"7\""));
  EXPECT_THAT(SweepSection({*sweep}).body, HasSubstr(">MaxVio<"));
  EXPECT_THAT(SweepSection({*sweep}).body, HasSubstr("<td data-value=\"0.25\""));
  const auto rows = CheckRows(std::vector<report::Run>{*bench, *sweep}, nullptr);
  EXPECT_EQ(RowsThatFail("wait > 6", rows)->size(), 1u);
  EXPECT_EQ(RowsThatFail("max_vio > 0.2", rows)->size(), 1u);
  EXPECT_THAT(ErrorOf(R"({"op":"a","time_us":1,"wait_pct":-1})"), HasSubstr("wait_pct is -1"));
}

using ReadRunTest = IoTest;

TEST_F(ReadRunTest, AFolderMeansItsMetrics) {
  Write("metrics.jsonl", kStep);
  const auto run = ReadRun(root_.string()).value();
  EXPECT_EQ(run.path, root_.string());
  EXPECT_EQ(ReadRun(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadRun(Path("none")).status().message()), HasSubstr("none"));
}

TEST(ShortNamesTest, AreAsLongAsTheyMustBe) {
  EXPECT_THAT(ShortNames({"a/run1/metrics.jsonl", "b/bench.json", "sweep.jsonl"}),
              ElementsAre("run1", "bench", "sweep"));
  EXPECT_THAT(ShortNames({"a/run/", "b/run"}), ElementsAre("a/run", "b/run"));
  EXPECT_THAT(ShortNames({"x", "x"}), ElementsAre("x", "x (2)"));
}

TEST(ExpertLoadTest, IsOverTheEvenLoad) {
  const auto run = ParseRun("f", kStep).value();
  EXPECT_THAT(ExpertLoadMap(run, 0).values, ElementsAre(1.5, 0.5));
  EXPECT_THAT(ExpertLoadMap(run, 1).values, ElementsAre(0, 2));
}

TEST(ExpertLoadTest, ManyStepsAndExpertsAreAveraged) {
  report::Run run = {.num_layers = 9, .num_experts = 2 * kMaxLoadRows};
  for (int s = 0; s < 1000; ++s) {
    run.steps.push_back({.step = s + 1.0});
    run.steps.back().expert_load.assign(9 * 2 * kMaxLoadRows, 1);
    run.steps.back().expert_load[7 * 2 * kMaxLoadRows] = 100;  // layer 7 is uneven
  }
  const HeatMap map = ExpertLoadMap(run, 0);
  EXPECT_EQ(map.x.names.size(), 59u);
  EXPECT_EQ(map.x.names.front(), "1–17");  // 17 steps per column, to fit kMaxLoadColumns
  EXPECT_EQ(map.y.names.size(), kMaxLoadRows);
  EXPECT_EQ(map.y.names.back(), "126–127");
  for (const double value : map.values) EXPECT_EQ(value, 1);
  EXPECT_THAT(LayersToShow(run), ElementsAre(0, 1, 2, 7));
}

TEST(LayerPhasesTest, WhatIsBetweenThePhasesIsAPartOfItsOwn) {
  const auto row = [](const char* phase, int time_us) {
    return absl::StrCat(R"({"op":"layer","pass":"forward","phase":")", phase,
                        R"(","hidden":64,"time_us":)", time_us, "}\n");
  };
  const auto run = ParseRun("f", row("gate", 10) + row("expert", 60) + row("all", 100)).value();
  const std::string html = LayerPhases({run});
  EXPECT_THAT(html, HasSubstr(R"("names":["forward"])"));
  EXPECT_THAT(html, HasSubstr(R"("series":[{"look":0,"name":"gate","values":[10.0]},)"
                              R"({"look":3,"name":"expert","values":[60.0]},)"
                              R"({"look":5,"name":"between phases","values":[30.0]}])"));
}

TEST(PageTest, NoNameOfAnInputIsMarkup) {
  const std::string evil = "<script>alert(1)</script>";
  auto run = ParseRun("f", R"({"op":"<script>alert(1)</script>","algorithm":"\"><img src=x>",)"
                           R"("routing":"<script>alert(1)</script>","size_bytes":8,"time_us":1})")
                 .value();
  run.name = evil;
  run.path = evil + "2";
  const std::string page = Page(evil, {run}, {BenchSection({run})});
  EXPECT_THAT(page, Not(HasSubstr(evil)));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(1)"));
}

TEST(PageTest, SectionsOfOtherKindsAreEmpty) {
  const auto run = ParseRun("f", kStep).value();
  EXPECT_TRUE(BenchSection({run}).empty());
  EXPECT_TRUE(SweepSection({run}).empty());
  EXPECT_FALSE(TrainSection({run}).empty());
}

}  // namespace
}  // namespace moe::report
