// moe bench gemm: rows per expert and checked products.
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

KernelSpec SmallSpec() {
  return {.op = KernelOp::kGemm,
          .tokens = 37,
          .hidden = 33,
          .ffn = 17,
          .router = {.num_experts = 5, .top_k = 3}};
}

TEST(ExpertRowsTest, UniformIsEven) {
  // Token t goes to t, t + 1 and t + 2 mod 5; of 37 tokens 8, 8, 7, 7, 7 have t mod 5 = 0 .. 4.
  EXPECT_THAT(ExpertRows(SmallSpec(), 0).value(), ::testing::ElementsAre(22, 23, 23, 22, 21));
}

TEST(ExpertRowsTest, SkewedRowsAddUpAndFollowTheirShares) {
  KernelSpec spec = SmallSpec();
  spec.tokens = 1000;
  spec.routing = ParseRouting("hot_expert:0.5").value();
  const std::vector<int64_t> rows = ExpertRows(spec, 0).value();
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), 3000);
  // A token misses expert 0 three times: 1/2, then 3/7 of what is left (1/2 and three 1/8), then
  // 1/3. The others share the 3 - 13/14 slots that remain. Tokens are drawn apart: within six
  // standard deviations of a binomial.
  const double hot = 1 - 0.5 * 3 / 7 / 3;
  const double other = (3 - hot) / 4;
  EXPECT_NEAR(static_cast<double>(rows[0]), 1000 * hot, 6 * std::sqrt(1000 * hot * (1 - hot)));
  for (int e = 1; e < 5; ++e) {
    EXPECT_NEAR(static_cast<double>(rows[e]), 1000 * other,
                6 * std::sqrt(1000 * other * (1 - other)));
  }
}

TEST(ExpertRowsTest, NoExpertHasATokenTwice) {
  KernelSpec spec = SmallSpec();
  spec.routing = ParseRouting("hot_expert:1").value();
  const std::vector<int64_t> rows = ExpertRows(spec, 0).value();
  EXPECT_EQ(rows[0], 37);  // every token, once
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), 111);
  spec.router.top_k = 6;
  EXPECT_EQ(ExpertRows(spec, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ExpertRowsTest, RoutingsOfRanksAreRefused) {
  KernelSpec spec = SmallSpec();
  for (const char* text : {"hot_rank:0.5", "ragged", "zero_rank"}) {
    spec.routing = ParseRouting(text).value();
    EXPECT_EQ(ExpertRows(spec, 0).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(GemmBenchTest, MeasuresAndChecksTheThreeProducts) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const char* routing : {"uniform", "hot_expert:1"}) {  // the last: four empty experts
      KernelSpec spec = SmallSpec();
      spec.router.top_k = std::string(routing) == "uniform" ? 3 : 1;
      const int n = 37 * spec.router.top_k;
      spec.dtype = type;
      spec.routing = ParseRouting(routing).value();
      ThreadPool threads(2);
      const auto device = KernelDevice::Create({}, threads).value();
      const auto rows =
          MeasureKernels(spec, {.iterations = 3, .warmup = 1, .budget = absl::ZeroDuration()},
                         *device)
              .value();
      ASSERT_EQ(rows.size(), 3u);
      for (const KernelRow& row : rows) {
        EXPECT_EQ(row.times.wrong, 0) << row.kernel << " " << moe::NameOf(type) << " " << routing;
        EXPECT_EQ(row.slots, n);
        EXPECT_EQ(row.times.iterations, 3);
        EXPECT_EQ(row.place.threads, 2);
        EXPECT_GT(row.times.limit_per_ns, 0);
        // 2 N H F operations in the median time, by hand.
        EXPECT_DOUBLE_EQ(row.times.work_per_ns, 2.0 * n * 33 * 17 / row.times.time_us.p50 * 1e-3);
      }
      EXPECT_EQ(rows[0].largest_rows, std::string(routing) == "uniform" ? 23 : 37);
    }
  }
}

// The first element of each result is among those that are looked at.
TEST(GemmBenchTest, APlantedWrongElementIsCounted) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    KernelSpec spec = SmallSpec();
    spec.dtype = type;
    const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
    const auto made = MakeGemmCases(spec, *device).value();
    ASSERT_EQ(made->cases().size(), 3u);
    for (const KernelCase& one : made->cases()) {
      ASSERT_TRUE(one.timed.prepare(0).ok());
      ASSERT_TRUE(one.timed.run().ok());
      EXPECT_EQ(one.timed.wrong().value(), 0) << one.kernel;
      one.result[0] ^= std::byte{1};  // the last bit
      EXPECT_EQ(one.timed.wrong().value(), 1) << one.kernel;
      ASSERT_TRUE(one.timed.spoil().ok());
      EXPECT_EQ(one.timed.wrong().value(), 97) << one.kernel;  // every sample
      ASSERT_TRUE(one.timed.run().ok());
      EXPECT_EQ(one.timed.wrong().value(), 0) << one.kernel;
    }
  }
}

TEST(GemmBenchTest, OtherTypesAreRefused) {
  KernelSpec spec = SmallSpec();
  spec.dtype = DType::kInt64;
  const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
  EXPECT_EQ(MeasureKernels(spec, {}, *device).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe::bench
