// The orders of a DispatchPlan, sorted on a device.
#include "kernels/expert_sort/expert_sort.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/expert_sort/expert_rows.h"
#include "kernels/expert_sort/expert_sort_cuda.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using expert_sort::kChunkSlots;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A routing: token t has slots slot_offset[t] .. [t + 1].
struct Slots {
  int32_t num_experts = 0;
  std::vector<int64_t> slot_offset = {0}, micro_batch_offsets = {0};
  std::vector<int32_t> expert;
  std::vector<uint8_t> dropped;
  int64_t padded_rows = 0;
  std::vector<int32_t> order;

  int64_t slots() const { return static_cast<int64_t>(expert.size()); }
  int64_t micro_batches() const { return std::max<int64_t>(micro_batch_offsets.size(), 2) - 1; }
  size_t most_rows() const {
    return padded_rows > 0 ? num_experts * micro_batches() * padded_rows : slots();
  }
};

struct Sorted {
  std::vector<int32_t> row_of_slot, slot_of_row, token_of_row, own_row;
  std::vector<int64_t> expert_begin, segment_begin;
  std::vector<int32_t> count;
};

class ExpertSortTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = std::move(TestDevices().back());
    if (device_->is_cpu()) GTEST_SKIP() << "no CUDA device";
  }

  absl::StatusOr<Sorted> TrySort(const Slots& s) {
    Workspace workspace(device_->memory());
    const auto slot_offset = device_->Copy(s.slot_offset);
    const auto expert = device_->Copy(s.expert);
    const auto dropped = device_->Copy(s.dropped);
    const auto result = SortByExpert({.slot_offset = slot_offset.span(),
                                      .expert = expert.span(),
                                      .dropped = dropped.span(),
                                      .micro_batch_offsets = s.micro_batch_offsets,
                                      .num_experts = s.num_experts,
                                      .padded_rows = s.padded_rows,
                                      .order = s.order},
                                     workspace, device_->stream());
    // also after an error: the workspace is destroyed next
    device_->stream().Synchronize().IgnoreError();
    MOE_ASSIGN_OR_RETURN(const SortedSlots sorted, result);
    Sorted out = {.row_of_slot = Read(sorted.row_of_slot),
                  .slot_of_row = Read(sorted.slot_of_row),
                  .token_of_row = Read(sorted.token_of_row),
                  .own_row = Read(sorted.own_row),
                  .expert_begin = Read(sorted.expert_begin),
                  .segment_begin = Read(sorted.segment_begin),
                  .count = Read(sorted.count)};
    return out;
  }
  Sorted Sort(const Slots& s) { return TrySort(s).value(); }

  template <typename T>
  std::vector<T> Read(absl::Span<const T> array) {
    std::vector<T> host(array.size());
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    EXPECT_OK(device_->stream().CopyBytes(array.data(), host.data(), bytes));
    EXPECT_OK(device_->stream().Synchronize());
    return host;
  }

  std::unique_ptr<TestDevice> device_;
};

// DispatchPlanBuilder::CountSlots and OrderHomeRows, slot by slot; experts by id.
Sorted SortInPlainLoops(const Slots& s) {
  const int64_t batches = s.micro_batches(), experts = s.num_experts;
  Sorted out = {.row_of_slot = std::vector<int32_t>(s.slots(), -1),
                .slot_of_row = std::vector<int32_t>(s.most_rows(), -1),
                .token_of_row = std::vector<int32_t>(s.most_rows(), -1),
                .own_row = std::vector<int32_t>(s.most_rows()),
                .expert_begin = {0},
                .segment_begin = {0},
                .count = std::vector<int32_t>(batches * experts)};
  const auto for_each_kept = [&](auto visit) {
    for (int64_t b = 0; b + 1 < std::ssize(s.micro_batch_offsets); ++b) {
      for (int64_t t = s.micro_batch_offsets[b]; t < s.micro_batch_offsets[b + 1]; ++t) {
        for (int64_t slot = s.slot_offset[t]; slot < s.slot_offset[t + 1]; ++slot) {
          const int32_t e = s.expert[slot];
          if (e >= 0 && e < experts && s.dropped[slot] == 0) visit(b, t, slot, e);
        }
      }
    }
  };
  for_each_kept([&](int64_t b, int64_t, int64_t, int32_t e) { ++out.count[b * experts + e]; });
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t b = 0; b < batches; ++b) {
      const int64_t rows = s.padded_rows > 0 ? s.padded_rows : out.count[b * experts + e];
      out.segment_begin.push_back(out.segment_begin.back() + rows);
    }
    out.expert_begin.push_back(out.segment_begin.back());
  }
  std::iota(out.own_row.begin(), out.own_row.end(), 0);
  std::vector<int64_t> taken(experts), taken_in_batch(batches * experts);
  for_each_kept([&](int64_t b, int64_t t, int64_t slot, int32_t e) {
    const int64_t place = taken_in_batch[b * experts + e]++;
    if (s.padded_rows > 0 && place >= s.padded_rows) return;
    const int64_t within = s.padded_rows > 0 ? b * s.padded_rows + place : taken[e]++;
    const int64_t row = out.expert_begin[e] + within;
    out.row_of_slot[slot] = static_cast<int32_t>(row);
    out.slot_of_row[row] = static_cast<int32_t>(slot);
    out.token_of_row[row] = static_cast<int32_t>(t);
  });
  return out;
}

void ExpectEqual(const Sorted& got, const Sorted& want) {
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.expert_begin, want.expert_begin);
  EXPECT_EQ(got.segment_begin, want.segment_begin);
  EXPECT_TRUE(got.row_of_slot == want.row_of_slot);
  EXPECT_TRUE(got.slot_of_row == want.slot_of_row);
  EXPECT_TRUE(got.token_of_row == want.token_of_row);
  EXPECT_TRUE(got.own_row == want.own_row);
}

uint32_t Random(uint64_t seed, int64_t item) {
  return Random4({.seed = seed, .item = static_cast<uint64_t>(item)})[0];
}

// `per_micro_batch` tokens each, with 0 .. 2 k slots (k on average), some of identity experts and
// some dropped.
Slots RandomSlots(const std::vector<int64_t>& per_micro_batch, int32_t experts, int64_t k,
                  uint64_t seed) {
  Slots s = {.num_experts = experts};
  int64_t token = 0;
  for (const int64_t tokens : per_micro_batch) {
    for (int64_t t = 0; t < tokens; ++t, ++token) {
      const int64_t choices = k == 1 ? 1 : Random(seed, token) % (2 * k + 1);
      for (int64_t j = 0; j < choices; ++j) {
        const auto slot = s.slots();
        // One expert in three is the first: runs of equal ones within a warp.
        const uint32_t draw = Random(seed + 1, slot);
        s.expert.push_back(draw % 3 == 0 ? 0 : static_cast<int32_t>(draw / 3 % (experts + 2)));
        s.dropped.push_back(Random(seed + 2, slot) % 5 == 0);
      }
      s.slot_offset.push_back(s.slots());
    }
    s.micro_batch_offsets.push_back(token);
  }
  return s;
}

// 2 micro-batches of 2 and 1 tokens, 3 experts and an identity expert (3).
Slots SlotsByHand() {
  return {.num_experts = 3,
          .slot_offset = {0, 2, 5, 7},
          .micro_batch_offsets = {0, 2, 3},
          .expert = {0, 2, 2, 3, 0, 2, 0},
          .dropped = {0, 0, 0, 0, 1, 0, 0}};
}

TEST_F(ExpertSortTest, RowsByHand) {
  const Sorted sorted = Sort(SlotsByHand());
  EXPECT_THAT(sorted.row_of_slot, ElementsAre(0, 2, 3, -1, -1, 4, 1));
  EXPECT_THAT(sorted.slot_of_row, ElementsAre(0, 6, 1, 2, 5, -1, -1));
  EXPECT_THAT(sorted.token_of_row, ElementsAre(0, 2, 0, 1, 2, -1, -1));
  EXPECT_THAT(sorted.own_row, ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(sorted.expert_begin, ElementsAre(0, 2, 2, 5));
  EXPECT_THAT(sorted.segment_begin, ElementsAre(0, 1, 2, 2, 2, 4, 5));
  EXPECT_THAT(sorted.count, ElementsAre(1, 0, 2, 1, 0, 1));
}

TEST_F(ExpertSortTest, PaddedRowsByHand) {
  Slots slots = SlotsByHand();
  slots.padded_rows = 2;
  const Sorted sorted = Sort(slots);
  EXPECT_THAT(sorted.row_of_slot, ElementsAre(0, 8, 9, -1, -1, 10, 2));
  EXPECT_THAT(sorted.slot_of_row, ElementsAre(0, -1, 6, -1, -1, -1, -1, -1, 1, 2, 5, -1));
  EXPECT_THAT(sorted.token_of_row, ElementsAre(0, -1, 2, -1, -1, -1, -1, -1, 0, 1, 2, -1));
  EXPECT_THAT(sorted.expert_begin, ElementsAre(0, 4, 8, 12));
}

TEST_F(ExpertSortTest, RowsFollowAnOrderOfExperts) {
  Slots slots = SlotsByHand();
  slots.order = {2, 0, 1};
  Sorted sorted = Sort(slots);
  EXPECT_THAT(sorted.row_of_slot, ElementsAre(3, 0, 1, -1, -1, 2, 4));
  EXPECT_THAT(sorted.slot_of_row, ElementsAre(1, 2, 5, 0, 6, -1, -1));
  EXPECT_THAT(sorted.expert_begin, ElementsAre(0, 3, 5, 5));
  EXPECT_THAT(sorted.segment_begin, ElementsAre(0, 2, 3, 4, 5, 5, 5));
  EXPECT_THAT(sorted.count, ElementsAre(1, 0, 2, 1, 0, 1));
  slots.padded_rows = 2;
  sorted = Sort(slots);
  EXPECT_THAT(sorted.row_of_slot, ElementsAre(4, 0, 1, -1, -1, 2, 6));
  EXPECT_THAT(sorted.expert_begin, ElementsAre(0, 4, 8, 12));
}

TEST_F(ExpertSortTest, TokensAreSentOnceToAGroupOfExperts) {
  const Slots s = SlotsByHand();
  const auto slot_offset = device_->Copy(s.slot_offset);
  const auto expert = device_->Copy(s.expert);
  const auto dropped = device_->Copy(s.dropped);
  const auto row_of_slot = device_->Copy(Sort(s).row_of_slot);
  Workspace workspace(device_->memory());
  const auto sent = [&](std::vector<int32_t> group_of_expert, int32_t groups) {
    const auto result = SortTokensByGroup({.slots = {.slot_offset = slot_offset.span(),
                                                     .expert = expert.span(),
                                                     .dropped = dropped.span(),
                                                     .num_experts = s.num_experts},
                                           .group_of_expert = group_of_expert,
                                           .num_groups = groups,
                                           .row_of_slot = row_of_slot.span()},
                                          workspace, device_->stream());
    EXPECT_OK(result);
    const auto place = result->place.first(5);  // kept slots
    return std::vector{Read(result->token_of_row), Read(result->count), Read(place)};
  };
  EXPECT_THAT(sent({0, 0, 1}, 2), ElementsAre(ElementsAre(0, 2, 0, 1, 2, -1, -1), ElementsAre(2, 3),
                                              ElementsAre(0, 1, 0, 1, 2)));
  EXPECT_THAT(sent({0, 0, 0}, 1), ElementsAre(ElementsAre(0, 1, 2, -1, -1, -1, -1), ElementsAre(3),
                                              ElementsAre(0, 2, 0, 1, 2)));
}

// Rows of rank 0 for expert 0 (two) and 1, of rank 1 for expert 0. Rank 0 sent two tokens, rank 1
// one. Two of the places are out of range.
TEST_F(ExpertSortTest, ExpertRowsByHandReadNoRowThatIsNotTheirSources) {
  const std::vector<ExpertRun> runs = {
      {.rows = 2, .expert_row = 0, .return_row = 0, .received = 0, .source_rows = 2},
      {.rows = 1, .expert_row = 3, .return_row = 2, .received = 2, .source_rows = 2},
      {.rows = 1,
       .expert_row = 2,
       .return_row = 3,
       .received = 3,
       .source_row = 2,
       .source_rows = 1}};
  const auto received = device_->Copy(std::vector<int32_t>{0, 1, 7, -3});
  Workspace workspace(device_->memory());
  const auto rows = workspace.Array<int32_t>(12).value();
  ExpertRowOrders orders = {.runs = runs,
                            .received = received.span(),
                            .return_order = rows.first(4),
                            .return_place = rows.subspan(4, 4),
                            .source = rows.subspan(8)};
  const auto order = [&] {
    return OrderExpertRows(orders, workspace, device_->stream());
  };
  ASSERT_OK(order());
  EXPECT_THAT(Read<int32_t>(rows), ElementsAre(0, 1, 3, 2, 0, 1, 3, 2, 0, 1, 2, 1));
  orders.source = rows.first(3);
  EXPECT_THAT(Message(order()), HasSubstr("source is [3], expected [4]"));
}

TEST_F(ExpertSortTest, HasTheOrderOfThePlainLoopsForAnySizeAndSchedule) {
  ForSchedules([&] {
    // One choice a token: sizes around a warp, a warp's share and a chunk.
    for (const int64_t slots : {int64_t{1}, int64_t{129}, kChunkSlots, kChunkSlots + 1}) {
      const Slots s = RandomSlots({slots}, 5, 1, 1);
      ExpectEqual(Sort(s), SortInPlainLoops(s));
    }
    for (const int32_t experts : {64, kMaxSortedExperts}) {
      const Slots s = RandomSlots({40, 0, 600}, experts, 4, 10);
      ExpectEqual(Sort(s), SortInPlainLoops(s));
    }
  });
}

// Capacity for all; for most; a micro-batch without tokens is padded like any other.
TEST_F(ExpertSortTest, PaddedRowsHaveTheOrderOfThePlainLoopsAndSlotsBeyondGetNone) {
  ForSchedules([&] {
    for (const int64_t padded_rows : {40, 9000}) {
      Slots s = RandomSlots({70, 0, 530}, 24, 4, 20);
      s.padded_rows = padded_rows;
      const Sorted want = SortInPlainLoops(s);
      ExpectEqual(Sort(s), want);
      const bool over = *std::max_element(want.count.begin(), want.count.end()) > padded_rows;
      EXPECT_EQ(over, padded_rows < 9000);
    }
  });
}

// More columns than a warp sums in a round (256), more micro-batches than a block has threads.
TEST_F(ExpertSortTest, SumsOverManyChunks) {
  if (kSanitized) GTEST_SKIP() << "a matter of size";
  std::vector<int64_t> tokens(300, 1);
  tokens[20] = kChunkSlots + 1;
  const Slots s = RandomSlots(tokens, 7, 1, 30);
  ExpectEqual(Sort(s), SortInPlainLoops(s));
}

TEST_F(ExpertSortTest, WithoutOffsetsAllSlotsAreOneMicroBatchAndWithoutFlagsNoneIsDropped) {
  Slots s = RandomSlots({100}, 6, 3, 40);
  s.dropped.assign(s.expert.size(), 0);
  const Sorted want = SortInPlainLoops(s);
  s.micro_batch_offsets.clear();
  s.dropped.clear();
  ExpectEqual(Sort(s), want);
}

// Ids that no routing has get no row: nothing is written out of bounds.
TEST_F(ExpertSortTest, NegativeExpertsAreNotKept) {
  Slots s = RandomSlots({50}, 3, 2, 50);
  s.expert[7] = -1;
  s.expert[8] = std::numeric_limits<int32_t>::min();
  s.expert[9] = std::numeric_limits<int32_t>::max();
  ExpectEqual(Sort(s), SortInPlainLoops(s));
}

TEST_F(ExpertSortTest, NoSlotsGiveZeroOffsetsAndCounts) {
  for (const int64_t padded_rows : {0, 2}) {
    Slots s = {.num_experts = 3, .micro_batch_offsets = {0, 0, 0}, .padded_rows = padded_rows};
    ExpectEqual(Sort(s), SortInPlainLoops(s));
    s.slot_offset = {};  // offsets of no tokens
    ExpectEqual(Sort(s), SortInPlainLoops(s));
  }
}

TEST_F(ExpertSortTest, RefusesWhatItDoesNotSort) {
  const auto refused = [&](auto change) {
    Slots s = SlotsByHand();
    change(s);
    return Message(TrySort(s).status());
  };
  EXPECT_THAT(refused([](Slots& s) { s.num_experts = 1025; }), HasSubstr("E (experts) is 1025"));
  EXPECT_THAT(refused([](Slots& s) { s.num_experts = 0; }), HasSubstr("SortByExpert: "));
  EXPECT_THAT(refused([](Slots& s) { s.dropped.pop_back(); }), HasSubstr("dropped is [6]"));
  EXPECT_THAT(refused([](Slots& s) { s.order = {0, 1}; }), HasSubstr("order is [2]"));
  EXPECT_THAT(refused([](Slots& s) { s.micro_batch_offsets.back() = 2; }),
              HasSubstr("offsets run from 0 to 2"));
  Workspace workspace;
  EXPECT_EQ(SortByExpert({.num_experts = 1}, workspace, *MakeInlineStream()).status().code(),
            absl::StatusCode::kUnimplemented);
#if defined(MOE_TEST_SCHEDULES)  // sizes beyond any memory
  using Sort = expert_sort::CudaExpertSort;
  for (const Sort& sort : {Sort{.slots = int64_t{1} << 31, .num_experts = 4},
                           Sort{.num_experts = 4, .padded_rows = int64_t{1} << 29},
                           Sort{.num_experts = 4, .micro_batches = 0}}) {
    EXPECT_EQ(expert_sort::Run(sort, nullptr), cudaErrorInvalidValue);
  }
#endif
}

}  // namespace
}  // namespace moe::testing
