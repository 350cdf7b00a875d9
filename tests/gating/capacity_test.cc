#include "gating/capacity.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/token_groups.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(ExpertCapacity, FactorIsTheDecimalThatWasWritten) {
  EXPECT_EQ(ExpertCapacity(100, 1, 10, 1.1), 11);     // 100 * 1.1 is above 110 in float64
  EXPECT_EQ(ExpertCapacity(100, 1, 10, 1.1001), 12);  // 11.001
  EXPECT_EQ(ExpertCapacity(100, 1, 10, 1.0999), 11);
  EXPECT_EQ(ExpertCapacity(1000, 1, 60, 0.9), 15);  // 16 as Megatron: (1000 / 60) * 0.9
  // The double above 1.1 is 1.1000000000000003, and asks for more than 11 slots.
  EXPECT_EQ(ExpertCapacity(100, 1, 10, std::nextafter(1.1, 2.0)), 12);
}

// The ceiling of slots * factor / experts, at most the tokens of the group. Factors are in
// hundredths, so that it is a quotient of integers.
TEST(ExpertCapacity, IsExactForEverySizeAndFactor) {
  for (const int64_t hundredths :
       {50, 75, 90, 100, 105, 110, 115, 120, 125, 130, 150, 175, 200, 250}) {
    const double factor = std::stod(std::to_string(hundredths) + "e-2");
    for (const int64_t tokens :
         {0, 8, 10, 512, 1000, 1024, 2000, 2048, 4096, 5000, 8192, 10000, 16384, 40960}) {
      for (const int32_t experts : {4, 8, 10, 16, 20, 32, 40, 60, 64, 128, 256}) {
        for (const int32_t k : {1, 2, 3, 4, 5, 6, 7, 8}) {
          const int64_t room = 100 * int64_t{experts};
          const int64_t exact = (tokens * k * hundredths + room - 1) / room;
          ASSERT_EQ(ExpertCapacity(tokens, k, experts, factor), std::min(exact, tokens))
              << tokens << " tokens, " << k << " of " << experts << " experts, factor " << factor;
        }
      }
    }
  }
}

TEST(ExpertCapacity, HoldsFactorsAndSizesOfAnyMagnitude) {
  EXPECT_EQ(ExpertCapacity(1000, 2, 8, 5e-324), 1);
  EXPECT_EQ(ExpertCapacity(1000, 2, 8, 1.7976931348623157e308), 1000);
  EXPECT_EQ(ExpertCapacity(1000, 1, 1000, 3e2), 300);
  EXPECT_EQ(ExpertCapacity(1000, 1, 1000000, 9e5), 900);
  const int64_t many = int64_t{1} << 61;
  EXPECT_EQ(ExpertCapacity(many, 2, 1 << 30, 1.0), int64_t{1} << 32);
  EXPECT_EQ(ExpertCapacity(many, 2, 1 << 30, 0.12345678901234566), 530242872);  // 530242871.3
}

// K slots a token over `tokens`, experts and weights in slot order; one group unless offsets say
// otherwise.
struct Slots {
  int32_t k;
  int32_t experts;
  std::vector<int32_t> expert;
  std::vector<float> weight;
  std::vector<int64_t> groups;

  std::vector<uint8_t> Dropped(double factor, DropPolicy policy) const {
    std::vector<int64_t> offset(expert.size() / static_cast<size_t>(k) + 1);
    for (size_t t = 0; t < offset.size(); ++t) offset[t] = static_cast<int64_t>(t) * k;
    return Dropped(offset, factor, policy);
  }

  std::vector<uint8_t> Dropped(const std::vector<int64_t>& offset, double factor,
                               DropPolicy policy) const {
    Workspace workspace;
    std::vector<uint8_t> dropped(expert.size(), 77);
    const std::vector<int64_t> whole = {0, static_cast<int64_t>(offset.size()) - 1};
    TokenGroups tokens;
    tokens.offsets = groups.empty() ? whole : groups;
    const auto count = MarkDropped(
        {.slot_offset = offset, .expert = expert, .weight = weight, .num_experts = experts}, tokens,
        k, factor, policy, absl::MakeSpan(dropped), workspace);
    EXPECT_TRUE(count.ok()) << count.status();
    EXPECT_EQ(*count, std::count(dropped.begin(), dropped.end(), 1));
    EXPECT_EQ(workspace.used_bytes(), 0);
    return dropped;
  }
};

const Slots kPairs = {.k = 2,
                      .experts = 2,
                      .expert = {0, 1,  //
                                 1, 0,  //
                                 0, 1},
                      .weight = {.1f, .9f, .2f, .8f, .3f, .7f}};

TEST(MarkDropped, ByPositionQueuesSecondChoicesAfterAllFirstOnes) {
  // C = ceil(3 * 2 * 0.6 / 2) = 2. Expert 0: tokens 0 and 2 by first choice, token 1 is too late;
  // expert 1: token 1 by first choice, then token 0.
  EXPECT_THAT(kPairs.Dropped(0.6, DropPolicy::kPosition), ElementsAre(0, 0, 0, 1, 0, 1));
  // C = 1.
  EXPECT_THAT(kPairs.Dropped(0.3, DropPolicy::kPosition), ElementsAre(0, 1, 0, 1, 1, 1));
  EXPECT_THAT(kPairs.Dropped(1.0, DropPolicy::kPosition), ::testing::Each(0));
}

TEST(MarkDropped, OneExpertThatTakesAllTokensKeepsItsCapacity) {
  // T k - min(T k, C): capacities below 1, of one slot, one less than all, of all, and above.
  Slots hot = {.k = 1,
               .experts = 4,
               .expert = std::vector<int32_t>(16, 2),
               .weight = std::vector<float>(16, 0.5f)};
  for (const DropPolicy policy : {DropPolicy::kPosition, DropPolicy::kProbability}) {
    for (const auto& [factor, kept] :
         {std::pair(0.01, 1), std::pair(0.25, 1), std::pair(1.0, 4), std::pair(3.75, 15),
          std::pair(4.0, 16), std::pair(1e9, 16)}) {
      const std::vector<uint8_t> dropped = hot.Dropped(factor, policy);
      EXPECT_EQ(std::count(dropped.begin(), dropped.end(), 0), kept) << factor;
    }
  }
}

TEST(MarkDropped, ByProbabilityKeepsTheLargestWeights) {
  // C = 2. Expert 0 wants .1 .8 .3, expert 1 wants .9 .2 .7.
  EXPECT_THAT(kPairs.Dropped(0.6, DropPolicy::kProbability), ElementsAre(1, 0, 1, 0, 0, 0));
  EXPECT_THAT(kPairs.Dropped(0.3, DropPolicy::kProbability), ElementsAre(1, 0, 1, 0, 1, 1));
}

TEST(MarkDropped, EqualWeightsKeepTheLowestTokensAndNanIsLast) {
  const Slots ties = {.k = 1,
                      .experts = 1,
                      .expert = std::vector<int32_t>(6, 0),
                      .weight = {.5f, .5f, .7f, .5f, .5f, .7f}};
  EXPECT_THAT(ties.Dropped(0.5, DropPolicy::kProbability), ElementsAre(0, 1, 0, 1, 1, 0));
  const Slots nans = {.k = 1,
                      .experts = 1,
                      .expert = std::vector<int32_t>(6, 0),
                      .weight = {kNan, .1f, kNan, 0.0f, kNan, .2f}};
  EXPECT_THAT(nans.Dropped(0.5, DropPolicy::kProbability), ElementsAre(1, 0, 1, 0, 1, 0));
  EXPECT_THAT(nans.Dropped(0.6, DropPolicy::kProbability), ElementsAre(0, 0, 1, 0, 1, 0));
}

TEST(MarkDropped, EveryGroupHasItsOwnCapacity) {
  Slots slots = {.k = 1,
                 .experts = 2,
                 .expert = {0, 0, 0, 0, 0, 0, 1},
                 .weight = {.1f, .2f, .3f, .4f, .5f, .6f, .7f},
                 .groups = {0, 4, 7}};
  // C = ceil(4 / 2) and ceil(3 / 2): two each.
  EXPECT_THAT(slots.Dropped(1, DropPolicy::kPosition), ElementsAre(0, 0, 1, 1, 0, 0, 0));
  EXPECT_THAT(slots.Dropped(1, DropPolicy::kProbability), ElementsAre(1, 1, 0, 0, 0, 0, 0));
  slots.groups = {0, 7};  // C = 4
  EXPECT_THAT(slots.Dropped(1, DropPolicy::kPosition), ElementsAre(0, 0, 0, 0, 1, 1, 0));
}

TEST(MarkDropped, TokensMayHaveAnyNumberOfSlots) {
  const Slots slots = {
      .k = 1, .experts = 2, .expert = {0, 1, 0, 0, 1}, .weight = {.1f, .2f, .3f, .4f, .5f}};
  // Token 0: experts 0 and 1; token 1: none; token 2: 0; token 3: 0 and 1. C = ceil(4 / 2) = 2.
  EXPECT_THAT(slots.Dropped({0, 2, 2, 3, 5}, 1, DropPolicy::kPosition), ElementsAre(0, 0, 0, 1, 0));
  EXPECT_THAT(slots.Dropped({0, 2, 2, 3, 5}, 1, DropPolicy::kProbability),
              ElementsAre(1, 0, 0, 0, 0));
}

TEST(MarkDropped, NoSlotsDropNothing) {
  EXPECT_THAT((Slots{.k = 2, .experts = 3}.Dropped(1, DropPolicy::kProbability)), ElementsAre());
  EXPECT_THAT((Slots{.k = 2, .experts = 3}.Dropped(1, DropPolicy::kPosition)), ElementsAre());
}

// Groups of 12 tokens in micro-batches of 6, 0, 6 and sequences of 2, 0, 4, 6.
class TokenGroupsTest : public testing::Test {
 protected:
  absl::StatusOr<TokenGroups> Make(int64_t group) {
    const auto batch =
        CopyBatch({.sequence_offsets = sequences_, .micro_batch_offsets = micro_batches_}, 12,
                  workspace_)
            .value();
    return MakeTokenGroups({group}, batch, workspace_);
  }

  std::vector<int64_t> sequences_ = {0, 2, 2, 6, 12};
  std::vector<int64_t> micro_batches_ = {0, 6, 6, 12};
  Workspace workspace_;
};

TEST_F(TokenGroupsTest, AreMicroBatchesSequencesOrBlocksAndNeverEmpty) {
  const auto micro_batches = Make(TokenGroup::kMicroBatch);
  EXPECT_THAT(micro_batches->offsets, ElementsAre(0, 6, 12));
  EXPECT_THAT(micro_batches->micro_batch, ElementsAre(0, 1, 1, 2));
  const auto sequences = Make(TokenGroup::kSequence);
  EXPECT_THAT(sequences->offsets, ElementsAre(0, 2, 6, 12));
  EXPECT_THAT(sequences->micro_batch, ElementsAre(0, 2, 2, 3));
  const auto blocks = Make(3);
  EXPECT_THAT(blocks->offsets, ElementsAre(0, 3, 6, 9, 12));
  EXPECT_THAT(blocks->micro_batch, ElementsAre(0, 2, 2, 4));
}

TEST_F(TokenGroupsTest, AbsentOffsetsStandForOneUnit) {
  sequences_ = micro_batches_ = {};
  EXPECT_THAT(Make(TokenGroup::kMicroBatch)->offsets, ElementsAre(0, 12));
  EXPECT_THAT(Make(TokenGroup::kSequence)->offsets, ElementsAre(0, 12));
  EXPECT_THAT(Make(4)->offsets, ElementsAre(0, 4, 8, 12));
}

}  // namespace
}  // namespace moe
