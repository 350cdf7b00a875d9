// Expert capacity on a CUDA device: against a sort of every expert's slots, and the decisions of
// the host (gating/capacity.h).
#include "kernels/expert_capacity/expert_capacity.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "gating/capacity.h"
#include "tests/kernels/device_memory.h"
#if defined(MOE_TEST_SCHEDULES)
#include "kernels/expert_capacity/expert_capacity_cuda.h"
#endif

namespace moe::testing {
namespace {

// Groups of tokens; token t has `choices` slots, group g is [group_offsets[g], group_offsets[g +
// 1]).
struct Slots {
  int32_t num_experts = 0;
  std::vector<int64_t> group_offsets = {0}, slot_offset = {0}, capacity;
  std::vector<int32_t> expert;
  std::vector<float> weight;

  int64_t slots() const { return static_cast<int64_t>(expert.size()); }
  int32_t groups() const { return static_cast<int32_t>(group_offsets.size()) - 1; }
  int64_t FirstSlot(int32_t group) const { return slot_offset[group_offsets[group]]; }
};

// `distinct` different weights, so that many are equal; the experts of a token differ.
Slots RandomSlots(const std::vector<int64_t>& tokens, int32_t experts, int choices, int distinct,
                  uint64_t seed) {
  std::mt19937_64 rng(seed);  // the standard defines its numbers
  Slots s = {.num_experts = experts};
  for (const int64_t of_group : tokens) {
    for (int64_t t = 0; t < of_group; ++t) {
      const auto first = static_cast<int32_t>(rng() % experts);
      for (int j = 0; j < choices; ++j) {
        s.expert.push_back((first + j) % experts);
        s.weight.push_back(static_cast<float>(rng() % distinct) / 8 - 1);
      }
      s.slot_offset.push_back(s.slots());
    }
    s.group_offsets.push_back(s.group_offsets.back() + of_group);
    s.capacity.push_back(static_cast<int64_t>(rng() % (of_group + 2)));
  }
  return s;
}

struct Kept {
  std::vector<uint8_t> dropped;
  std::vector<float> weight;
  int64_t dropped_slots = 0;
};

void ExpectEqual(const Kept& got, const Kept& want) {
  EXPECT_EQ(got.dropped, want.dropped);
  EXPECT_EQ(got.dropped_slots, want.dropped_slots);
  EXPECT_TRUE(SameNumbers(got.weight, want.weight));
}

// The slots of an expert in a group, ascending.
std::vector<int32_t> SlotsOf(const Slots& s, int32_t expert, int32_t group) {
  std::vector<int32_t> slots;
  for (int64_t slot = s.FirstSlot(group); slot < s.FirstSlot(group + 1); ++slot) {
    if (s.expert[slot] == expert) slots.push_back(static_cast<int32_t>(slot));
  }
  return slots;
}

int64_t TokenOf(const Slots& s, int64_t slot) {
  return std::upper_bound(s.slot_offset.begin(), s.slot_offset.end(), slot) -
         s.slot_offset.begin() - 1;
}

constexpr KeptSlots kPolicies[] = {KeptSlots::kLargestWeight, KeptSlots::kFirst};

Kept DropBySorting(const Slots& s, KeptSlots policy) {
  Kept kept = {std::vector<uint8_t>(s.slots(), 0), s.weight};
  for (int32_t g = 0; g < s.groups(); ++g) {
    for (int32_t e = 0; e < s.num_experts; ++e) {
      std::vector<int32_t> slots = SlotsOf(s, e, g);
      std::stable_sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) {
        if (policy == KeptSlots::kFirst) {
          return a - s.slot_offset[TokenOf(s, a)] < b - s.slot_offset[TokenOf(s, b)];
        }
        if (std::isnan(s.weight[a])) return false;
        return std::isnan(s.weight[b]) || s.weight[a] > s.weight[b];
      });
      for (auto i = static_cast<size_t>(s.capacity[g]); i < slots.size(); ++i) {
        kept.dropped[slots[i]] = 1;
        kept.weight[slots[i]] = 0;
        ++kept.dropped_slots;
      }
    }
  }
  return kept;
}

class ExpertCapacityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device_->is_cpu()) GTEST_SKIP() << "no CUDA device";
  }
  absl::Status Drop(const Slots& s, KeptSlots policy, Kept& kept) const {
    const auto slot_offset = device_->Copy(s.slot_offset);
    const auto expert = device_->Copy(s.expert);
    const auto weight = device_->Copy(s.weight);
    const auto dropped = device_->Copy(std::vector<uint8_t>(s.expert.size(), 77));
    const auto count = device_->Copy<int64_t>({77});
    Workspace workspace(device_->memory());
    const absl::Status status = DropOverCapacity({.slot_offset = slot_offset.span(),
                                                  .expert = expert.span(),
                                                  .group_offsets = s.group_offsets,
                                                  .capacity = s.capacity,
                                                  .num_experts = s.num_experts},
                                                 policy, weight.span(), dropped.span(),
                                                 count.span().data(), workspace, device_->stream());
    kept = {device_->Read(dropped), device_->Read(weight), device_->Read(count)[0]};
    return status;
  }
  Kept Drop(const Slots& s, KeptSlots policy) const {
    Kept kept;
    EXPECT_OK(Drop(s, policy, kept));
    return kept;
  }

  std::unique_ptr<TestDevice> device_ = std::move(TestDevices().back());
};

TEST_F(ExpertCapacityTest, KeepsTheLargestWeights) {
  // One expert with capacity 2: the NaN is dropped first, then the smallest; of equal ones the
  // later.
  const Slots s = {.num_experts = 1,
                   .group_offsets = {0, 5},
                   .slot_offset = {0, 1, 2, 3, 4, 5},
                   .capacity = {2},
                   .expert = {0, 0, 0, 0, 0},
                   .weight = {0.5f, kNaN, 0.75f, 0.5f, 0.25f}};
  const Kept kept = Drop(s, KeptSlots::kLargestWeight);
  EXPECT_EQ(kept.dropped, (std::vector<uint8_t>{0, 1, 0, 1, 1}));
  EXPECT_EQ(kept.weight, (std::vector<float>{0.5f, 0, 0.75f, 0, 0}));
  EXPECT_EQ(kept.dropped_slots, 3);
}

TEST_F(ExpertCapacityTest, KeepsFirstChoicesBeforeSecondOnes) {
  // Tokens 0 and 1 choose expert 1 second, token 2 first: token 2 precedes them.
  const Slots s = {.num_experts = 2,
                   .group_offsets = {0, 3},
                   .slot_offset = {0, 2, 4, 6},
                   .capacity = {2},
                   .expert = {0, 1, 0, 1, 1, 0},
                   .weight = {1, 1, 1, 1, 1, 1}};
  const Kept kept = Drop(s, KeptSlots::kFirst);
  EXPECT_EQ(kept.dropped, (std::vector<uint8_t>{0, 0, 0, 1, 0, 1}));
  EXPECT_EQ(kept.dropped_slots, 2);
}

// More slots of an expert than a block has threads, groups of other sizes, empty segments.
TEST_F(ExpertCapacityTest, MatchesASortOfEverySegment) {
  ForSchedules([&] {
    for (const KeptSlots policy : kPolicies) {
      for (const int distinct : {2, 5, 1 << 20}) {
        SCOPED_TRACE(::testing::Message() << distinct);
        const Slots s = RandomSlots({900, 1, 33, 300}, 3, 2, distinct, 7);
        ExpectEqual(Drop(s, policy), DropBySorting(s, policy));
      }
    }
  });
}

TEST_F(ExpertCapacityTest, WeightsOfEveryKindKeepTheirOrder) {
  Slots s = RandomSlots({40}, 1, 1, 1, 3);
  const float kinds[] = {0.0f,       -0.0f,  kNaN,    -kNaN, kInfinity,
                         -kInfinity, 1e-40f, -1e-40f, 3.5f,  -3.5f};
  for (int64_t i = 0; i < s.slots(); ++i) s.weight[i] = kinds[(i * 7) % 10];
  for (int64_t capacity = 0; capacity <= 41; ++capacity) {
    SCOPED_TRACE(capacity);
    s.capacity = {capacity};
    ExpectEqual(Drop(s, KeptSlots::kLargestWeight), DropBySorting(s, KeptSlots::kLargestWeight));
  }
}

// More groups than a block has threads.
TEST_F(ExpertCapacityTest, FindsTheSegmentAmongManyGroups) {
  if (kSanitized) GTEST_SKIP() << "a matter of size";
  const Slots s = RandomSlots(std::vector<int64_t>(300, 3), 2, 1, 4, 11);
  for (const KeptSlots policy : kPolicies) {
    ExpectEqual(Drop(s, policy), DropBySorting(s, policy));
  }
}

// Ids from E on have unlimited capacity.
TEST_F(ExpertCapacityTest, DropsWhatTheHostDrops) {
  constexpr int32_t kExperts = 12, kChoices = 3;
  constexpr double kFactor = 0.7;
  Slots s = RandomSlots({60, 1, 89}, kExperts + 3, kChoices, 16, 5);
  s.num_experts = kExperts;
  for (int32_t g = 0; g < s.groups(); ++g) {
    s.capacity[g] =
        ExpertCapacity(s.group_offsets[g + 1] - s.group_offsets[g], kChoices, kExperts, kFactor);
  }
  for (const KeptSlots policy : kPolicies) {
    Kept want = {std::vector<uint8_t>(s.expert.size()), s.weight};
    Workspace workspace;
    const auto count =
        MarkDropped({.slot_offset = s.slot_offset,
                     .expert = s.expert,
                     .weight = s.weight,
                     .num_experts = kExperts},
                    {.offsets = s.group_offsets, .micro_batch = {}}, kChoices, kFactor,
                    policy == KeptSlots::kFirst ? DropPolicy::kPosition : DropPolicy::kProbability,
                    absl::MakeSpan(want.dropped), workspace);
    ASSERT_TRUE(count.ok() && *count > 0);
    want.dropped_slots = *count;
    for (size_t i = 0; i < want.weight.size(); ++i) {
      if (want.dropped[i] != 0) want.weight[i] = 0;
    }
    ExpectEqual(Drop(s, policy), want);
  }
}

TEST_F(ExpertCapacityTest, NoSlotsDropNoneAndACapacityThatIsNotOneAGroupIsRefused) {
  Slots none = {.num_experts = 3};
  EXPECT_EQ(Drop(none, KeptSlots::kFirst).dropped_slots, 0);
  none.capacity = {3};
  Kept kept;
  EXPECT_EQ(Drop(none, KeptSlots::kFirst, kept).code(), absl::StatusCode::kInvalidArgument);
}

#if defined(MOE_TEST_SCHEDULES)
TEST(ExpertCapacityLauncherTest, RefusesWhatNoGridHolds) {
  EXPECT_EQ(expert_capacity::Run({.num_experts = 0, .groups = 1}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(expert_capacity::Run({.num_experts = 1, .groups = 0}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(expert_capacity::Run({.num_experts = 1 << 16, .groups = 1 << 15}, nullptr),
            cudaErrorInvalidValue);
}

#endif

}  // namespace
}  // namespace moe::testing
