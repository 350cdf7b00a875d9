// moe bench layer: rows by pass and phase, checked against the first call; load figures by hand.
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/create.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/layer_on_rank.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/tables.h"

namespace moe::measure {
namespace {

constexpr MeasureOptions kWithoutWarmup = {
    .iterations = 3, .warmup = 0, .budget = absl::ZeroDuration()};

LayerSpec SmallSpec() {
  return {
      .tokens = 21,
      .layer = {.router = {.num_experts = 5, .top_k = 2, .hidden_size = 16}, .ffn_hidden_size = 8}};
}

// The results of every rank.
std::vector<LayerResult> Measure(int ranks, const LayerSpec& spec) {
  std::vector<LayerResult> results(ranks);
  const absl::Status status = RunRanks({.plan = {.ranks = ranks}, .timeout = absl::Seconds(30)},
                                       [&](std::unique_ptr<Communicator> world) -> absl::Status {
                                         const int rank = world->rank();
                                         auto mine =
                                             MeasureLayer(spec, kWithoutWarmup, std::move(world));
                                         if (mine.ok()) results[rank] = *std::move(mine);
                                         return mine.status();
                                       });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

TEST(LayerBenchTest, MeasuresEveryPhaseOfBothPasses) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const int ranks : {1, 3}) {
      LayerSpec spec = SmallSpec();
      spec.trainer.dtype = type;
      const auto of_rank = Measure(ranks, spec);
      const std::vector<LayerRow>& rows = of_rank[0].rows;
      ASSERT_EQ(rows.size(), 12u);
      EXPECT_EQ(of_rank[0].figures.iterations, 3);
      for (int pass = 0; pass < 2; ++pass) {
        double shares = 0;
        for (int p = 0; p < 6; ++p) {
          const LayerRow& row = rows[pass * 6 + p];
          EXPECT_EQ(row.pass, pass == 0 ? "forward" : "backward");
          EXPECT_EQ(row.wrong, 0);
          EXPECT_EQ(std::isnan(row.gflops_per_s), row.phase != "expert");
          if (row.phase != "all") shares += row.share_pct;
          // All ranks agree.
          EXPECT_EQ(row.time_us.p50, of_rank[ranks - 1].rows[pass * 6 + p].time_us.p50);
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

TEST(LayerBenchTest, FiguresOfAWholeCall) {
  const LayerFigures f = Measure(2, SmallSpec())[1].figures;
  EXPECT_EQ(f.kept_rows, 2 * 21 * 2);
  EXPECT_EQ(f.drop_fraction, 0);
  EXPECT_DOUBLE_EQ(f.tokens_per_s, 2 * 21 / f.step_us.mean * 1e6);
  // At least x, y, dx, dy; parameters and gradients of 3 experts on rank 0: 3 H F each, and the
  // router's E H.
  EXPECT_GE(f.peak_bytes, 4 * (4 * 21 * 16) + 8 * (3 * 3 * 16 * 8 + 5 * 16));
}

TEST(LayerBenchTest, RowsSayTheOrderOfBFloat16ThatWasTaken) {
  const auto order_of = [](const LayerSpec& spec) {
    const LayerResult result = Measure(2, spec)[1];
    const Fields fields = LayerFields(result, result.rows[0]);
    return std::pair(result.bfloat16_order, Find(fields, "bf16_order")->text());
  };
  LayerSpec spec = SmallSpec();
  EXPECT_EQ(order_of(spec), std::pair(std::optional<BFloat16Order>(), std::string()));
  spec.trainer.dtype = DType::kBFloat16;
  EXPECT_TRUE(order_of(spec).first.has_value());
  for (const auto& choice : kBFloat16OrderWords) {
    spec.trainer.session.bfloat16_order = choice.value;
    EXPECT_EQ(order_of(spec), std::pair(std::optional(choice.value), std::string(choice.word)));
  }
}

TEST(LayerBenchTest, OneHotExpertDropsWhatIsOverCapacity) {
  for (const int ranks : {1, 2, 3}) {
    LayerSpec spec = SmallSpec();
    spec.layer.router.top_k = 1;
    spec.layer.router.capacity_factor = 2;
    spec.routing = ParseRouting("hot_expert:1").value();
    const LayerFigures f = Measure(ranks, spec)[0].figures;
    // C = ceil(21 * 1 * 2 / 5) = 9 for each rank's 21 tokens, which are a micro-batch.
    EXPECT_EQ(f.kept_rows, 9 * ranks);
    EXPECT_DOUBLE_EQ(f.drop_fraction, 12.0 / 21);
    EXPECT_DOUBLE_EQ(f.max_vio, 4);  // 5 times the mean
    EXPECT_EQ(f.dead_experts, 4);
  }
}

TEST(LayerBenchTest, EveryRoutingIsRightOnEveryRankCount) {
  for (const char* text :
       {"uniform", "zipf:1.2", "hot_expert:0.9", "hot_rank:0.9", "ragged", "zero_rank"}) {
    for (const int ranks : {1, 3, 8}) {
      LayerSpec spec = SmallSpec();
      spec.layer.router.num_experts = 9;
      spec.routing = ParseRouting(text).value();
      const auto results = Measure(ranks, spec);
      for (const LayerRow& row : results[0].rows) EXPECT_EQ(row.wrong, 0) << text << " " << ranks;
      int64_t rows = 0;
      for (int r = 0; r < ranks; ++r) {
        rows += 2 * TokensOfRank(*spec.routing, {.rank = r, .ranks = ranks, .tokens = 21});
      }
      EXPECT_EQ(results[0].figures.kept_rows, rows) << text << " " << ranks;
    }
  }
}

TEST(LayerBenchTest, ExpertParallelGroupsAndOverlapAreMeasuredToo) {
  LayerSpec spec = SmallSpec();
  spec.trainer.session.mesh.expert = 2;
  spec.layer.overlap_degree = 2;
  spec.routing = ParseRouting("hot_rank:1").value();
  const LayerResult result = Measure(4, spec)[0];
  EXPECT_EQ(result.figures.kept_rows, 4 * 21 * 2);
  EXPECT_EQ(result.figures.dead_experts, 2);  // rank 0 of a group has experts 0 to 2
  for (const LayerRow& row : result.rows) EXPECT_EQ(row.wrong, 0);
}

TEST(LayerBenchTest, TensorRanksShareTheirTokens) {
  LayerSpec spec = SmallSpec();
  spec.layer.shared_expert_ffn_hidden_size = 32;
  spec.layer.router.top_k = 1;
  spec.layer.router.capacity_factor = 2;
  spec.routing = ParseRouting("hot_expert:1").value();
  spec.trainer.session.mesh = {.tensor = 2, .expert = 4};
  spec.trainer.session.tensor_leaves = 2;
  const LayerResult result = Measure(4, spec)[0];
  for (const LayerRow& row : result.rows) EXPECT_EQ(row.wrong, 0) << row.pass;
  // C = ceil(42 * 1 * 2 / 5) = 17 for the 42 tokens of each of two tensor groups.
  const LayerFigures& f = result.figures;
  EXPECT_EQ(f.kept_rows, 17 * 2);
  EXPECT_DOUBLE_EQ(f.drop_fraction, 25.0 / 42);
  EXPECT_EQ(f.dead_experts, 4);
  EXPECT_DOUBLE_EQ(f.tokens_per_s, 4 * 21 / f.step_us.mean * 1e6);
  EXPECT_EQ(Find(LayerFields(result, result.rows[0]), "tensor_parallel_size")->text(), "2");
}

// The default of EP beside ETP, and rows of experts that are counted once although two ranks have
// them.
TEST(LayerBenchTest, ExpertTensorRanksShareExperts) {
  LayerSpec spec = SmallSpec();
  spec.layer.ffn_hidden_size = 32;
  spec.trainer.session.mesh = {.tensor = 4, .expert_tensor = 2, .expert = 0};
  spec.trainer.session.tensor_leaves = 4;
  const LayerResult result = Measure(4, spec)[0];
  for (const LayerRow& row : result.rows) EXPECT_EQ(row.wrong, 0) << row.pass;
  EXPECT_EQ(result.figures.kept_rows, 4 * 21 * 2);
  const Fields fields = LayerFields(result, result.rows[0]);
  EXPECT_EQ(Find(fields, "expert_parallel_size")->text(), "2");
  EXPECT_EQ(Find(fields, "expert_tensor_parallel_size")->text(), "2");
}

TEST(LayerBenchTest, ReplaysATraceRecordByRecord) {
  RoutingTrace trace{
      .header = {.ranks = 2, .expert_parallel_size = 2, .num_experts = 3, .top_k = 2},
      .records = {}};
  trace.records.push_back({.tokens = {4, 2}, .slots = {4, 3, 1, 2, 0, 2}});
  trace.records.push_back({.step = 1, .tokens = {0, 6}, .slots = {0, 0, 0, 6, 6, 0}});
  for (const int ranks : {1, 2}) {
    LayerSpec spec = SmallSpec();
    spec.layer.router.num_experts = 3;
    spec.tokens = 6;
    spec.routing = ParseRouting("trace:file").value();
    spec.routing->replay = std::make_shared<const Replay>(Replay::Create(trace, ranks).value());
    const LayerFigures f = Measure(ranks, spec)[0].figures;
    EXPECT_EQ(f.kept_rows, 12);  // both records
    // Three calls: records 0, 1, 0, of six tokens each.
    EXPECT_DOUBLE_EQ(f.tokens_per_s, 6 / f.step_us.mean * 1e6);
    // 12, 9 and 3 slots of 24, mean 8.
    EXPECT_DOUBLE_EQ(f.max_vio, 0.5);
  }
}

TEST(FirstResultsTest, CountsWhatDiffersFromTheFirstResultsOfARecord) {
  FirstResults<float> first(1 << 20);
  std::array<int64_t, 2> wrong = {};
  const std::vector<float> y = {1, 0, 3}, dx = {4, 5};
  first.Compare(0, y, dx, wrong);
  first.Compare(1, dx, y, wrong);
  first.Compare(0, y, dx, wrong);
  EXPECT_THAT(wrong, ::testing::ElementsAre(0, 0));
  first.Compare(0, {1, -0.0f, 3}, {4.5f, NAN}, wrong);  // the sign of a zero counts, too
  EXPECT_THAT(wrong, ::testing::ElementsAre(1, 2));
  first.Compare(1, dx, {1, 0, 4}, wrong);
  EXPECT_THAT(wrong, ::testing::ElementsAre(1, 3));
}

TEST(FirstResultsTest, KeepsTheFirstRecordAndOthersWhileThereIsRoom) {
  FirstResults<float> first(16);
  std::array<int64_t, 2> wrong = {};
  for (const int64_t record : {7, 8, 9}) first.Compare(record, {1}, {2}, wrong);  // 8 bytes each
  for (const int64_t record : {7, 8, 9}) first.Compare(record, {0}, {2}, wrong);
  EXPECT_THAT(wrong, ::testing::ElementsAre(2, 0));
  FirstResults<float> none(0);
  none.Compare(3, {1}, {2}, wrong);
  none.Compare(3, {1}, {0}, wrong);
  EXPECT_THAT(wrong, ::testing::ElementsAre(2, 1));
}

TEST(LayerBenchTest, RefusesWhatTheLayerDoesNotHave) {
  LayerSpec type = SmallSpec(), top_k = SmallSpec(), matrix = SmallSpec(), trace = SmallSpec();
  type.trainer.dtype = DType::kInt64;
  top_k.layer.router.top_k = 9;
  matrix.routing = ParseRouting("matrix:file").value();
  trace.routing = ParseRouting("trace:file").value();  // not read
  for (const LayerSpec& spec : {type, top_k, matrix, trace}) {
    const absl::Status status =
        RunRanks({.plan = {.ranks = 1}}, [&](std::unique_ptr<Communicator> world) {
          return MeasureLayer(spec, kWithoutWarmup, std::move(world)).status();
        });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

}  // namespace
}  // namespace moe::measure
