// moe bench gemm: rows per expert and checked products.
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/bench/gemm_bench.h"

namespace moe::bench {
namespace {

using ::testing::ElementsAre;

GemmSpec SmallSpec() {
  return {.tokens = 37, .top_k = 3, .num_experts = 5, .hidden = 33, .ffn = 17};
}

TEST(ExpertRowsTest, UniformIsEvenWithTheRemainderFirst) {
  EXPECT_THAT(ExpertRows(SmallSpec(), 0).value(), ElementsAre(23, 22, 22, 22, 22));  // 111 rows
}

TEST(ExpertRowsTest, SkewedRowsAddUpAndFollowTheirShares) {
  GemmSpec spec = SmallSpec();
  spec.tokens = 1000;
  spec.routing = ParseRouting("hot_expert:0.5").value();
  const std::vector<int64_t> rows = ExpertRows(spec, 0).value();
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), 3000);
  // Binomial: within six standard deviations.
  EXPECT_NEAR(static_cast<double>(rows[0]), 1500, 6 * std::sqrt(3000 * 0.25));
  for (int e = 1; e < 5; ++e) {
    EXPECT_NEAR(static_cast<double>(rows[e]), 375, 6 * std::sqrt(3000 * 0.125 * 0.875));
  }
}

TEST(ExpertRowsTest, RoutingsOfRanksAreRefused) {
  GemmSpec spec = SmallSpec();
  for (const char* text : {"hot_rank:0.5", "ragged", "zero_rank"}) {
    spec.routing = ParseRouting(text).value();
    EXPECT_EQ(ExpertRows(spec, 0).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(GemmBenchTest, MeasuresAndChecksTheThreeProducts) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const char* routing : {"uniform", "hot_expert:1"}) {  // the last: four empty experts
      GemmSpec spec = SmallSpec();
      spec.dtype = type;
      spec.routing = ParseRouting(routing).value();
      ThreadPool threads(2);
      const auto rows = MeasureGemm(
          spec, {.iterations = 3, .warmup = 1, .budget = absl::ZeroDuration()}, threads);
      ASSERT_TRUE(rows.ok()) << rows.status();
      ASSERT_EQ(rows->size(), 3u);
      for (const GemmRow& row : *rows) {
        EXPECT_EQ(row.times.wrong, 0) << row.product << " " << moe::NameOf(type) << " " << routing;
        EXPECT_EQ(row.rows, 111);
        EXPECT_EQ(row.times.iterations, 3);
        EXPECT_EQ(row.threads, 2);
        EXPECT_GT(row.times.limit_per_ns, 0);
        // 2 N H F operations in the median time, by hand.
        EXPECT_DOUBLE_EQ(row.times.work_per_ns, 2.0 * 111 * 33 * 17 / row.times.time_us.p50 * 1e-3);
      }
      EXPECT_EQ((*rows)[0].largest_rows, std::string(routing) == "uniform" ? 23 : 111);
    }
  }
}

TEST(GemmBenchTest, OtherTypesAreRefused) {
  GemmSpec spec = SmallSpec();
  spec.dtype = DType::kInt64;
  ThreadPool threads(1);
  EXPECT_EQ(MeasureGemm(spec, {}, threads).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe::bench
