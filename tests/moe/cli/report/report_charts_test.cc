// Charts of moe report: texts, scales, the Pareto front, and a mark for every value.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/bench/statistics.h"
#include "moe/cli/report/charts.h"
#include "moe/cli/report/drawing.h"
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

std::vector<std::string> LabelsOf(const Scale& scale) {
  std::vector<std::string> labels;
  for (const Tick& tick : scale.ticks()) labels.push_back(tick.label);
  return labels;
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
  EXPECT_EQ(Escape("\xFF\xC0\xAF"), bad + bad + bad);  // no UTF-8; an overlong '/'
  EXPECT_EQ(Escape("\xED\xA0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(Escape("\xE2\x82"), bad + bad);            // cut off
  EXPECT_EQ(Escape("é€😀"), "é€😀");
  EXPECT_EQ(Shortened("äöü", 3), "äöü");
  EXPECT_EQ(Shortened("äöüß", 3), "äö…");
}

TEST(ScaleTest, TicksAreNiceNumbersAroundTheData) {
  EXPECT_THAT(LabelsOf(Scale::Of(ScaleKind::kLinear, 0.3, 9.1, 5)),
              ElementsAre("0", "2", "4", "6", "8", "10"));
  EXPECT_THAT(LabelsOf(Scale::Of(ScaleKind::kLinear, 3.41, 3.59, 4)),
              ElementsAre("3.4", "3.45", "3.5", "3.55", "3.6"));
  EXPECT_THAT(LabelsOf(Scale::Of(ScaleKind::kWhole, 1, 3, 5)), ElementsAre("1", "2", "3"));
  EXPECT_THAT(LabelsOf(Scale::Of(ScaleKind::kLog, 3, 4000, 5)),
              ElementsAre("1", "10", "100", "1,000", "10,000"));
  EXPECT_THAT(LabelsOf(Scale::Of(ScaleKind::kLog, 1.5, 18, 6)),
              ElementsAre("1", "2", "5", "10", "20"));
  EXPECT_THAT(LabelsOf(Scale::Of(ScaleKind::kBytes, 1024, 1 << 20, 5)),
              ElementsAre("1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB"));
}

TEST(ScaleTest, EveryValueStandsOnTheScale) {
  for (const ScaleKind kind :
       {ScaleKind::kLinear, ScaleKind::kWhole, ScaleKind::kLog, ScaleKind::kBytes}) {
    for (const double low : {1e-9, 0.1, 1.0, 7.0, 12345.0}) {
      for (const double factor : {1.0, 1.0001, 3.0, 99.0, 100.0, 1e6}) {
        const Scale scale = Scale::Of(kind, low, low * factor, 5);
        EXPECT_GE(scale.Place(low), -1e-6) << low << " " << factor;
        EXPECT_LE(scale.Place(low * factor), 1 + 1e-6) << low << " " << factor;
        EXPECT_GE(scale.ticks().size(), 2u);
        EXPECT_LE(scale.ticks().size(), 9u);
      }
    }
  }
}

TEST(ScaleTest, LabelsThatWouldTouchAreLeftOutInEqualSteps) {
  const Scale scale = Scale::Of(ScaleKind::kLinear, 0, 1e6, 5);  // 200,000 apart, 54 wide
  EXPECT_EQ(LabelStride(scale, 400), 1u);
  EXPECT_EQ(LabelStride(scale, 320), 2u);
  EXPECT_EQ(LabelStride(scale, 10), 6u);
}

TEST(ScaleTest, CategoriesStandApartAndAwayFromTheEnds) {
  const Scale scale = Scale::OfCategories({"1", "1.25", "dropless"});
  EXPECT_THAT(LabelsOf(scale), ElementsAre("1", "1.25", "dropless"));
  EXPECT_DOUBLE_EQ(scale.Place(0), 1. / 6);
  EXPECT_DOUBLE_EQ(scale.Place(2), 5. / 6);
}

using Points = std::vector<std::pair<bench::Sample, bench::Sample>>;

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
  // Speeds with a standard deviation of 3: two differ by noise within 1.96 sqrt(2) 3 = 8.3.
  const auto speeds = [](const std::vector<std::pair<double, double>>& values) {
    Points points = Exact(values);
    for (auto& [loss, speed] : points) speed = bench::SampleOf(speed.mean, 3);
    return points;
  };
  // 1 is worse than 0, and faster by noise alone; 2 is faster beyond it.
  EXPECT_THAT(ParetoFront(speeds({{1, 100}, {2, 105}, {3, 110}}), Better::kLower, Better::kHigher),
              ElementsAre(0, 2));
  // As good as the best, and slower by noise alone: none is better.
  EXPECT_THAT(ParetoFront(speeds({{1, 100}, {1, 105}, {1, 95}}), Better::kLower, Better::kHigher),
              ElementsAre(1, 0));
}

XyChart Chart(XyStyle style, int num_points) {
  XyChart chart = {.text = {.id = "c", .title = "<script>alert(1)</script>"},
                   .x_label = "size (B)",
                   .y_label = "rate (GB/s)"};
  chart.series.push_back({.name = "<b>s</b>", .style = style});
  for (int i = 0; i < num_points; ++i)
    chart.series[0].points.push_back({.x = i + 1.0, .y = 2.0 * i});
  return chart;
}

TEST(XyChartTest, HasAMarkForEveryPoint) {
  const std::string html = Render(Chart(XyStyle::kLinePoints, 7));
  EXPECT_EQ(Count(html, "class=\"mark "), 7);
  EXPECT_THAT(html, HasSubstr("data-marks=\"7\""));
  EXPECT_THAT(html, HasSubstr("size (B)"));
  EXPECT_THAT(html, HasSubstr("rate (GB/s)"));
  EXPECT_THAT(html, Not(HasSubstr("<script>")));
  EXPECT_THAT(html, Not(HasSubstr("<b>s")));
}

TEST(XyChartTest, LeavesOutWhatHasNoPlace) {
  XyChart chart = Chart(XyStyle::kPoints, 3);
  chart.series[0].points.push_back({.x = NAN, .y = 1});
  EXPECT_THAT(Render(chart), HasSubstr("data-marks=\"3\""));
  chart.y_kind = ScaleKind::kLog;  // the first point is at 0
  EXPECT_THAT(Render(chart), HasSubstr("data-marks=\"2\""));
  EXPECT_THAT(Render(chart), HasSubstr("Not drawn: 2 of 4 points (no such figure)."));
  EXPECT_THAT(Render(chart), Not(HasSubstr("series (")));
  chart.series.push_back({.name = "none", .points = {{.x = 1, .y = NAN}}});
  EXPECT_THAT(Render(chart), HasSubstr("Not drawn: 1 of 2 series (no such figure)."));
  EXPECT_EQ(Render(Chart(XyStyle::kPoints, 0)), "");
}

TEST(XyChartTest, APointWhoseWhiskerHasNoEndStandsOnTheAxis) {
  // On a logarithmic axis the lower whisker of 0.25 +- 1 ends nowhere; the point itself is there.
  XyChart chart = Chart(XyStyle::kLinePoints, 2);
  chart.y_kind = ScaleKind::kLog;
  chart.series[0].points[0] = {.x = 1, .y = 0.25, .y_error = 1};
  chart.series[0].points[1] = {.x = 2, .y = 5};
  EXPECT_THAT(Render(chart), HasSubstr(">0.5<"));  // a tick between the two
}

TEST(XyChartTest, TheFrontIsALineAndARingPerPoint) {
  XyChart chart = Chart(XyStyle::kPoints, 4);  // x and y both grow: the first alone is best
  chart.front = Front{Better::kLower, Better::kLower};
  EXPECT_EQ(Count(Render(chart), "class=\"mark ring\""), 1);
  chart.front = Front{Better::kHigher, Better::kLower};  // all of them
  EXPECT_EQ(Count(Render(chart), "class=\"mark ring\""), 4);
  EXPECT_THAT(Render(chart), HasSubstr("data-marks=\"9\""));
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

TEST(StackedBarTest, PartsAddUpToTheScale) {
  const std::string html = Render(StackedBarChart{.text = {.id = "b", .title = "t"},
                                                  .x_label = "ms",
                                                  .unit = "ms",
                                                  .parts = {"p", "q"},
                                                  .bars = {{"one", {3, 1}}, {"two", {0, NAN}}}});
  EXPECT_THAT(html, HasSubstr("data-marks=\"2\""));
  EXPECT_THAT(html, HasSubstr("p: 3 ms, 75 % of 4 ms"));
}

TEST(HeatMapTest, HasACellPerValue) {
  HeatMap map = {.text = {.id = "h", .title = "t"}, .columns = {{"1", "step 1"}, {"2", "step 2"}}};
  map.rows = {{"0", "expert 0"}, {"1", "expert 1"}, {"2", "expert 2"}};
  map.values = {0, 1, 2, 3, 4, 0.5};
  const std::string html = Render(map);
  EXPECT_THAT(html, HasSubstr("data-marks=\"6\""));
  EXPECT_THAT(html, HasSubstr("expert 2, step 1: 4"));
  EXPECT_THAT(html, HasSubstr("fill=\"#00224e\""));  // 0
  EXPECT_THAT(html, HasSubstr("fill=\"#fee838\""));  // the largest
}

TEST(HeatMapTest, HasNoCellWithoutAValue) {
  HeatMap map = {.text = {.id = "h", .title = "t"}, .columns = {{"0", "a"}, {"1", "b"}}};
  map.rows = {{"0", "c"}};
  map.values = {kNone, 3};
  const std::string html = Render(map);
  EXPECT_THAT(html, HasSubstr("data-marks=\"1\""));
  EXPECT_THAT(html, HasSubstr("c, b: 3"));
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
  // 0 to 1 twice, 1 to 0 failed, 2 to 0 of a smaller size only.
  run.bench = {PairRow(2, 0, 1024, 9), PairRow(0, 1, 1024, 8), PairRow(0, 0, 2048, 90),
               PairRow(0, 1, 2048, 4), PairRow(0, 1, 2048, 6), PairRow(2, 1, 2048, 2),
               PairRow(1, 0, 2048, 7)};
  run.bench.back().status = "error";
  const std::string html = PairMaps({&run, 1});
  EXPECT_THAT(html, HasSubstr("p2p: GB/s between ranks, 2 KiB"));
  EXPECT_THAT(html, HasSubstr("data-marks=\"2\""));
  EXPECT_THAT(html, HasSubstr("from 0, to 1: 5"));
  EXPECT_THAT(html, HasSubstr("from 2, to 1: 2"));
  EXPECT_THAT(html, Not(HasSubstr("from 0, to 0")));
  EXPECT_EQ(PairMaps({}), "");
  // Of one rank there is no pair; ranks that no page could show are left out.
  run.bench = {PairRow(0, 0, 2048, 90), PairRow(1 << 30, 0, 2048, 1)};
  EXPECT_EQ(PairMaps({&run, 1}), "");
  run.bench = {PairRow(0, 1, 2048, 90), PairRow(128, 0, 4096, 1)};
  EXPECT_THAT(PairMaps({&run, 1}), HasSubstr("Ranks from 128 on are left out"));
}

TEST(PairMapsTest, RatesWhoseSumOverflowsHaveAMean) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  run.bench = {PairRow(0, 1, 1, 1e308), PairRow(0, 1, 1, 1e308), PairRow(1, 0, 1, 1)};
  EXPECT_THAT(PairMaps({&run, 1}), HasSubstr("from 0, to 1: 1.00e+308"));
  EXPECT_EQ(HeatColour(NAN), HeatColour(0));
}

TEST(BenchSectionTest, ACopyWithinARankIsNoPartOfTheMeanOverPairs) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  run.bench = {PairRow(0, 0, 2048, 90), PairRow(0, 1, 2048, 4), PairRow(1, 0, 2048, 6)};
  // Mean 5, deviation sqrt(2).
  EXPECT_THAT(BenchSection({&run, 1}).body, HasSubstr("2 KiB: 5 ± 1.4 GB/s"));
}

TEST(KernelSharesTest, ABarPerKernelOfItsLargestSize) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kBench};
  const auto row = [](const char* op, const char* algorithm, double size) {
    return BenchRow{.op = op, .algorithm = algorithm, .size_bytes = size, .of_kernel = true};
  };
  run.bench = {row("permute", "gather", 1024), row("permute", "gather", 2048),
               row("permute", "gather", 2048), row("permute", "sum", 1024),
               row("gemm", "forward", kNone),  row("alltoall", "staged", 4096)};
  for (size_t i = 0; i < 4; ++i) run.bench[i].memcpy_pct = 10.0 * static_cast<double>(i + 1);
  run.bench[4].rows = 64;
  run.bench[4].peak_pct = 75;
  run.bench[5].memcpy_pct = 5;  // a collective is no kernel
  run.bench[5].of_kernel = false;
  const std::string html = KernelShares({&run, 1});
  EXPECT_THAT(html, HasSubstr("data-marks=\"3\""));
  EXPECT_THAT(html, HasSubstr("of a copy&#39;s bandwidth: 25 %"));  // 20 and 30, not 10
  EXPECT_THAT(html, HasSubstr("of a copy&#39;s bandwidth: 40 %"));
  EXPECT_THAT(html, HasSubstr("of the rate of multiply-adds: 75 %"));
  EXPECT_EQ(KernelShares({}), "");
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
  EXPECT_EQ(Count(Render(table), "<td"), 2);  // one row is nothing but itself
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
  // What a preset of the router sets follows the router's name, and is not said.
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
  EXPECT_EQ(SeriesKey(run.sweep[0]), SeriesKey(run.sweep[1]));
  EXPECT_NE(SeriesKey(run.sweep[1]), SeriesKey(run.sweep[2]));
  const std::string html = SweepSection({run}).body;
  EXPECT_THAT(html, HasSubstr("cf 1.25 · H 128"));  // a point
  EXPECT_THAT(html, HasSubstr(">H 128<"));          // a series
  EXPECT_THAT(html, Not(HasSubstr("hidden-size")));
}

int CountWith(const SweepRow& row, const char* part, int copies = 1) {
  report::Run run = {.name = "r", .path = "r", .kind = RunKind::kSweep};
  for (const double cf : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    for (int i = 0; i < copies; ++i) {
      run.sweep.push_back(row);
      run.sweep.back().capacity_factor = cf;
      run.sweep.back().tokens_per_s += i + (cf < 3 ? cf : 0);
    }
  }
  run.sweep.push_back({.experts = 9, .status = "error"});
  return Count(SweepSection({run}).body, part);
}

TEST(SweepChartsTest, SayHowManyRowsAreNotDrawn) {
  // Capacity against drops and loss, speed against loss.
  const SweepRow row = {
      .experts = 8, .tokens_per_s = 100, .drop_final_pct = 1, .validation_loss = 2};
  EXPECT_EQ(CountWith(row, "Not drawn: 1 of 4 rows (failed)."), 2);
  EXPECT_EQ(CountWith(row, ">dropless</text>"), 2);  // the category
}

TEST(SweepChartsTest, WhiskersStandOnlyWhereThereAreRepetitions) {
  SweepRow row = {.experts = 8, .tokens_per_s = 100, .drop_final_pct = 1, .validation_loss = 2};
  EXPECT_EQ(CountWith(row, "class=\"whisker"), 0);
  row.validation_loss_sd = 0.1;
  EXPECT_EQ(CountWith(row, "class=\"whisker"), 3);  // of the loss over capacity
  // Rows of one point are its repetitions.
  row.validation_loss_sd = kNone;
  EXPECT_EQ(CountWith(row, "class=\"mark point", 2), 6);
}

// WCAG 2.1: relative luminance, and the contrast of two.
double Luminance(int colour) {
  double sum = 0;
  const double weights[] = {0.0722, 0.7152, 0.2126};  // blue, green, red
  for (const double weight : weights) {
    const double c = (colour & 0xFF) / 255.0;
    sum += weight * (c <= 0.04045 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4));
    colour >>= 8;
  }
  return sum;
}
double Contrast(int a, int b) {
  const double la = Luminance(a), lb = Luminance(b);
  return (std::max(la, lb) + 0.05) / (std::min(la, lb) + 0.05);
}

TEST(PaletteTest, IsLegibleOnLightAndDark) {
  ASSERT_NEAR(Contrast(0, 0xFFFFFF), 21, 1e-9);
  for (int i = 0; i < kNumInks; ++i) {
    EXPECT_GE(Contrast(kSeriesInk[i].light, kPaperInk.light), 3) << i;  // 1.4.11: graphics
    EXPECT_GE(Contrast(kSeriesInk[i].dark, kPaperInk.dark), 3) << i;
  }
  for (const Ink& text : {kTextInk, kFaintInk}) {
    EXPECT_GE(Contrast(text.light, kGroundInk.light), 4.5);  // 1.4.3: text
    EXPECT_GE(Contrast(text.dark, kPaperInk.dark), 4.5);
  }
}

}  // namespace
}  // namespace moe::report
