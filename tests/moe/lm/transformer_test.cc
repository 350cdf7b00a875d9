#include <algorithm>
#include <cmath>
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "moe/lm/stage.h"
#include "tests/moe/lm/transformer_harness.h"
#include "tests/moe/lm/transformer_oracle.h"
#include "tests/moe/status_is.h"

namespace moe::lm {
namespace {

using ::moe::testing::GroupedConfig;
using ::moe::testing::MakeModelWork;
using ::moe::testing::ModelResult;
using ::moe::testing::ModelWork;
using ::moe::testing::OneRank;
using ::moe::testing::OracleLoss;
using ::moe::testing::RunModel;
using ::moe::testing::RunPasses;
using ::moe::testing::SmallConfig;
using ::moe::testing::TransformerOracle;
using enum absl::StatusCode;
using ::moe::testing::StatusIs;

// Relative error of a float32 sum of K terms whose roundings are independent, sqrt(K) of 2^-24
// (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019), for the
// longest sum of any product in a model: over the vocabulary, the q, k and v rows, or tokens.
double SumError(const TransformerConfig& config, size_t tokens) {
  const int64_t qkv =
      (config.num_attention_heads + 2 * config.key_value_heads()) * config.head_dim();
  const auto longest = std::max<int64_t>({config.vocab_size, qkv, static_cast<int64_t>(tokens)});
  return std::sqrt(static_cast<double>(longest)) * 0x1p-24;
}

::moe::testing::OracleBatch OneBatch(const ModelWork& work) {
  return {
      .tokens = work.tokens, .targets = work.targets, .sequence_offsets = work.SequenceOffsets(0)};
}

class TransformerAgainstOracle : public ::testing::TestWithParam<TransformerConfig> {};
INSTANTIATE_TEST_SUITE_P(Architectures, TransformerAgainstOracle,
                         ::testing::Values(SmallConfig(), GroupedConfig(QkNorm::kNone),
                                           GroupedConfig(QkNorm::kHead),
                                           GroupedConfig(QkNorm::kHeads)));

TEST_P(TransformerAgainstOracle, RowLossIsEqual) {
  const ModelWork work = MakeModelWork(GetParam(), {{5, 1, 8}});
  const ModelResult got = RunModel<float>(work, {}, Numerics::kFast);
  const TransformerOracle oracle(work.config, got.weights);
  const OracleLoss expected = oracle.Loss(OneBatch(work));
  ASSERT_GT(expected.margin, 1e-4) << "a routing decision is too close to a tie for float32";

  // Every stored float32 carries the error of the sum it came from. Four times the most that such
  // errors, drawn at random, move the oracle's own loss: sums that cancel carry more than theirs.
  const double unit = SumError(work.config, work.tokens.size());
  const double bound = 4 * oracle.LossDeviation(OneBatch(work), {.narrow = unit, .wide = unit}, 8);
  EXPECT_LT(bound, 1e-4);
  ASSERT_EQ(got.row_loss.size(), expected.rows.size());
  for (size_t t = 0; t < expected.rows.size(); ++t) {
    EXPECT_NEAR(got.row_loss[t], expected.rows[t], bound) << "token " << t;
  }
  EXPECT_NEAR(got.aux_loss, expected.aux_loss, bound);
  EXPECT_NEAR(got.z_loss, expected.z_loss, bound);
}

// Elements of a tensor to look at: all of a small one, else a sample that covers it evenly.
std::vector<int64_t> SampleOf(int64_t size) {
  constexpr int64_t kSamples = 16;
  std::vector<int64_t> sample;
  for (int64_t i = 0; i < std::min(size, kSamples); ++i) {
    sample.push_back(size <= kSamples ? i : (size * i + size / 2) / kSamples);
  }
  return sample;
}

TEST_P(TransformerAgainstOracle, GradientsEqualItsFiniteDifferences) {
  const ModelWork work = MakeModelWork(GetParam(), {{5, 1, 8}});
  const ModelResult got = RunModel<float>(work, {}, Numerics::kFast);
  TransformerOracle oracle(work.config, got.weights);
  ASSERT_GT(oracle.Loss(OneBatch(work)).margin, 1e-4);

  // About 14 float32 operations a layer and direction lie between a weight and its gradient, each
  // with the error of a sum, relative to the largest gradient of the tensor; and the error of
  // the differences themselves.
  const double operations = 2 * 14 * work.config.num_layers;
  const double relative = operations * SumError(work.config, work.tokens.size());
  for (const auto& [name, gradient] : got.gradients) {
    SCOPED_TRACE(name);
    const float largest =
        std::abs(*std::max_element(gradient.begin(), gradient.end(),
                                   [](float a, float b) { return std::abs(a) < std::abs(b); }));
    EXPECT_GT(largest, 0);
    for (const int64_t i : SampleOf(static_cast<int64_t>(gradient.size()))) {
      EXPECT_NEAR(gradient[i], oracle.Derivative(OneBatch(work), name, i),
                  relative * largest + 1e-8)
          << "element " << i;
    }
  }
}

TEST(Transformer, LossScaleMultipliesEveryGradient) {
  ModelWork work = MakeModelWork(SmallConfig(), {{5, 8}});
  const ModelResult one = RunModel<float>(work, {}, Numerics::kFast);
  work.loss_scale = 64;
  const ModelResult scaled = RunModel<float>(work, {}, Numerics::kFast);
  for (const auto& [name, gradient] : one.gradients) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      // Exact: a power of two scales every product and sum on the way.
      ASSERT_EQ(scaled.gradients.at(name)[i], 64 * gradient[i]) << name << "[" << i << "]";
    }
  }
}

// Every expert is chosen: no decision can flip between the two types.
TransformerConfig AllExpertsConfig() {
  TransformerConfig config = SmallConfig();
  config.moe.router.num_experts = 3;
  config.moe.router.top_k = 3;
  return config;
}

TEST(Transformer, BFloat16RowLossStaysWithinItsRoundings) {
  ModelWork work = MakeModelWork(AllExpertsConfig(), {{5, 1, 8}});
  work.bfloat16_weights = true;
  const ModelResult got = RunModel<BFloat16>(work, {}, Numerics::kFast);
  const TransformerOracle oracle(work.config, got.weights);
  const OracleLoss expected = oracle.Loss(OneBatch(work));
  // Half a unit in the last of 8 bits per stored activation; float32 elsewhere.
  const double bound =
      4 *
      oracle.LossDeviation(
          OneBatch(work), {.narrow = 0x1p-9, .wide = SumError(work.config, work.tokens.size())}, 8);
  EXPECT_LT(bound, 0.5);
  for (size_t t = 0; t < expected.rows.size(); ++t) {
    EXPECT_NEAR(got.row_loss[t], expected.rows[t], bound) << "token " << t;
  }
}

TEST(Transformer, BFloat16GradientsStayNearThoseOfFloat) {
  ModelWork work = MakeModelWork(AllExpertsConfig(), {{5, 1, 8}});
  work.bfloat16_weights = true;
  const ModelResult narrow = RunModel<BFloat16>(work, {}, Numerics::kFast);
  const ModelResult wide = RunModel<float>(work, {}, Numerics::kFast);
  // About 12 roundings of 2^-9 a layer and direction, at worst all the same way.
  const double bound = 2 * 12 * work.config.num_layers * 0x1p-9;
  for (const auto& [name, expected] : wide.gradients) {
    double error = 0, size = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error += std::pow(double{narrow.gradients.at(name)[i]} - double{expected[i]}, 2);
      size += std::pow(double{expected[i]}, 2);
    }
    EXPECT_LE(std::sqrt(error / size), bound) << name;
  }
}

template <typename T>
std::vector<float> Evaluate(OneRank<T>& rank, absl::Span<const int32_t> tokens,
                            absl::Span<const int32_t> targets,
                            const std::vector<int64_t>& sequence_offsets) {
  std::vector<float> loss(tokens.size(), -1.0f);
  const absl::Status status =
      RunPasses(*rank.model,
                {.context = rank.context(),
                 .batch = {.sequence_offsets = sequence_offsets, .mode = Mode::kEvaluation}},
                {tokens, targets, absl::MakeSpan(loss)});
  EXPECT_TRUE(status.ok()) << status;
  return loss;
}

template <typename T>
class TransformerTyped : public ::testing::Test {};
using StorageTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(TransformerTyped, StorageTypes);

TYPED_TEST(TransformerTyped, RowLossOfASequenceDependsOnItAlone) {
  OneRank<TypeParam> rank(SmallConfig());
  const ModelWork work = MakeModelWork(SmallConfig(), {{5, 1, 8, 3}});
  const std::vector<int64_t> offsets = work.SequenceOffsets(0);
  const std::vector<float> packed = Evaluate(rank, work.tokens, work.targets, offsets);
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const int64_t length = offsets[s + 1] - offsets[s];
    const std::vector<float> alone =
        Evaluate(rank, absl::MakeSpan(work.tokens).subspan(offsets[s], length),
                 absl::MakeSpan(work.targets).subspan(offsets[s], length), {0, length});
    EXPECT_EQ(std::memcmp(alone.data(), packed.data() + offsets[s], length * sizeof(float)), 0)
        << "sequence " << s;
  }
}

TYPED_TEST(TransformerTyped, EvaluateGivesTheBitsOfTraining) {
  const ModelWork work = MakeModelWork(SmallConfig(), {{5, 8}});
  OneRank<TypeParam> rank(SmallConfig());
  const std::vector<float> evaluated =
      Evaluate(rank, work.tokens, work.targets, work.SequenceOffsets(0));
  rank.AddSums();
  std::vector<float> trained(work.tokens.size());
  const std::vector<int64_t> offsets = work.SequenceOffsets(0);
  const StashHandle stash = rank.session->stashes().Take();
  ASSERT_TRUE(
      RunPasses(
          *rank.model,
          {.context = rank.context(), .batch = {.sequence_offsets = offsets}, .stash = stash.get()},
          {work.tokens, work.targets, absl::MakeSpan(trained)})
          .ok());
  EXPECT_EQ(std::memcmp(evaluated.data(), trained.data(), trained.size() * sizeof(float)), 0);
}

// What one micro-batch gives: losses, gradients by name order, and the router's statistics.
struct Given {
  std::vector<float> loss;
  std::vector<std::vector<float>> gradients;
  RouterStats router;
};
Given RunOne(const Batch& batch, absl::Span<const int32_t> tokens,
             absl::Span<const int32_t> targets, absl::Span<const int32_t> loss_rows = {}) {
  OneRank<float> rank(SmallConfig());
  rank.AddSums();
  Given given = {.loss = std::vector<float>(targets.size())};
  const StashHandle stash = rank.session->stashes().Take();
  const absl::Status status = RunPasses(*rank.model,
                                        {.context = rank.context(),
                                         .batch = batch,
                                         .stash = stash.get(),
                                         .router_stats = {&given.router, 1}},
                                        {tokens, targets, absl::MakeSpan(given.loss), loss_rows});
  EXPECT_TRUE(status.ok()) << status;
  given.gradients = rank.sums;
  return given;
}

TEST(Transformer, DocumentsOfASequenceHaveTheBitsOfSequences) {
  const ModelWork work = MakeModelWork(SmallConfig(), {{5, 1, 8, 3}});
  const std::vector<int64_t> documents = work.SequenceOffsets(0), sequences = {0, 6, 17};
  const auto run = [&](Batch batch) {
    return RunOne(batch, work.tokens, work.targets);
  };
  const Given alone = run({.sequence_offsets = documents});
  const Given packed = run({.sequence_offsets = sequences,
                            .attention_offsets = documents,
                            .position_offsets = documents});
  EXPECT_EQ(packed.loss, alone.loss);
  EXPECT_EQ(packed.gradients, alone.gradients);
  // Angles of positions count by their differences: those of a document are the same at any offset.
  const Given attention = run({.sequence_offsets = sequences, .attention_offsets = documents});
  const Given positions = run({.sequence_offsets = sequences, .position_offsets = documents});
  const Given neither = run({.sequence_offsets = sequences});
  for (size_t t = 0; t < alone.loss.size(); ++t) {
    EXPECT_NEAR(attention.loss[t], alone.loss[t], 1e-4f);
    const bool first = t < 5 || (t >= 6 && t < 14);  // in a document that begins its sequence
    EXPECT_EQ(std::fabs(positions.loss[t] - alone.loss[t]) < 1e-4f, first) << t;
    EXPECT_EQ(std::fabs(positions.loss[t] - neither.loss[t]) < 1e-4f, first) << t;
  }
}

// Sequences that padding fills up have the losses and the router of the shorter ones.
TEST(Transformer, PaddingBehindSequencesAddsNothing) {
  const ModelWork work = MakeModelWork(SmallConfig(), {{5, 8}});
  const std::vector<int64_t> offsets = work.SequenceOffsets(0), filled = {0, 8, 16};
  std::vector<int32_t> tokens, loss_rows;
  std::vector<uint8_t> padding;
  for (size_t t = 0; t < work.tokens.size(); ++t) {
    if (t == 5) tokens.insert(tokens.end(), 3, 1);
    loss_rows.push_back(static_cast<int32_t>(tokens.size()));
    tokens.push_back(work.tokens[t]);
  }
  padding.assign(tokens.size(), 0);
  for (const size_t t : {5, 6, 7}) padding[t] = 1;
  const Given alone = RunOne({.sequence_offsets = offsets}, work.tokens, work.targets);
  const Given padded = RunOne({.sequence_offsets = filled, .padding_mask = padding}, tokens,
                              work.targets, loss_rows);
  EXPECT_EQ(padded.loss, alone.loss);
  EXPECT_EQ(padded.router.expert_count, alone.router.expert_count);
  EXPECT_EQ(padded.router.loss(), alone.router.loss());
  // Rows of 0 change where chains of sums over tokens end: by roundings alone.
  ASSERT_EQ(padded.gradients.size(), alone.gradients.size());
  for (size_t p = 0; p < alone.gradients.size(); ++p) {
    double error = 0, size = 0;
    for (size_t i = 0; i < alone.gradients[p].size(); ++i) {
      error += std::pow(double{padded.gradients[p][i]} - double{alone.gradients[p][i]}, 2);
      size += std::pow(double{alone.gradients[p][i]}, 2);
    }
    EXPECT_LE(std::sqrt(error), 16 * 0x1p-24 * std::sqrt(size)) << p;
  }
}

TEST(Transformer, BadBatchesAreRefusedBeforeAnyWork) {
  OneRank<float> rank(SmallConfig());
  const std::vector<int32_t> tokens = {1, 2, 10}, outside = {1, 11, 2}, negative = {-1, 0, 0};
  const std::vector<int64_t> good = {0, 3}, gap = {0, 2}, backwards = {0, 3, 1, 3}, two = {0, 1, 3};
  std::vector<float> loss(3);
  const auto evaluate = [&](absl::Span<const int32_t> in, absl::Span<const int32_t> out,
                            absl::Span<const int64_t> sequences, size_t losses) {
    return RunPasses(*rank.model,
                     {.context = rank.context(), .batch = {.sequence_offsets = sequences}},
                     {in, out, absl::MakeSpan(loss).subspan(0, losses)});
  };
  const auto refused = [](const absl::Status& status, const char* with) {
    EXPECT_THAT(status, StatusIs(kInvalidArgument, with));
  };
  EXPECT_TRUE(evaluate(tokens, tokens, good, 3).ok());
  refused(evaluate(outside, tokens, good, 3), "tokens[1] is 11, expected 0 to 10");
  refused(evaluate(tokens, negative, good, 3), "targets[0] is -1, expected 0 to 10");
  refused(evaluate(tokens, absl::MakeSpan(tokens).subspan(1), good, 3), "targets [2]");
  refused(evaluate(tokens, tokens, good, 2), "row_loss [2]");
  refused(evaluate(tokens, tokens, gap, 3), "sequence_offsets [2], expected to ascend from 0 to 3");
  refused(evaluate(tokens, tokens, backwards, 3), "sequence_offsets [4]");
  refused(evaluate(tokens, tokens, {}, 3), "sequence_offsets [0]");
  const std::vector<int32_t> one = {1}, repeated = {1, 1}, late = {1, 3};
  const auto evaluate_some = [&](const std::vector<int32_t>& rows, Batch batch) {
    batch.sequence_offsets = good;
    return RunPasses(
        *rank.model, {.context = rank.context(), .batch = batch},
        {tokens, absl::MakeSpan(tokens).first(2), absl::MakeSpan(loss).first(2), rows});
  };
  refused(evaluate_some(one, {}), "loss_rows [1]");
  refused(evaluate_some(repeated, {}), "ascending");
  refused(evaluate_some(late, {}), "ascending");
  refused(evaluate_some({0, 2}, {.attention_offsets = gap}), "attention_offsets [2]");
  refused(evaluate_some({0, 2}, {.position_offsets = backwards}), "position_offsets [4]");
  const std::vector<uint8_t> mask = {1, 0};
  refused(evaluate_some({0, 2}, {.padding_mask = mask}), "padding_mask [2], expected [3]");
  const StashHandle stash = rank.session->stashes().Take();
  refused(RunPasses(*rank.model,
                    {.context = rank.context(),
                     .batch = {.sequence_offsets = good, .micro_batch_offsets = two},
                     .stash = stash.get()},
                    {tokens, tokens, absl::MakeSpan(loss)}),
          "2 micro-batches, expected one per round");
}

TEST(Transformer, PassesAreRefusedInAnotherOrder) {
  OneRank<float> rank(SmallConfig());
  const StashHandle stash = rank.session->stashes().Take();
  const Pass evaluation = {.context = rank.context()};
  const Pass pass = {.context = rank.context(), .stash = stash.get()};
  const auto backward = [&](const Pass& with) {
    return rank.model->Backward(with, {}, {}, [](Parameter&) { return absl::OkStatus(); });
  };
  EXPECT_THAT(rank.model->Forward(pass, {}, {}), StatusIs(kFailedPrecondition, "before Load"));
  EXPECT_THAT(backward(pass), StatusIs(kFailedPrecondition, "without a Forward"));
  ASSERT_TRUE(RunPasses(*rank.model, evaluation, {}).ok());
  EXPECT_THAT(backward(evaluation), StatusIs(kFailedPrecondition, "without a Forward"));
  EXPECT_THAT(RunPasses(*rank.model, pass, {}), StatusIs(kFailedPrecondition, "gradient"));
  EXPECT_THAT(backward(pass), StatusIs(kFailedPrecondition, "without a Forward"));
}

}  // namespace
}  // namespace moe::lm
