// Predicted steps against those that others published: operations a token, order, time.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moe/plan/machine.h"
#include "moe/plan/model_cost.h"
#include "moe/plan/step_time.h"

namespace moe::plan {
namespace {

// Sizes of public models, from their config.json.
struct PublicModel {
  const char* name;
  int layers, dense_layers;
  double hidden, attention, attended;
  double experts, top_k, width, shared_width, dense_width, vocab;
};

ModelCost CostOfPublic(const PublicModel& m) {
  ModelCost cost = {.layers = m.layers,
                    .dense_layers = m.dense_layers,
                    .hidden = m.hidden,
                    .vocab = m.vocab,
                    .attention = m.attention,
                    .attended = m.attended,
                    .experts = m.experts,
                    .top_k = m.top_k,
                    .expert = 3 * m.hidden * m.width,
                    .width = m.width,
                    .shared = 3 * m.hidden * m.shared_width,
                    .dense = 3 * m.hidden * m.dense_width};
  cost.parameters = cost.layers * cost.attention + cost.expert_parameters() +
                    cost.moe_layers() * (cost.shared + cost.hidden * cost.experts) +
                    cost.dense_layers * cost.dense + 2 * cost.vocab * cost.hidden;
  return cost;
}

// Grouped-query attention: heads and key-value heads of a width.
double Projections(double hidden, double heads, double kv_heads, double width) {
  return 2 * hidden * width * (heads + kv_heads);
}

// Latent attention: q by way of 1536 columns, k and v of 512 and 64; heads of 128 + 64 and 128.
const double kLatent =
    7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168;
const PublicModel kDeepSeekV3 = {"DeepSeek-V3", 61, 3,    7168, kLatent, 128 * (192 + 128),
                                 256,           8,  2048, 2048, 18432,   129280};
const PublicModel kQwen235 = {
    "Qwen3-235B", 94, 0, 4096, Projections(4096, 64, 4, 128), 64 * 256, 128, 8, 1536, 0, 0, 151936};
const PublicModel kQwen30 = {
    "Qwen3-30B", 48, 0, 2048, Projections(2048, 32, 4, 128), 32 * 256, 128, 8, 768, 0, 0, 151936};
// Every second layer attends to 128 tokens alone: half of its attention, at 4096 and more tokens.
const PublicModel kGptOss = {
    "GPT-OSS-120B", 36, 0, 2880,  Projections(2880, 64, 8, 64), 64 * 128 * 0.5, 128, 4,
    2880,           0,  0, 201088};
const PublicModel kMixtral7 = {
    "Mixtral-8x7B", 32, 0, 4096, Projections(4096, 32, 8, 128), 32 * 256, 8, 2, 14336, 0, 0, 32000};
const PublicModel kMixtral22 = {
    "Mixtral-8x22B", 56, 0, 6144, Projections(6144, 48, 8, 128), 48 * 256, 8, 2,
    16384,           0,  0, 32000};

struct Published {
  const char* gpu;
  const PublicModel* model;
  Workload work;
  Layout layout;
  double tokens_per_gpu_s;
};

Workload Of(int ranks, int64_t sequences, int64_t length) {
  // Sums of gradients in float32; output layers count as layers of a stage.
  return {.ranks = ranks,
          .sequences = sequences,
          .sequence_length = length,
          .sum_bytes = 4,
          .balanced_output = true};
}

Layout On(int tp, int pp, int vp, int ep, int64_t micro_batch) {
  return {.mesh = {.tensor = tp, .pipeline = pp, .expert = ep},
          .schedule = vp > 1 ? ScheduleKind::kInterleaved : ScheduleKind::k1F1B,
          .chunks = vp,
          .zero = ZeroStage::kOptimizer,
          .micro_batch_size = micro_batch};
}

// bfloat16. Megatron-Bridge, docs/performance-summary.md of 25.11: the first six; arXiv:2504.14960,
// 49.3 % of the peak (TP 2, VP 7 assumed), and the MoE page of Megatron-Core 0.9, 468 TFLOP/s: the
// last two, by TokenFlops.
std::vector<Published> Rows() {
  return {{"gb200", &kDeepSeekV3, Of(256, 4096, 4096), On(1, 4, 4, 64, 1), 3139},
          {"gb300", &kDeepSeekV3, Of(256, 4096, 4096), On(1, 2, 4, 32, 1), 3848},
          {"gb200", &kQwen235, Of(256, 8192, 4096), On(1, 8, 3, 32, 1), 4916},
          {"gb300", &kQwen235, Of(256, 8192, 4096), On(1, 4, 12, 16, 2), 6131},
          {"gb200", &kGptOss, Of(64, 1280, 8192), On(1, 1, 1, 64, 1), 15876},
          {"h100", &kGptOss, Of(64, 512, 4096), On(1, 4, 1, 8, 4), 5630},
          {"h100", &kMixtral22, Of(128, 256, 4096), On(2, 8, 7, 8, 1),
           0.493 * 989e12 / TokenFlops(CostOfPublic(kMixtral22), 4096)},
          {"h100", &kMixtral7, Of(64, 256, 4096), On(1, 4, 8, 8, 1),
           468e12 / TokenFlops(CostOfPublic(kMixtral7), 4096)}};
}

double TokensPerGpu(const Published& row, const Efficiency& reached, Bubbles& bubbles) {
  const Machine machine = MachineOf(*FindGpu(row.gpu), reached);
  const double step =
      PredictStep(CostOfPublic(*row.model), machine, row.work, row.layout, bubbles).total();
  return row.work.tokens() / step / row.work.ranks;
}

// Predicted over published, less one.
double ErrorOf(const Published& row, const Efficiency& reached, Bubbles& bubbles) {
  return TokensPerGpu(row, reached, bubbles) / row.tokens_per_gpu_s - 1;
}

// The constants of the least sum of |log error|: steps along each and along pairs of them, that
// become shorter where none is better.
Efficiency Fitted(const std::vector<Published>& rows, Bubbles& bubbles) {
  const auto loss = [&](const Efficiency& e) {
    double sum = 0;
    for (const Published& row : rows) sum += std::abs(std::log1p(ErrorOf(row, e, bubbles)));
    return sum;
  };
  double Efficiency::*const constants[] = {&Efficiency::product, &Efficiency::exchange,
                                           &Efficiency::memory, &Efficiency::layer_s};
  Efficiency best;
  double least = loss(best);
  for (double factor = 2; factor > 1.01;) {
    bool moved = false;
    for (int i = 0; i < 4; ++i) {
      for (int j = i; j < 4; ++j) {
        for (const double a : {factor, 1 / factor}) {
          for (const double b : {factor, 1 / factor}) {
            Efficiency next = best;
            next.*constants[i] *= a;
            if (j > i) next.*constants[j] *= b;
            next.product = std::min(next.product, 0.95);
            next.exchange = std::min(next.exchange, 0.95);
            next.memory = std::min(next.memory, 0.95);
            const double sum = loss(next);
            if (sum >= least - 1e-12) continue;
            least = sum;
            best = next;
            moved = true;
          }
        }
      }
    }
    if (!moved) factor = std::sqrt(factor);
  }
  return best;
}

// The same tables have TFLOP/s and tokens/s of a GPU.
TEST(PublishedModels, OperationsOfATokenAreWithinOnePercent) {
  const auto published = [](double tflops, double tokens) {
    return tflops * 1e12 / tokens;
  };
  EXPECT_NEAR(TokenFlops(CostOfPublic(kDeepSeekV3), 4096) / published(782, 3139), 1, 0.01);
  EXPECT_NEAR(TokenFlops(CostOfPublic(kQwen235), 4096) / published(728, 4916), 1, 0.01);
  EXPECT_NEAR(TokenFlops(CostOfPublic(kQwen30), 4096) / published(121, 5275), 1, 0.011);
}

TEST(PublishedSteps, FasterLayoutsOfAModelArePredictedFaster) {
  const std::vector<Published> rows = Rows();
  Bubbles bubbles;
  for (size_t i = 0; i + 1 < rows.size(); i += 2) {
    if (rows[i].model != rows[i + 1].model) continue;
    EXPECT_EQ(TokensPerGpu(rows[i], {}, bubbles) < TokensPerGpu(rows[i + 1], {}, bubbles),
              rows[i].tokens_per_gpu_s < rows[i + 1].tokens_per_gpu_s)
        << rows[i].model->name;
  }
}

// Each row by constants fitted to the others.
TEST(PublishedSteps, MedianErrorLeaveOneOutIsAtMostTwentyOnePercent) {
  const std::vector<Published> rows = Rows();
  Bubbles bubbles;
  std::vector<double> errors;
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<Published> others = rows;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    errors.push_back(ErrorOf(rows[i], Fitted(others, bubbles), bubbles));
    RecordProperty(std::string(rows[i].gpu) + "_" + rows[i].model->name,
                   std::to_string(errors.back()));
  }
  for (double& error : errors) error = std::abs(error);
  std::sort(errors.begin(), errors.end());
  EXPECT_LE((errors[3] + errors[4]) / 2, 0.21);
}

}  // namespace
}  // namespace moe::plan
