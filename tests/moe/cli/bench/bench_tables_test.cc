// Output of moe bench, read back by independent parsers.
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/fail_if.h"
#include "moe/cli/measure/tables.h"

namespace moe::measure {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

BenchRow SampleRow() {
  BenchRow row;
  row.op = Op::kAllToAllV;
  row.algorithm = "staged";
  row.backend = "local";
  row.transport = "memory";
  row.ranks = 4;
  row.routing = "zipf:1.2";
  row.seed = ~uint64_t{0};
  row.size_bytes = 1'048'576;
  row.count = 262'144;
  row.iterations = 20;
  row.time_us = 100.1;
  row.samples_us = {.mean = 101, .min = 90.25, .max = 1234.5, .p50 = 100, .p99 = 1200, .cv_pct = 3};
  row.wrong = 0;
  row.imbalance_received = 1.75;
  row.wait_pct = 12.5;
  row.slow_rank = 3;
  row.bytes_self = 1;
  row.bytes_same_host = 2;
  row.bytes_cross_host = 3;
  return row;
}

// RFC 4180, as a state machine.
std::vector<std::vector<std::string>> ReadCsv(const std::string& text) {
  std::vector<std::vector<std::string>> rows(1, {""});
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '"' && i + 1 < text.size() && text[i + 1] == '"') {
      rows.back().back() += text[i++];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && c == ',') {
      rows.back().emplace_back();
    } else if (!quoted && c == '\n') {
      rows.push_back({""});
    } else {
      rows.back().back() += c;
    }
  }
  rows.pop_back();
  return rows;
}

const std::vector<std::string> kNames = {"text", "whole", "real", "nothing"};
Fields RowOf(const char* text, Cell whole, double real, Cell nothing) {
  return {{"text", text}, {"whole", whole}, {"real", real}, {"nothing", nothing}};
}
const std::vector<Fields> kRows = {
    RowOf("a,\"b\"\nc|d", std::numeric_limits<int64_t>::min(), 0.1, Cell()),
    RowOf("", ~uint64_t{0}, 1e300, std::nan(""))};

TEST(TablesTest, CsvReadsBack) {
  const auto rows = ReadCsv(WriteTable(TableForm::kCsv, kNames, kRows));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0], kNames);
  EXPECT_THAT(rows[1], ElementsAre("a,\"b\"\nc|d", "-9223372036854775808", "0.1", ""));
  EXPECT_THAT(rows[2], ElementsAre("", "18446744073709551615", "1e+300", ""));
}

TEST(TablesTest, JsonAndJsonLinesReadBack) {
  const auto array = nlohmann::json::parse(WriteTable(TableForm::kJson, kNames, kRows));
  std::istringstream lines(WriteTable(TableForm::kJsonLines, kNames, kRows));
  std::string line;
  ASSERT_EQ(array.size(), 2u);
  for (const auto& object : array) {
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_EQ(nlohmann::json::parse(line), object);
  }
  EXPECT_FALSE(std::getline(lines, line));
  EXPECT_EQ(array[0]["text"], "a,\"b\"\nc|d");
  EXPECT_EQ(array[0]["whole"].get<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(array[0]["real"].get<double>(), 0.1);
  EXPECT_TRUE(array[0]["nothing"].is_null());
  EXPECT_EQ(array[1]["whole"].get<uint64_t>(), ~uint64_t{0});
  EXPECT_TRUE(array[1]["nothing"].is_null());  // NaN
  EXPECT_EQ(nlohmann::json::parse(WriteTable(TableForm::kJson, kNames, {})).size(), 0u);
}

TEST(TablesTest, JsonSurvivesBytesThatAreNotUtf8) {
  const std::vector<Fields> rows = {RowOf("\xff", int64_t{1}, 1.0, Cell())};
  EXPECT_TRUE(nlohmann::json::accept(WriteTable(TableForm::kJson, kNames, rows)));
}

TEST(TablesTest, MarkdownHasOneLinePerRowAndEscapesBars) {
  EXPECT_EQ(WriteTable(TableForm::kMarkdown, kNames, kRows),
            "| text | whole | real | nothing |\n|---|---|---|---|\n"
            "| a,\"b\" c\\|d | -9223372036854775808 | 0.1 |  |\n"
            "|  | 18446744073709551615 | 1e+300 |  |\n");
}

TEST(BenchRowTest, CellsMatchTheKeysAndTheirFigures) {
  const BenchRow row = SampleRow();
  const Fields fields = BenchFields(row);
  const auto object =
      nlohmann::json::parse(WriteTable(TableForm::kJsonLines, KeysOf(fields), {fields}));
  EXPECT_EQ(object["schema"], "moe.bench/1");
  EXPECT_EQ(object["op"], "alltoallv");
  EXPECT_EQ(object["seed"].get<uint64_t>(), ~uint64_t{0});
  EXPECT_EQ(object["time_us_p50"], 100);
  EXPECT_EQ(object["algbw_gbytes_per_s"].get<double>(), row.algbw());
  EXPECT_EQ(object["busbw_gbytes_per_s"].get<double>(), row.busbw());
  EXPECT_EQ(object["imb_rx"], 1.75);
  EXPECT_EQ(object["slow_rank"], 3);
  EXPECT_EQ(object["bytes_cross_host"], 3);
  EXPECT_EQ(object["status"], "ok");
  EXPECT_TRUE(object["error"].is_null());
  EXPECT_TRUE(object["source"].is_null());
  EXPECT_TRUE(object["memcpy_pct"].is_null());
}

TEST(BenchRowTest, NumbersAreFoundByKeyAndShortName) {
  const BenchRow sample = SampleRow();
  const Fields row = BenchFields(sample);
  EXPECT_EQ(NumberOf(row, "busbw"), sample.busbw());
  EXPECT_EQ(NumberOf(row, "busbw_gbytes_per_s"), sample.busbw());
  EXPECT_EQ(NumberOf(row, "p50"), 100);
  EXPECT_EQ(NumberOf(row, "p99"), 1200);
  EXPECT_EQ(NumberOf(row, "wait"), 12.5);
  EXPECT_TRUE(std::isnan(*NumberOf(row, "memcpy")));
  EXPECT_EQ(NumberOf(row, "routing"), std::nullopt);
  EXPECT_EQ(NumberOf(row, "nosuch"), std::nullopt);
  for (const std::string& name : NumberNamesOf(row)) {
    EXPECT_TRUE(NumberOf(row, name).has_value()) << name;
  }
}

TEST(FieldsTest, TextsAreNoNumbersAlsoWhereThereIsNone) {
  const Fields row = {{"device", "cpu"}, {"router", Cell::TextIf(false, "")}, {"threads", Cell()}};
  EXPECT_THAT(NumberNamesOf(row), ElementsAre("threads"));
  EXPECT_EQ(NumberOf(row, "device"), std::nullopt);
  EXPECT_EQ(NumberOf(row, "router"), std::nullopt);
}

// The median has a column, whose name is the key's name in bounds.
TEST(FieldsTest, TheMedianHasAColumn) {
  BenchRow row = SampleRow();
  row.samples_us = {.min = 11, .max = 99, .p50 = 33, .p99 = 88, .cv_pct = 1};
  EXPECT_THAT(BenchHead(), HasSubstr("i_min    i_max    i_p50    i_p99"));
  EXPECT_THAT(BenchLine(row, 5), HasSubstr("    11.00    99.00    33.00    88.00"));
  EXPECT_EQ(NumberOf(BenchFields(row), "i_p50"), 33);
  EXPECT_EQ(NumberOf(BenchFields(row), "p50"), 33);
}

TEST(FieldsTest, ShortNamesAreThoseOfTheKeysThatARowHas) {
  Fields row = {{"op", "gemm"}};
  AddTimes({.min = 1, .max = 9, .p50 = 3, .p99 = 8, .cv_pct = 40}, 5, row);
  AddVerdict(2, "wrong elements", row);
  EXPECT_EQ(NumberOf(row, "time"), 3);
  EXPECT_EQ(NumberOf(row, "p50"), 3);  // the time is the median
  EXPECT_EQ(NumberOf(row, "p99"), 8);
  EXPECT_EQ(NumberOf(row, "cv"), 40);
  EXPECT_EQ(NumberOf(row, "wrong"), 2);
  EXPECT_EQ(NumberOf(row, "busbw"), std::nullopt);
  EXPECT_THAT(NumberNamesOf(row),
              testing::ElementsAre("time", "i_min", "i_max", "p50", "i_p99", "p99", "i_cv", "cv",
                                   "wrong", "iters", "time_us", "time_us_min", "time_us_max",
                                   "time_us_p99", "time_us_cv_pct", "nwrong"));
}

// The columns of nccl-tests by position, from their widths: 12 12 8 6 6, then 7 6 6 6 twice, with
// two blanks between them.
std::vector<std::string> ReadNcclLine(const std::string& line) {
  std::vector<std::string> columns;
  size_t at = 0;
  for (const size_t width : {12, 12, 8, 6, 6, 7, 6, 6, 6, 7, 6, 6, 6}) {
    if (at > 0) {
      EXPECT_EQ(line.substr(at, 2), "  ");
      at += 2;
    }
    const std::string field = line.substr(at, width);
    EXPECT_EQ(field.size(), width) << line;
    columns.push_back(field.substr(std::min(field.find_first_not_of(' '), field.size())));
    at += width;
  }
  EXPECT_EQ(line.substr(at), "\n");
  return columns;
}

TEST(NcclFormatTest, ALineHasItsThirteenColumns) {
  EXPECT_THAT(ReadNcclLine(NcclLine(SampleRow())),
              ElementsAre("1048576", "262144", "float", "none", "-1", "100.10", "10.48", "7.86",
                          "0", "N/A", "N/A", "N/A", "N/A"));
  BenchRow row = SampleRow();
  row.op = Op::kAllReduce;
  row.dtype = DType::kBFloat16;
  row.in_place = true;
  row.wrong = 12;
  row.time_us = 123456.7;
  row.other_time_us = 524.288;
  row.other_wrong = 3;
  EXPECT_THAT(ReadNcclLine(NcclLine(row)),
              ElementsAre("1048576", "262144", "bfloat16", "sum", "-1", "524.29", "2.00", "3.00",
                          "3", "123457", "0.01", "0.01", "12"));
}

TEST(NcclFormatTest, NumbersOfEverySizeStayInTheirColumns) {
  BenchRow row = SampleRow();
  for (double time = 0.001; time < 1e12; time *= 10) {
    row.time_us = time;
    row.wrong = static_cast<int64_t>(time);
    const auto columns = ReadNcclLine(NcclLine(row));
    EXPECT_NEAR(std::stod(columns[5]), time, 0.05 * time + 0.005) << time;
  }
}

TEST(NcclFormatTest, HeadAndFootAreWordForWord) {
  EXPECT_EQ(
      NcclHead(),
      "#                                                              out-of-place               "
      "        in-place          \n"
      "#       size         count      type   redop    root     time   algbw   busbw  #wrong     "
      "time   algbw   busbw  #wrong \n"
      "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             "
      "(us)  (GB/s)  (GB/s)         \n");
  const std::vector<BenchRow> rows = {SampleRow()};
  EXPECT_THAT(NcclFoot(rows), HasSubstr("# Out of bounds values : 0 OK\n"
                                        "# Avg bus bandwidth    : 7.85646 \n"));
  std::vector<BenchRow> wrong = rows;
  wrong[0].wrong = 5;
  wrong[0].other_wrong = 2;
  EXPECT_THAT(NcclFoot(wrong), HasSubstr("# Out of bounds values : 7 FAILED\n"));
}

TEST(NcclFormatTest, TheAverageIsOfBothFormsAndNotOfCopiesInsideARank) {
  BenchRow row = SampleRow();  // busbw 1e6 * 3 / 4
  row.size_bytes = 1'000'000;
  row.time_us = 1000;
  row.other_time_us = 500;
  EXPECT_THAT(NcclFoot({row}), HasSubstr("# Avg bus bandwidth    : 1.125 \n"));
  row.op = Op::kPointToPoint;
  row.other_time_us = std::nan("");
  row.source = row.destination = 1;
  BenchRow between = row;
  between.destination = 2;
  between.time_us = 4000;
  EXPECT_THAT(NcclFoot({row, between}), HasSubstr("# Avg bus bandwidth    : 0.25 \n"));
  row.ranks = 1;  // without others
  EXPECT_THAT(NcclFoot({row}), HasSubstr("# Avg bus bandwidth    : 1 \n"));
}

TEST(BenchTableTest, FirstNineColumnsAreThoseOfNcclTests) {
  const BenchRow row = SampleRow();
  const std::string own = BenchLine(row, 5);
  const std::string nccl = NcclLine(row);
  constexpr size_t kNine = 12 + 14 + 10 + 8 + 8 + 9 + 8 + 8 + 8;
  EXPECT_EQ(own.substr(0, kNine), nccl.substr(0, kNine));
  // Head and lines have the same width.
  std::istringstream head(BenchHead());
  for (std::string line; std::getline(head, line);) EXPECT_EQ(line.size() + 1, own.size()) << line;
  EXPECT_THAT(BenchFoot({row}), HasSubstr("self 1, same host 2, cross host 3"));
}

TEST(BenchTableTest, NamesTheBusiestRankAndASlowOneBeyondNoise) {
  BenchRow row = SampleRow();
  EXPECT_THAT(BenchLine(row, 5), HasSubstr("     1.00      1.75   12.50     3  "));
  row.busiest_receiver = 0;
  row.slow_rank = -1;
  EXPECT_THAT(BenchLine(row, 5), HasSubstr("     1.00    1.75@0   12.50     -  "));
  const size_t width = BenchLine(row, 5).size();
  row.imbalance_received = 123.456;
  row.busiest_receiver = 1023;
  EXPECT_THAT(BenchLine(row, 5), HasSubstr(" 123@1023 "));
  EXPECT_EQ(BenchLine(row, 5).size(), width);
  const Fields fields = BenchFields(row);
  EXPECT_TRUE(std::isnan(*NumberOf(fields, "slow_rank")));
  EXPECT_EQ(NumberOf(fields, "busiest_rx"), 1023);
  EXPECT_TRUE(std::isnan(*NumberOf(fields, "busiest_tx")));
}

TEST(BenchTableTest, RowsThatDidNotConvergeAreMarkedAndCounted) {
  BenchRow row = SampleRow();  // cv 3 %
  EXPECT_THAT(BenchLine(row, 3), HasSubstr("    3.00 "));
  EXPECT_THAT(BenchLine(row, 2.5), HasSubstr("    3.00*"));
  constexpr Column kColumns[] = {{"op", "op", "", -4}, {"time_us_cv_pct", "i_cv%", "(%)", 8, 2}};
  EXPECT_EQ(TableLine(kColumns, {{"op", "x"}, {"time_us_cv_pct", 3.0}}, 2.5), "  x       3.00*\n");
  EXPECT_EQ(TableLine(kColumns, {{"op", "x"}, {"time_us_cv_pct", 3.0}}, 3), "  x       3.00\n");
  EXPECT_EQ(NoiseFoot({1, 2, 3}, 3), "");
  EXPECT_THAT(NoiseFoot({1, 2, 3}, 1),
              HasSubstr("Not converged        : 2 of 3 rows, i_cv% above 1"));
  EXPECT_THAT(NoiseFoot({7}, 5), HasSubstr(": 1 of 1 row, "));
}

TEST(BenchTableTest, OneRankIsExplained) {
  BenchRow row = SampleRow();
  row.ranks = 1;
  EXPECT_THAT(BenchFoot({row}), HasSubstr("busbw is 0"));
}

const std::vector<std::string> kColumns = {"busbw", "wait", "cv"};

bool Fails(const std::string& text, double busbw, double wait) {
  const FailIf parsed = FailIf::Parse(text, kColumns).value();
  return parsed.Holds([&](absl::string_view column) -> std::optional<double> {
    if (column == "busbw") return busbw;
    if (column == "wait") return wait;
    return std::nan("");
  });
}

TEST(FailIfTest, ComparesAndCombines) {
  EXPECT_TRUE(Fails("busbw<1.5", 1.4, 0));
  EXPECT_FALSE(Fails("busbw<1.5", 1.5, 0));
  EXPECT_TRUE(Fails("busbw <= 1.5", 1.5, 0));
  EXPECT_TRUE(Fails("busbw>1e0", 1.5, 0));
  EXPECT_TRUE(Fails("busbw>=1.5", 1.5, 0));
  EXPECT_TRUE(Fails("wait==3", 0, 3));
  EXPECT_TRUE(Fails("wait!=3", 0, 2));
  // && binds tighter than ||.
  EXPECT_TRUE(Fails("busbw<1 || busbw<9 && wait>50", 0.5, 0));
  EXPECT_FALSE(Fails("(busbw<1 || busbw<9) && wait>50", 0.5, 0));
  EXPECT_TRUE(Fails("(busbw<1 || busbw<9) && wait>50", 2, 60));
  EXPECT_TRUE(Fails("busbw>0&&wait>0||cv>0", 1, 1));
}

TEST(FailIfTest, WhatWasNotMeasuredFailsNothing) {
  EXPECT_FALSE(Fails("cv<1", 1, 1));
  EXPECT_FALSE(Fails("cv!=1", 1, 1));
}

TEST(FailIfTest, BoundsMayBeMultiplesOfABase) {
  const auto fails = [](const std::string& text, double busbw, double base) {
    const auto parsed = FailIf::Parse(text, kColumns, FailIf::Base::kPresent);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() &&
           parsed->Holds([&](absl::string_view) -> std::optional<double> { return busbw; },
                         [&](absl::string_view) -> std::optional<double> { return base; });
  };
  EXPECT_TRUE(fails("busbw<0.5*base", 4, 10));
  EXPECT_FALSE(fails("busbw<0.5*base", 5, 10));
  EXPECT_TRUE(fails("busbw < 0.5 * base", 4, 10));
  EXPECT_TRUE(fails("busbw<base*0.5", 4, 10));
  EXPECT_TRUE(fails("busbw < base / 2", 4, 10));
  EXPECT_FALSE(fails("busbw<base/2", 5, 10));
  EXPECT_TRUE(fails("busbw<base", 9, 10));
  EXPECT_FALSE(fails("(busbw<base)&&wait>20", 9, 10));
  EXPECT_FALSE(fails("busbw<0*base", 0, 10));
  EXPECT_TRUE(fails("busbw<0*base", -1, 10));
  EXPECT_FALSE(fails("busbw<base", 9, std::nan("")));
  EXPECT_FALSE(fails("busbw!=base", 9, std::nan("")));
  for (const auto& [text, part] : {std::pair("busbw<0.5*", "at the end, expected base"),
                                   {"busbw<0.5*bas", "at 'bas', expected base"},
                                   {"busbw<base*", "at the end, expected a number"},
                                   {"busbw<base/0", "expected no division by 0"},
                                   {"busbw<base*base", "at 'base', expected a number"},
                                   {"busbw<base-1", "at '-1', expected &&, || or the end"},
                                   {"base<busbw", "expected a column"}}) {
    const auto parsed = FailIf::Parse(text, kColumns, FailIf::Base::kPresent);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(part));
  }
}

TEST(FailIfTest, RefusesWithThePlace) {
  const auto refused = [](const std::string& text) {
    const auto parsed = FailIf::Parse(text, kColumns);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(parsed.status().message());
  };
  EXPECT_THAT(refused(""), HasSubstr("at the end, expected a column"));
  EXPECT_THAT(refused("busw<1"), HasSubstr("at 'busw<1', expected a column: busbw, wait, cv"));
  EXPECT_THAT(refused("busbw=1"), HasSubstr("at '=1', expected <, <="));
  EXPECT_THAT(refused("busbw<x"), HasSubstr("at 'x', expected a number"));
  EXPECT_THAT(refused("busbw<nan"), HasSubstr("expected a number"));
  EXPECT_THAT(refused("busbw<0.9*base"), HasSubstr("moe report --compare A B"));
  EXPECT_THAT(refused("busbw<base"), HasSubstr("moe report --compare A B"));
  EXPECT_THAT(refused("busbw<1 &"), HasSubstr("at '&', expected &&, || or the end"));
  EXPECT_THAT(refused("busbw<1 &&"), HasSubstr("at the end"));
  EXPECT_THAT(refused("(busbw<1"), HasSubstr("expected ')'"));
  EXPECT_THAT(refused(std::string(200, '(')), HasSubstr("fewer parentheses"));
}

TEST(HeatMapTest, ShowsEveryPairAndIgnoresTheDiagonalInItsScale) {
  const HeatMap map = {.ranks = 2, .gbytes_per_s = {80, 4, 2, 90}, .title = "p2p <1 MB>"};
  EXPECT_EQ(HeatText(map),
            "# p2p <1 MB>\n"
            "# from\\to         0          1 \n"
            "        0     80.00\u2588      4.00\u2588\n"
            "        1      2.00\u2592     90.00\u2588\n");
}

}  // namespace
}  // namespace moe::measure
