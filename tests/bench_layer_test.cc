// moe bench layer: rows by pass and phase, checked against the first call.
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/create.h"
#include "moe/bench/layer_bench.h"

namespace moe::bench {
namespace {

constexpr MeasureOptions kShort = {.iterations = 3, .warmup = 0, .budget = absl::ZeroDuration()};

// The rows of every rank.
std::vector<std::vector<LayerRow>> Measure(int ranks, const LayerSpec& spec) {
  std::vector<std::vector<LayerRow>> rows(ranks);
  const absl::Status status = RunRanks({.plan = {.ranks = ranks}, .timeout = absl::Seconds(30)},
                                       [&](std::unique_ptr<Communicator> world) -> absl::Status {
                                         const int rank = world->rank();
                                         auto mine = MeasureLayer(spec, kShort, std::move(world));
                                         if (mine.ok()) rows[rank] = *std::move(mine);
                                         return mine.status();
                                       });
  EXPECT_TRUE(status.ok()) << status;
  return rows;
}

TEST(LayerBenchTest, MeasuresEveryPhaseOfBothPasses) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const int ranks : {1, 3}) {
      const LayerSpec spec = {
          .dtype = type, .tokens = 21, .top_k = 2, .num_experts = 5, .hidden = 16, .ffn = 8};
      const auto of_rank = Measure(ranks, spec);
      const std::vector<LayerRow>& rows = of_rank[0];
      ASSERT_EQ(rows.size(), 12u);
      for (int pass = 0; pass < 2; ++pass) {
        double shares = 0;
        for (int p = 0; p < 6; ++p) {
          const LayerRow& row = rows[pass * 6 + p];
          EXPECT_EQ(row.pass, pass == 0 ? "forward" : "backward");
          EXPECT_EQ(row.iterations, 3);
          EXPECT_EQ(row.wrong, 0);
          EXPECT_EQ(LayerCells(row).size(), LayerKeys().size());
          EXPECT_EQ(std::isnan(row.gflops_per_s), row.phase != "expert");
          if (row.phase != "all") shares += row.share_pct;
          // All ranks agree.
          EXPECT_EQ(row.time_us.p50, of_rank[ranks - 1][pass * 6 + p].time_us.p50);
        }
        EXPECT_LE(shares, 100 + 1e-6);  // phases do not overlap on one stream
        EXPECT_GT(shares, 0);
        const LayerRow& expert = rows[pass * 6 + 3];
        EXPECT_EQ(expert.phase, "expert");
        EXPECT_DOUBLE_EQ(expert.gflops_per_s, (pass == 0 ? 6.0 : 12.0) * ranks * 21 * 2 * 16 * 8 /
                                                  expert.time_us.p50 * 1e-3);
      }
    }
  }
}

TEST(LayerBenchTest, RefusesTypesAndShapesThatTheLayerDoesNotHave) {
  for (const LayerSpec& spec : {LayerSpec{.dtype = DType::kInt64}, LayerSpec{.top_k = 9}}) {
    const absl::Status status =
        RunRanks({.plan = {.ranks = 1}}, [&](std::unique_ptr<Communicator> world) {
          return MeasureLayer(spec, kShort, std::move(world)).status();
        });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

}  // namespace
}  // namespace moe::bench
