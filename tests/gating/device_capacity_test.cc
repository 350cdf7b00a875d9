// Expert capacity of a CUDA device against the host's (gating/capacity.h).
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "gating/capacity.h"
#include "kernels/expert_capacity/expert_capacity.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

constexpr int32_t kExperts = 12, kIdentityExperts = 3, kChoices = 3;
constexpr int64_t kTokens = 150;
constexpr double kFactor = 0.7;

class DeviceCapacityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = std::move(TestDevices().back());
    if (!IsCuda(device_->stream())) GTEST_SKIP() << "no CUDA device";
    std::mt19937_64 rng(5);
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto first = static_cast<int32_t>(rng() % (kExperts + kIdentityExperts));
      for (int j = 0; j < kChoices; ++j) {
        expert_.push_back((first + 4 * j) % (kExperts + kIdentityExperts));
        weight_.push_back(static_cast<float>(rng() % 16) / 16);
      }
      slot_offset_.push_back(static_cast<int64_t>(expert_.size()));
    }
  }

  absl::Status Drop(const std::vector<int64_t>& capacity, KeptSlots kept) {
    const auto slot_offset = device_->Copy(slot_offset_);
    const auto expert = device_->Copy(expert_);
    const auto weight = device_->Copy(weight_);
    const auto dropped = device_->Copy(std::vector<uint8_t>(expert_.size(), 77));
    const auto count = device_->Copy(std::vector<int64_t>{77});
    Workspace workspace(device_->memory());
    const absl::Status status = DropOverCapacity({.slot_offset = slot_offset.span(),
                                                  .expert = expert.span(),
                                                  .group_offsets = groups_,
                                                  .capacity = capacity,
                                                  .num_experts = kExperts},
                                                 kept, weight.span(), dropped.span(),
                                                 count.span().data(), workspace, device_->stream());
    new_weight_ = device_->Read(weight);  // waits
    dropped_ = device_->Read(dropped);
    dropped_slots_ = device_->Read(count)[0];
    return status;
  }

  std::unique_ptr<TestDevice> device_;
  std::vector<int64_t> slot_offset_ = {0}, groups_ = {0, 60, 61, kTokens};
  std::vector<int32_t> expert_;
  std::vector<float> weight_, new_weight_;
  std::vector<uint8_t> dropped_;
  int64_t dropped_slots_ = 0;
};

TEST_F(DeviceCapacityTest, DropsWhatTheHostDrops) {
  std::vector<int64_t> capacity;
  for (size_t g = 0; g + 1 < groups_.size(); ++g) {
    capacity.push_back(ExpertCapacity(groups_[g + 1] - groups_[g], kChoices, kExperts, kFactor));
  }
  for (const DropPolicy policy : {DropPolicy::kProbability, DropPolicy::kPosition}) {
    std::vector<uint8_t> want(expert_.size());
    Workspace workspace;
    const auto count = MarkDropped({.slot_offset = slot_offset_,
                                    .expert = expert_,
                                    .weight = weight_,
                                    .num_experts = kExperts},
                                   {.offsets = groups_, .micro_batch = {}}, kChoices, kFactor,
                                   policy, absl::MakeSpan(want), workspace);
    ASSERT_TRUE(count.ok() && *count > 0);
    ASSERT_TRUE(Drop(capacity, policy == DropPolicy::kPosition ? KeptSlots::kFirst
                                                               : KeptSlots::kLargestWeight)
                    .ok());
    EXPECT_EQ(dropped_, want);
    EXPECT_EQ(dropped_slots_, *count);
    for (size_t s = 0; s < want.size(); ++s) {
      EXPECT_EQ(new_weight_[s], want[s] != 0 ? 0.0f : weight_[s]) << s;
    }
  }
}

TEST_F(DeviceCapacityTest, NoSlotsDropNone) {
  slot_offset_ = {0}, groups_ = {0};
  expert_.clear(), weight_.clear();
  EXPECT_TRUE(Drop({}, KeptSlots::kFirst).ok());
  EXPECT_EQ(dropped_slots_, 0);
}

TEST_F(DeviceCapacityTest, RefusesACapacityThatIsNotOneAGroup) {
  EXPECT_EQ(Drop({3}, KeptSlots::kFirst).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe::testing
