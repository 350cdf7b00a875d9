// Charts of moe report: texts, the Pareto front, and the data that each figure draws.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/cli/measure/statistics.h"
#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/labels.h"
#include "moe/cli/report/page.h"

namespace moe::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

using Json = nlohmann::json;

// The data of the figures in `html`.
std::vector<Json> DataIn(const std::string& html) {
  const std::string open = "<script type=\"application/json\">", close = "</script>";
  std::vector<Json> found;
  for (size_t at = html.find(open); at != std::string::npos; at = html.find(open, at)) {
    at += open.size();
    found.push_back(Json::parse(html.substr(at, html.find(close, at) - at)));
  }
  return found;
}
Json DataOf(const std::string& html) {
  const std::vector<Json> found = DataIn(html);
  return found.size() == 1 ? found[0] : Json();
}

// The value of `key` in each point of series `index`.
std::vector<double> ValuesOf(const Json& data, size_t index, const char* key) {
  std::vector<double> values;
  for (const Json& point : data["series"][index]["points"]) values.push_back(point[key]);
  return values;
}

TEST(FormatTest, NumbersKeepTheirDigitsAndNoMore) {
  EXPECT_EQ(NumberText(0), "0");
  EXPECT_EQ(NumberText(12.34), "12.3");
  EXPECT_EQ(NumberText(1.5), "1.5");
  EXPECT_EQ(NumberText(9.996), "10");
  EXPECT_EQ(NumberText(-1234.5), "-1,234");  // ties to even
  EXPECT_EQ(NumberText(0.01234), "0.0123");
  EXPECT_EQ(NumberText(1.2e-7, 2), "1.2e-07");
  EXPECT_EQ(NumberText(NAN), "–");
  EXPECT_EQ(CountText(131072), "131,072");
  EXPECT_EQ(CountText(-1000), "-1,000");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(BytesText(512), "512 B");
  EXPECT_EQ(BytesText(1536), "1.5 KiB");
  EXPECT_EQ(BytesText(1023 * 1024), "1,023 KiB");
}

TEST(FormatTest, HostileTextsBecomeHarmless) {
  EXPECT_EQ(Escape("<script>alert('x')&\"</script>"),
            "&lt;script&gt;alert(&#39;x&#39;)&amp;&quot;&lt;/script&gt;");
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(Escape(std::string("a\0b", 3)), "a" + bad + "b");
  EXPECT_EQ(Escape("\xFF\xC0\xAF"), bad + bad + bad);  // not UTF-8; an overlong '/'
  EXPECT_EQ(Escape("\xED\xA0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(Escape("\xE2\x82"), bad);                  // truncated
  EXPECT_EQ(Escape("é€😀"), "é€😀");
}

using Points = std::vector<std::pair<measure::Sample, measure::Sample>>;

// Without noise.
Points Exact(const std::vector<std::pair<double, double>>& values) {
  Points points;
  for (const auto& [x, y] : values) points.push_back({{.mean = x}, {.mean = y}});
  return points;
}

TEST(ParetoTest, ByHand) {
  // Cheap and good: 1; in between: 0; best: 3. 2 is beaten by 0, 4 by 3.
  const Points points = Exact({{2, 5}, {1, 9}, {3, 6}, {4, 1}, {5, 1}});
  EXPECT_THAT(ParetoFront(points, Better::kLower, Better::kLower), ElementsAre(1, 0, 3));
  EXPECT_THAT(ParetoFront(points, Better::kHigher, Better::kLower), ElementsAre(4));
  EXPECT_THAT(ParetoFront(points, Better::kHigher, Better::kHigher), ElementsAre(1, 2, 4));
  EXPECT_THAT(ParetoFront(Exact({{1, 1}, {1, 1}, {1, 2}}), Better::kLower, Better::kLower),
              ElementsAre(0, 1));
  EXPECT_THAT(ParetoFront(Exact({{NAN, 1}, {1, NAN}}), Better::kLower, Better::kLower), IsEmpty());
}

TEST(ParetoTest, AnAdvantageWithinNoiseIsNone) {
  // Speeds with a standard deviation of 3: two differ by noise if within 1.96 sqrt(2) 3 = 8.3.
  const auto speeds = [](const std::vector<std::pair<double, double>>& values) {
    Points points = Exact(values);
    for (auto& [loss, speed] : points) speed = measure::SampleOf(speed.mean, 3);
    return points;
  };
  // 1 is worse than 0, and faster only within noise; 2 is faster beyond it.
  EXPECT_THAT(ParetoFront(speeds({{1, 100}, {2, 105}, {3, 110}}), Better::kLower, Better::kHigher),
              ElementsAre(0, 2));
  // As good as the best, and slower only within noise: none is better.
  EXPECT_THAT(ParetoFront(speeds({{1, 100}, {1, 105}, {1, 95}}), Better::kLower, Better::kHigher),
              ElementsAre(1, 0));
}

constexpr char kHostile[] = "</script><!--<script>&\"'";

XyChart Chart(XyStyle style, int num_points) {
  XyChart chart = {.text = {.id = "c", .title = "t"},
                   .x = Axis{.label = "size (B)", .kind = ScaleKind::kBytes},
                   .y = Axis{.label = "rate (GB/s)", .from_zero = true}};
  chart.series.push_back({.name = "s", .style = style, .look = 2});
  for (int i = 0; i < num_points; ++i)
    chart.series[0].points.push_back({.x = i + 1.0, .y = 2.0 * i});
  return chart;
}

TEST(XyChartTest, HasAxesSeriesAndPointsAsData) {
  XyChart chart = Chart(XyStyle::kLinePoints, 2);
  chart.series[0].points[1] = {
      .x = 4096, .y = 0.1, .x_error = 3, .y_error = 0.25, .name = "n", .label = "l"};
  EXPECT_EQ(DataOf(Render(chart)), Json::parse(R"json({
    "kind": "xy",
    "x": {"label": "size (B)", "kind": "bytes"},
    "y": {"label": "rate (GB/s)", "kind": "linear", "zero": true},
    "series": [{"name": "s", "style": "line-points", "look": 2, "faint": false, "points": [
      {"x": 1.0, "y": 0.0},
      {"x": 4096.0, "y": 0.1, "dx": 3.0, "dy": 0.25, "name": "n", "label": "l"}]}]})json"));
}

TEST(XyChartTest, HostileTextsStayTexts) {
  XyChart chart = Chart(XyStyle::kPoints, 1);
  chart.text.title = chart.text.note = chart.x.label = chart.series[0].name = kHostile;
  chart.series[0].points[0].label = std::string(kHostile) + "\xFF";
  const std::string html = Render(chart);
  EXPECT_EQ(Count(html, "<script"), 1);
  EXPECT_EQ(Count(html, "</script"), 1);
  EXPECT_EQ(Count(html, "<!--"), 0);
  const Json data = DataOf(html);
  EXPECT_EQ(data["x"]["label"], kHostile);
  EXPECT_EQ(data["series"][0]["name"], kHostile);
  EXPECT_EQ(data["series"][0]["points"][0]["label"], std::string(kHostile) + "\xEF\xBF\xBD");
}

TEST(XyChartTest, LeavesOutWhatHasNoPlace) {
  XyChart chart = Chart(XyStyle::kPoints, 3);
  chart.series[0].points.push_back({.x = NAN, .y = 1});
  EXPECT_THAT(ValuesOf(DataOf(Render(chart)), 0, "y"), ElementsAre(0, 2, 4));
  chart.y.kind = ScaleKind::kLog;  // the first point is at 0
  EXPECT_THAT(ValuesOf(DataOf(Render(chart)), 0, "y"), ElementsAre(2, 4));
  EXPECT_THAT(Render(chart), HasSubstr("Not drawn: 2 of 4 points (no such figure)."));
  EXPECT_THAT(Render(chart), Not(HasSubstr("series (")));
  chart.series.push_back({.name = "none", .points = {{.x = 1, .y = NAN}}});
  EXPECT_THAT(Render(chart), HasSubstr("Not drawn: 1 of 2 series (no such figure)."));
  EXPECT_EQ(Render(Chart(XyStyle::kPoints, 0)), "");
}

TEST(XyChartTest, TheFrontIsASeriesWithTheLabelsOfItsPoints) {
  XyChart chart = Chart(XyStyle::kPoints, 4);  // x and y both grow: only the first point is best
  for (XyPoint& p : chart.series[0].points) p.label = "l";
  chart.front = Front{Better::kLower, Better::kLower};
  Json data = DataOf(Render(chart));
  EXPECT_EQ(data["stepped"], "before");
  EXPECT_EQ(data["series"][0]["style"], "front");
  EXPECT_EQ(data["series"][0]["points"], Json::parse(R"([{"x": 1.0, "y": 0.0, "label": "l"}])"));
  EXPECT_FALSE(data["series"][1]["points"][0].contains("label"));
  EXPECT_EQ(data["series"][1]["points"][1]["label"], "l");
  chart.front = Front{Better::kHigher, Better::kLower};  // all of them
  data = DataOf(Render(chart));
  EXPECT_EQ(data["stepped"], "after");
  EXPECT_THAT(ValuesOf(data, 0, "x"), ElementsAre(1, 2, 3, 4));
}

TEST(XyChartTest, OfManyPointsThoseOfTheFrontAloneHaveLabels) {
  XyChart chart = Chart(XyStyle::kPoints, static_cast<int>(kMaxSeries) + 1);
  for (XyPoint& p : chart.series[0].points) p.label = "l";
  chart.front = Front{Better::kLower, Better::kLower};
  EXPECT_EQ(Count(Render(chart), "\"label\":\"l\""), 1);
}

TEST(XyChartTest, ThinningKeepsSpikes) {
  std::vector<XyPoint> points;
  for (int i = 0; i < 100000; ++i) points.push_back({.x = i + 0.0, .y = i == 54321 ? 9.0 : i % 2});
  const std::vector<XyPoint> thinned = Thinned(points);
  EXPECT_LE(thinned.size(), static_cast<size_t>(kMaxCurvePoints));
  double last = -1, highest = 0;
  for (const XyPoint& p : thinned) {
    EXPECT_GT(p.x, last);
    last = p.x;
    highest = std::max(highest, p.y);
  }
  EXPECT_EQ(highest, 9);
}

TEST(StackedBarTest, HasASeriesPerPartThatIsNotZero) {
  const Json data =
      DataOf(Render(StackedBarChart{.text = {.id = "b", .title = "t"},
                                    .x_label = "time (ms)",
                                    .unit = "ms",
                                    .parts = {"p", "q", "r"},
                                    .bars = {{"one", {3, 0, 1}}, {"two", {-1, NAN, 2}}}}));
  EXPECT_EQ(data["y"]["names"], Json({"one", "two"}));
  EXPECT_EQ(data["series"], Json::parse(R"([{"name": "p", "look": 0, "values": [3.0, 0.0]},
                                            {"name": "r", "look": 2, "values": [1.0, 2.0]}])"));
}

TEST(HeatMapTest, HasACellPerValueAndNoneWithout) {
  const HeatMap map = {.text = {.id = "h", .title = "t"},
                       .x = Axis{.label = "step", .names = {"1", "2–5"}},
                       .y = Axis{.label = "expert", .names = {"0", "1", "2"}},
                       .values = {0, 1, 2, kNone, 4, 0.5}};
  const Json data = DataOf(Render(map));
  EXPECT_EQ(data["x"]["names"], Json({"1", "2–5"}));
  EXPECT_EQ(data["y"]["names"], Json({"0", "1", "2"}));
  EXPECT_EQ(data["values"], Json::parse("[0.0, 1.0, 2.0, null, 4.0, 0.5]"));
}

BenchRow PairRow(int source, int destination, double size, double rate) {
  return {.op = "p2p",
          .size_bytes = size,
          .algbw = rate,
          .source = static_cast<double>(source),
          .destination = static_cast<double>(destination)};
}

TEST(PairMapsTest, ShowTheLargestSizeWithoutTheDiagonal) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  // 0 to 1 twice, 1 to 0 failed, 2 to 0 with a smaller size only.
  run.bench = {PairRow(2, 0, 1024, 9), PairRow(0, 1, 1024, 8), PairRow(0, 0, 2048, 90),
               PairRow(0, 1, 2048, 4), PairRow(0, 1, 2048, 6), PairRow(2, 1, 2048, 2),
               PairRow(1, 0, 2048, 7)};
  run.bench.back().status = "error";
  const std::string html = PairMaps({&run, 1});
  EXPECT_THAT(html, HasSubstr("p2p: GB/s between ranks, 2 KiB"));
  EXPECT_EQ(DataOf(html)["y"]["names"], Json({"0", "1", "2"}));
  EXPECT_EQ(DataOf(html)["values"],
            Json::parse("[null, 5.0, null, null, null, null, null, 2.0, null]"));
  EXPECT_EQ(PairMaps({}), "");
  // One rank has no pairs; ranks that no page could show are left out.
  run.bench = {PairRow(0, 0, 2048, 90), PairRow(1 << 30, 0, 2048, 1)};
  EXPECT_EQ(PairMaps({&run, 1}), "");
  run.bench = {PairRow(0, 1, 2048, 90), PairRow(128, 0, 4096, 1)};
  EXPECT_THAT(PairMaps({&run, 1}), HasSubstr("Ranks from 128 on are left out"));
}

TEST(PairMapsTest, RatesWhoseSumOverflowsHaveAMean) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  run.bench = {PairRow(0, 1, 1, 1e308), PairRow(0, 1, 1, 1e308), PairRow(1, 0, 1, 1)};
  EXPECT_EQ(DataOf(PairMaps({&run, 1}))["values"][1], 1e308);
}

TEST(BenchSectionTest, ACopyWithinARankIsNoPartOfTheMeanOverPairs) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  run.bench = {PairRow(0, 0, 2048, 90), PairRow(0, 1, 2048, 4), PairRow(1, 0, 2048, 6)};
  // Mean 5, deviation sqrt(2).
  const Json data = DataIn(BenchSection({&run, 1}).body).at(0);
  EXPECT_EQ(data["series"][0]["points"].size(), 1u);
  EXPECT_EQ(data["series"][0]["points"][0]["x"], 2048);
  EXPECT_EQ(data["series"][0]["points"][0]["y"], 5);
  EXPECT_NEAR(data["series"][0]["points"][0]["dy"].get<double>(), std::sqrt(2), 1e-12);
}

TEST(TableTest, SortsByNumbersNotByTexts) {
  const std::string html =
      Render(Table{.title = "<t>",
                   .names = {"name", "size", "nothing"},
                   .rows = {{TableCell::Text("<i>"), TableCell::Number(2048, "2 KiB"),
                             TableCell::Number(NAN)}}});
  EXPECT_THAT(html, HasSubstr("<td data-value=\"2048\" class=\"number\">2 KiB</td>"));
  EXPECT_THAT(html, Not(HasSubstr("nothing")));
  EXPECT_THAT(html, Not(HasSubstr("<i>")));
}

TEST(TableTest, SaysOnceWhatIsTheSameInAllRows) {
  Table table = {.title = "t",
                 .names = {"name", "size"},
                 .rows = {{TableCell::Text("<i>"), TableCell::Number(1.0001)},
                          {TableCell::Text("<i>"), TableCell::Number(1.0002)}}};
  const std::string html = Render(table);
  EXPECT_THAT(html, HasSubstr("<p>The same in all rows: name &lt;i&gt;</p>"));
  EXPECT_EQ(Count(html, "&lt;i&gt;"), 1);
  EXPECT_EQ(Count(html, "<td"), 2);  // sizes differ, though their texts are the same
  table.rows.pop_back();
  EXPECT_EQ(Count(Render(table), "<td"), 2);  // nothing differs in a single row
}

TEST(LabelsTest, SayWhatDiffers) {
  EXPECT_THAT(DistinctLabels({{"run", "ring", "4"}, {"run", "direct", "4"}}),
              ElementsAre("ring", "direct"));
  EXPECT_THAT(DistinctLabels({{"", "ring"}}), ElementsAre("ring"));
}

TEST(LabelsTest, PointsSayTheirSettingsOnlyWhereNothingElseDiffers) {
  const auto key = [](double hidden, const char* settings) {
    return PointKey({.settings = settings, .experts = 8, .hidden = hidden});
  };
  // Settings from a router preset follow from the router's name, and are not shown.
  EXPECT_THAT(PointLabels({key(64, "--hidden-size 64 --router a --moe-aux-loss-coeff 0.1"),
                           key(128, "--hidden-size 128 --router b")}),
              ElementsAre("H 64", "H 128"));
  EXPECT_THAT(
      PointLabels({key(64, "--a 'x --y '\\'' --z' --seed 1 --same=true"),
                   key(64, "--a 'x --y '\\'' --z' --seed 2 --same=true"),
                   key(64, "--a b --same=true"), key(128, "")}),
      ElementsAre("H 64 · a 'x --y '\\'' --z' · seed 1", "H 64 · a 'x --y '\\'' --z' · seed 2",
                  "H 64 · a b · seed default", "H 128"));
  EXPECT_THAT(PointLabels({key(64, "--seed 1")}), ElementsAre("E 8"));
  EXPECT_THAT(PointLabels({}), IsEmpty());
}

TEST(SweepChartsTest, SeriesAreOfOneSettingButTheCapacityFactor) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kSweep};
  for (const double hidden : {64, 128}) {
    for (const double cf : {1.0, 1.25}) {
      run.sweep.push_back(
          {.settings = absl::StrCat("--moe-expert-capacity-factor ", cf, " --hidden-size ", hidden),
           .experts = 8,
           .capacity_factor = cf,
           .hidden = hidden,
           .drop_final_pct = 1 / cf});
    }
  }
  const auto key = [&](size_t row) {
    return SeriesKey(run.sweep[row], Along::kCapacity);
  };
  EXPECT_EQ(key(0), key(1));
  EXPECT_NE(key(1), key(2));
  const std::string html = SweepSection({run}).body;
  const Json drops = DataIn(html).at(0);
  EXPECT_EQ(drops["series"][0]["name"], "H 64");
  EXPECT_EQ(drops["series"][1]["name"], "H 128");
  EXPECT_THAT(ValuesOf(drops, 1, "y"), ElementsAre(1, 0.8));
  EXPECT_THAT(html, HasSubstr("<code>moe sweep --hidden-size 64,128 "
                              "--moe-expert-capacity-factor 1,1.25</code>"));
}

// Sixty trained points, in the order of nested loops: the last expert count is behind the limits of
// bars and series. More experts, more choices and more capacity are better, and cost more.
report::Run Study() {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kSweep};
  for (const double experts : {8, 16, 32, 48, 64}) {
    for (const double top_k : {1, 2, 4}) {
      for (const double cf : {1.0, 1.25, 1.5, 2.0}) {
        run.sweep.push_back({.settings = absl::StrCat(
                                 "--measure train --num-experts ", experts, " --moe-router-topk ",
                                 top_k, " --moe-expert-capacity-factor ", cf, " --repetitions 1"),
                             .measure = "train",
                             .experts = experts,
                             .top_k = top_k,
                             .capacity_factor = cf,
                             .params_total = 100 * experts,
                             .params_active = 100 * top_k,
                             .tokens_per_s = 1000 / top_k,
                             .flops_per_token = 600 * top_k,
                             .tokens = 1e6,
                             .step_ms = 10,
                             .expert_ms = 2,
                             .attention_ms = 3,
                             .output_ms = 1,
                             .optimizer_ms = 1.5,
                             .validation_loss = 4 - experts / 64 - top_k / 8 - cf / 32});
      }
    }
  }
  return run;
}

TEST(SweepChartsTest, ExpertsAreAnAxisUpToTheLast) {
  const std::string html = SweepSection({Study()}).body;
  const std::vector<Json> found = DataIn(html);
  const auto with_label = [&](const char* label) {
    const auto at = std::find_if(found.begin(), found.end(),
                                 [&](const Json& data) { return data["x"]["label"] == label; });
    return at == found.end() ? Json() : *at;
  };
  const Json experts = with_label("experts");
  EXPECT_EQ(experts["x"]["names"], Json({"8", "16", "32", "48", "64"}));
  EXPECT_EQ(experts["series"].size(), kMaxSeries);  // of 12, the first and the last among them
  EXPECT_EQ(experts["series"][0]["name"], "K 1 · cf 1");
  EXPECT_EQ(experts["series"][7]["name"], "K 4 · cf 2");
  EXPECT_THAT(ValuesOf(experts, 0, "x"), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(html, HasSubstr("Not drawn: 4 of 12 series (the table has all)."));
  const Json bars = with_label("time (ms)");
  EXPECT_EQ(bars["y"]["names"].size(), kMaxBars);
  EXPECT_EQ(bars["y"]["names"].back(), "E 64 · K 4 · cf 2");
  std::vector<std::string> parts;
  for (const Json& part : bars["series"]) parts.push_back(part["name"]);
  EXPECT_THAT(parts,
              ElementsAre("experts", "attention", "output layer", "optimiser", "everything else"));
  EXPECT_EQ(bars["series"][4]["values"][0], 2.5);
}

TEST(SweepChartsTest, LossAgainstComputeNamesThePointsOfTheFront) {
  const std::string html = SweepSection({Study()}).body;
  for (const char* const id : {"sweep-flops-loss", "sweep-active-loss", "sweep-total-loss"}) {
    EXPECT_THAT(html, HasSubstr(absl::StrCat("id=\"", id, "\"")));
  }
  // With as many FLOPs most experts and capacity are best.
  EXPECT_THAT(html, HasSubstr("Pareto points: E 64 · K 1 · cf 2; E 64 · K 2 · cf 2; E 64 · K 4 · "
                              "cf 2."));
}

TEST(SweepChartsTest, PointsThatNoiseHidesAreCountedAndTokensHaveTheirFlag) {
  report::Run run = Study();
  for (SweepRow& row : run.sweep) {
    row.validation_loss_sd = 3;
    row.tokens_per_s_sd = 2000;
    row.settings += " --vocab-size 2048";
  }
  const std::string html = SweepSection({run}).body;
  EXPECT_THAT(html, HasSubstr("Pareto points: 60 of 60, which"));
  EXPECT_THAT(html, HasSubstr("<code>moe sweep --measure train --tokens ... "));
  EXPECT_THAT(html, HasSubstr("<td>moe train --tokens ... --num-experts 64"));
  EXPECT_THAT(html, Not(HasSubstr("--data ...")));
}

// Layouts of moe plan --check: 1.2 and 0.5 times what was measured, and one that was not run.
TEST(PlanChartsTest, DrawPredictedOverMeasured) {
  const auto row = [](double step_ms, const std::string& measured) {
    return absl::StrCat(R"({"pp": 1, "tp": 1, "ep": 2, "etp": 4, "zero": 1, "recompute": "none", )",
                        R"("limit_bytes": 1e9, "used_bytes": 2e6, "step_ms": )", step_ms,
                        R"(, "measured_ms": )", measured, R"(, "measured_bytes": )",
                        measured == "null" ? "null" : "1e6", R"(, "status": "fits"})", "\n");
  };
  const report::Run run = ParseRun("p", row(12, "10") + row(5, "10") + row(7, "null")).value();
  EXPECT_EQ(run.kind, RunKind::kPlan);
  EXPECT_EQ(run.plan.size(), 3u);
  const std::string html = PlanSection({run}).body;
  EXPECT_THAT(html, HasSubstr("id=\"plan-time\""));
  EXPECT_THAT(html, HasSubstr("Median error 35.0 %, largest 50.0 %."));
  EXPECT_THAT(html, HasSubstr("id=\"plan-memory\""));
  EXPECT_THAT(html, HasSubstr("Median error 100.0 %, largest 100.0 %."));
  EXPECT_THAT(html, HasSubstr("PP 1 TP 1 EP 2 ETP 4 ZeRO 1"));
  const report::Run alone = ParseRun("p", row(7, "null")).value();
  EXPECT_THAT(PlanSection({alone}).body, Not(HasSubstr("plan-time")));
}

TEST(SweepChartsTest, TheBestAtEqualComputeHasItsTrainLine) {
  report::Run run = Study();
  run.sweep[0].flops_per_token *= 1.04;   // as much as the others with one choice
  run.sweep[59].flops_per_token *= 1.06;  // not as much as the others with four
  const std::string html = SweepSection({run}).body;
  const size_t at = html.find("Best at equal compute");
  ASSERT_NE(at, std::string::npos);
  const std::string table = html.substr(at, html.find("</table>", at) - at);
  EXPECT_EQ(Count(table, "<tr>"), 1 + 4);
  EXPECT_THAT(table, HasSubstr("<td>E 64 · K 1 · cf 2</td>"));
  EXPECT_THAT(table, HasSubstr("<td>moe train --data ... --num-experts 64 --moe-router-topk 1 "
                               "--moe-expert-capacity-factor 2</td>"));
  EXPECT_THAT(html, HasSubstr("<code>moe sweep --measure train --data ... "
                              "--moe-expert-capacity-factor 1,1.25,1.5,2"));
}

// A sweep of `copies` rows at each of three capacity factors, and a row that failed.
std::string SweepOf(const SweepRow& row, int copies = 1) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kSweep};
  for (const double cf : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    for (int i = 0; i < copies; ++i) {
      run.sweep.push_back(row);
      run.sweep.back().capacity_factor = cf;
      run.sweep.back().tokens_per_s += i + (cf < 3 ? cf : 0);
    }
  }
  run.sweep.push_back({.experts = 9, .status = "error"});
  return SweepSection({run}).body;
}

TEST(SweepChartsTest, SayHowManyRowsAreNotDrawn) {
  const std::string html =
      SweepOf({.experts = 8, .tokens_per_s = 100, .drop_final_pct = 1, .validation_loss = 2});
  EXPECT_EQ(Count(html, "Not drawn: 1 of 4 rows (failed)."), 2);  // drops and loss over capacity
  EXPECT_EQ(DataIn(html).at(0)["x"]["names"], Json({"1", "2", "dropless"}));
}

TEST(SweepChartsTest, WhiskersStandOnlyWhereThereAreRepetitions) {
  SweepRow row = {.experts = 8, .tokens_per_s = 100, .drop_final_pct = 1, .validation_loss = 2};
  EXPECT_EQ(Count(SweepOf(row), "\"dy\""), 0);
  row.validation_loss_sd = 0.1;
  EXPECT_THAT(ValuesOf(DataIn(SweepOf(row)).at(1), 0, "dy"), ElementsAre(0.1, 0.1, 0.1));
  // Rows of one point are its repetitions.
  row.validation_loss_sd = kNone;
  EXPECT_EQ(ValuesOf(DataIn(SweepOf(row, 2)).at(1), 0, "y").size(), 3u);
}

}  // namespace
}  // namespace moe::report
