#include "moe/lm/generation.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cross_entropy/cross_entropy.h"
#include "moe/lm/key_value_cache.h"
#include "tests/moe/lm/transformer_harness.h"

namespace moe::lm {
namespace {

using ::moe::testing::GroupedConfig;
using ::moe::testing::OneRank;
using ::moe::testing::SmallConfig;

template <typename T>
class ExtendTest : public ::testing::Test {};
using StorageTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(ExtendTest, StorageTypes);

// Losses of a whole sequence, by one forward pass, and from logits of pieces of it, however cut:
// the same bits.
TYPED_TEST(ExtendTest, PiecesOfASequenceHaveTheBitsOfTheWhole) {
  constexpr int64_t kTokens = 37;
  for (TransformerConfig config :
       {SmallConfig(), GroupedConfig(QkNorm::kHead), GroupedConfig(QkNorm::kHeads)}) {
    std::vector<int32_t> tokens, targets;
    for (int64_t t = 0; t <= kTokens; ++t) {
      (t < kTokens ? tokens : targets).push_back(static_cast<int32_t>(t * t * 7 % 11));
    }
    targets.insert(targets.begin(), tokens.begin() + 1, tokens.end());
    const int64_t offsets[] = {0, kTokens};
    std::vector<float> whole(kTokens);
    OneRank<TypeParam> reference(config);
    ASSERT_TRUE(::moe::testing::RunPasses(*reference.model,
                                          {.context = reference.context(),
                                           .batch = {.sequence_offsets = offsets,
                                                     .micro_batch_offsets = offsets,
                                                     .mode = Mode::kEvaluation}},
                                          {tokens, targets, absl::MakeSpan(whole)})
                    .ok());

    config.moe.pack_weights = true;
    OneRank<TypeParam> rank(config);
    for (const std::vector<int64_t>& pieces : {std::vector<int64_t>{kTokens},
                                               {20, 17},
                                               {1, 9, 3, 24},
                                               std::vector<int64_t>(kTokens, 1)}) {
      auto cache = *KeyValueCache<TypeParam>::Create(config, kTokens);
      std::vector<float> logits(kTokens * config.vocab_size), losses(kTokens);
      int64_t first = 0;
      for (const int64_t count : pieces) {
        const MatrixView<float> rows(logits.data() + first * config.vocab_size, count,
                                     config.vocab_size);
        const absl::Status status = rank.model->Extend(
            rank.context(), absl::MakeConstSpan(tokens).subspan(first, count), cache, rows);
        ASSERT_TRUE(status.ok()) << status;
        first += count;
      }
      EXPECT_EQ(cache.size(), kTokens);
      const MatrixView<float> all(logits.data(), kTokens, config.vocab_size);
      ASSERT_TRUE(CrossEntropy<TypeParam>(all, targets, 0, absl::MakeSpan(losses), {},
                                          *rank.session->context().compute)
                      .ok());
      EXPECT_EQ(losses, whole) << pieces.size() << " pieces";
    }
  }
}

TEST(ExtendTest, RefusesWhatDoesNotFit) {
  OneRank<float> rank(SmallConfig());
  auto cache = *KeyValueCache<float>::Create(SmallConfig(), 2);
  float row[11] = {};
  const MatrixView<float> logits(row, 1, 11);
  EXPECT_TRUE(
      absl::IsInvalidArgument(rank.model->Extend(rank.context(), {{1, 2, 3}}, cache, logits)));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.model->Extend(rank.context(), {{11}}, cache, logits)));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.model->Extend(rank.context(), {}, cache, logits)));
  EXPECT_EQ(cache.size(), 0);
  EXPECT_TRUE(rank.model->Extend(rank.context(), {{1, 2}}, cache, logits).ok());
}

// How often each id comes, of 5,000 places.
std::vector<int> Counts(const std::vector<float>& logits, const Sampling& sampling) {
  std::vector<int> counts(logits.size());
  for (int64_t place = 0; place < 5000; ++place) ++counts[*SampleToken(logits, sampling, place)];
  return counts;
}

TEST(SampleTokenTest, TemperatureZeroTakesTheFirstOfTheLargest) {
  EXPECT_EQ(*SampleToken({1, 3, -2, 3}, {}, 0), 1);
}

TEST(SampleTokenTest, DrawsByProbability) {
  // Probabilities 0.1, 0.2, 0.3, 0.4.
  const std::vector<float> logits = {std::log(1.0f), std::log(2.0f), std::log(3.0f),
                                     std::log(4.0f)};
  const auto expect = [&](const Sampling& sampling, const std::vector<double>& expected) {
    const std::vector<int> counts = Counts(logits, sampling);
    for (size_t i = 0; i < counts.size(); ++i) {
      // Five standard deviations of a binomial distribution.
      const double bound = 5 * std::sqrt(5000 * expected[i] * (1 - expected[i]));
      EXPECT_NEAR(counts[i], 5000 * expected[i], bound) << i;
    }
  };
  expect({.temperature = 1, .seed = 5}, {0.1, 0.2, 0.3, 0.4});
  expect({.temperature = 0.5, .seed = 5}, {1 / 30.0, 4 / 30.0, 9 / 30.0, 16 / 30.0});
  expect({.temperature = 1, .top_k = 2, .seed = 5}, {0, 0, 3 / 7.0, 4 / 7.0});
  expect({.temperature = 1, .top_p = 0.41, .seed = 5}, {0, 0, 3 / 7.0, 4 / 7.0});
  expect({.temperature = 1, .top_p = 0.39, .seed = 5}, {0, 0, 0, 1});
  expect({.temperature = 1, .top_k = 3, .top_p = 0.5, .seed = 5}, {0, 0, 3 / 7.0, 4 / 7.0});
}

TEST(SampleTokenTest, IsAFunctionOfSeedAndPlace) {
  const std::vector<float> logits(50);
  const auto draw = [&](uint64_t seed) {
    std::vector<int32_t> ids;
    for (int64_t place = 0; place < 20; ++place) {
      ids.push_back(*SampleToken(logits, {.temperature = 1, .seed = seed}, place));
    }
    return ids;
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
}

TEST(SampleTokenTest, RefusesLogitsThatAreNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(absl::IsDataLoss(SampleToken({1, nan}, {}, 3).status()));
}

}  // namespace
}  // namespace moe::lm
