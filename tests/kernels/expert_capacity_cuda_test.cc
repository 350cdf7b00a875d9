// kernels/expert_capacity on the simulated GPU, against a sort of every expert's slots.
#include "kernels/expert_capacity/expert_capacity_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using expert_capacity::CudaExpertCapacity;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Groups of tokens, token t with `choices` slots; group g is [group_offsets[g], group_offsets[g +
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

// `distinct` weights, so that many are equal; every expert of a token is another.
Slots RandomSlots(const std::vector<int64_t>& tokens, int32_t experts, int choices, int distinct,
                  uint64_t seed) {
  std::mt19937_64 rng(seed);  // its numbers are the standard's
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
  ASSERT_EQ(got.weight.size(), want.weight.size());
  for (size_t i = 0; i < got.weight.size(); ++i) {
    if (std::isnan(want.weight[i])) {
      EXPECT_TRUE(std::isnan(got.weight[i])) << i;
    } else {
      EXPECT_EQ(got.weight[i], want.weight[i]) << i;
    }
  }
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

Kept DropBySorting(const Slots& s, bool by_weight) {
  Kept kept = {std::vector<uint8_t>(s.slots(), 0), s.weight};
  for (int32_t g = 0; g < s.groups(); ++g) {
    for (int32_t e = 0; e < s.num_experts; ++e) {
      std::vector<int32_t> slots = SlotsOf(s, e, g);
      std::stable_sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) {
        if (!by_weight) return a - s.slot_offset[TokenOf(s, a)] < b - s.slot_offset[TokenOf(s, b)];
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

Kept DropOnDevice(const Slots& s, bool by_weight) {
  std::vector<int64_t> expert_begin = {0};
  std::vector<int32_t> count(s.groups() * s.num_experts), slot_of_row, token_of_row;
  for (int32_t e = 0; e < s.num_experts; ++e) {
    for (int32_t g = 0; g < s.groups(); ++g) {
      const std::vector<int32_t> slots = SlotsOf(s, e, g);
      count[g * s.num_experts + e] = static_cast<int32_t>(slots.size());
      slot_of_row.insert(slot_of_row.end(), slots.begin(), slots.end());
    }
    expert_begin.push_back(static_cast<int64_t>(slot_of_row.size()));
  }
  for (const int32_t slot : slot_of_row) {
    token_of_row.push_back(static_cast<int32_t>(TokenOf(s, slot)));
  }
  Kept kept = {std::vector<uint8_t>(s.slots(), 0), s.weight};
  const CudaExpertCapacity capacity = {.num_experts = s.num_experts,
                                       .groups = s.groups(),
                                       .capacity = s.capacity.data(),
                                       .expert_begin = expert_begin.data(),
                                       .count = count.data(),
                                       .slot_of_row = slot_of_row.data(),
                                       .token_of_row = by_weight ? nullptr : token_of_row.data(),
                                       .slot_offset = s.slot_offset.data(),
                                       .group_offsets = s.group_offsets.data(),
                                       .weight = kept.weight.data(),
                                       .dropped = kept.dropped.data(),
                                       .dropped_slots = &kept.dropped_slots};
  EXPECT_EQ(expert_capacity::Run(capacity, nullptr), cudaSuccess);
  return kept;
}

TEST(ExpertCapacityCuda, KeepsTheLargestWeights) {
  // One expert, room for two: the NaN goes first, then the least; of equal ones the later.
  const Slots s = {.num_experts = 1,
                   .group_offsets = {0, 5},
                   .slot_offset = {0, 1, 2, 3, 4, 5},
                   .capacity = {2},
                   .expert = {0, 0, 0, 0, 0},
                   .weight = {0.5f, kNan, 0.75f, 0.5f, 0.25f}};
  const Kept kept = DropOnDevice(s, /*by_weight=*/true);
  EXPECT_EQ(kept.dropped, (std::vector<uint8_t>{0, 1, 0, 1, 1}));
  EXPECT_EQ(kept.weight, (std::vector<float>{0.5f, 0, 0.75f, 0, 0}));
  EXPECT_EQ(kept.dropped_slots, 3);
}

TEST(ExpertCapacityCuda, KeepsFirstChoicesBeforeSecondOnes) {
  // Tokens 0 and 1 choose expert 1 second, token 2 first: it goes before them.
  const Slots s = {.num_experts = 2,
                   .group_offsets = {0, 3},
                   .slot_offset = {0, 2, 4, 6},
                   .capacity = {2},
                   .expert = {0, 1, 0, 1, 1, 0},
                   .weight = {1, 1, 1, 1, 1, 1}};
  const Kept kept = DropOnDevice(s, /*by_weight=*/false);
  EXPECT_EQ(kept.dropped, (std::vector<uint8_t>{0, 0, 0, 1, 0, 1}));
  EXPECT_EQ(kept.dropped_slots, 2);
}

// More slots of an expert than threads of a block, groups of other sizes, empty segments.
TEST(ExpertCapacityCuda, MatchesASortOfEverySegment) {
  cusim::ForSeeds([] {
    for (const bool by_weight : {true, false}) {
      for (const int distinct : {2, 5, 1 << 20}) {
        SCOPED_TRACE(::testing::Message() << by_weight << " " << distinct);
        const Slots s = RandomSlots({900, 1, 33, 300}, 3, 2, distinct, 7);
        ExpectEqual(DropOnDevice(s, by_weight), DropBySorting(s, by_weight));
      }
    }
  });
}

TEST(ExpertCapacityCuda, WeightsOfEveryKindKeepTheirOrder) {
  Slots s = RandomSlots({40}, 1, 1, 1, 3);
  const float kinds[] = {0.0f,       -0.0f,  kNan,    -kNan, kInfinity,
                         -kInfinity, 1e-40f, -1e-40f, 3.5f,  -3.5f};
  for (int64_t i = 0; i < s.slots(); ++i) s.weight[i] = kinds[(i * 7) % 10];
  for (int64_t capacity = 0; capacity <= 41; ++capacity) {
    SCOPED_TRACE(capacity);
    s.capacity = {capacity};
    ExpectEqual(DropOnDevice(s, true), DropBySorting(s, true));
  }
}

// More groups than a block has threads.
TEST(ExpertCapacityCuda, FindsTheSegmentAmongManyGroups) {
  if (moe::testing::kSanitized) GTEST_SKIP() << "a matter of size";
  const Slots s = RandomSlots(std::vector<int64_t>(300, 3), 2, 1, 4, 11);
  for (const bool by_weight : {true, false}) {
    ExpectEqual(DropOnDevice(s, by_weight), DropBySorting(s, by_weight));
  }
}

TEST(ExpertCapacityCuda, RefusesWhatNoGridHolds) {
  EXPECT_EQ(expert_capacity::Run({.num_experts = 0, .groups = 1}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(expert_capacity::Run({.num_experts = 1, .groups = 0}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(expert_capacity::Run({.num_experts = 1 << 16, .groups = 1 << 15}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace moe
