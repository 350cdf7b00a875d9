// kernels/expert_sort on the simulated GPU: the orders that a DispatchPlan has on the host.
#include "kernels/expert_sort/expert_sort_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using expert_sort::CudaExpertSort;
using expert_sort::kChunkSlots;
using expert_sort::kMaxExperts;

constexpr int32_t kUntouched = -77;

// A routing: token t has the slots slot_offset[t] .. [t + 1].
struct Slots {
  int32_t num_experts = 0;
  std::vector<int64_t> slot_offset = {0}, micro_batch_offsets = {0};
  std::vector<int32_t> expert, order;
  std::vector<uint8_t> dropped;
  int64_t padded_rows = 0;

  int64_t slots() const { return static_cast<int64_t>(expert.size()); }
  int32_t micro_batches() const { return static_cast<int32_t>(micro_batch_offsets.size()) - 1; }
};

// What a sort writes.
struct Sorted {
  explicit Sorted(const Slots& s)
      : row_of_slot(s.slots(), kUntouched),
        slot_of_row(
            s.padded_rows > 0 ? s.num_experts * s.micro_batches() * s.padded_rows : s.slots(),
            kUntouched),
        expert_begin(s.num_experts + 1, kUntouched),
        count(s.micro_batches() * s.num_experts, kUntouched) {}
  bool operator==(const Sorted&) const = default;

  std::vector<int32_t> row_of_slot, slot_of_row;
  std::vector<int64_t> expert_begin;
  std::vector<int32_t> count;
};

Sorted Sort(const Slots& s) {
  Sorted out(s);
  CudaExpertSort sort = {.slots = s.slots(),
                         .expert = s.expert.data(),
                         .dropped = s.dropped.empty() ? nullptr : s.dropped.data(),
                         .num_experts = s.num_experts,
                         .order = s.order.empty() ? nullptr : s.order.data(),
                         .micro_batches = s.micro_batches(),
                         .micro_batch_offsets = s.micro_batch_offsets.data(),
                         .slot_offset = s.slot_offset.data(),
                         .padded_rows = s.padded_rows,
                         .row_of_slot = out.row_of_slot.data(),
                         .slot_of_row = out.slot_of_row.data(),
                         .expert_begin = out.expert_begin.data(),
                         .count = out.count.data()};
  std::vector<int32_t> scratch(ScratchElements(sort), kUntouched);
  sort.scratch = scratch.data();
  EXPECT_EQ(expert_sort::Run(sort, nullptr), cudaSuccess);
  return out;
}

// DispatchPlanBuilder::CountKeptSlots, StartHomeRows and OrderHomeRows, one slot at a time.
Sorted SortInPlainLoops(const Slots& s) {
  Sorted out(s);
  const auto kept = [&](int64_t slot) {
    return s.expert[slot] >= 0 && s.expert[slot] < s.num_experts &&
           (s.dropped.empty() || s.dropped[slot] == 0);
  };
  const auto for_each_kept = [&](auto visit) {
    for (int32_t b = 0; b < s.micro_batches(); ++b) {
      for (int64_t t = s.micro_batch_offsets[b]; t < s.micro_batch_offsets[b + 1]; ++t) {
        for (int64_t slot = s.slot_offset[t]; slot < s.slot_offset[t + 1]; ++slot) {
          if (kept(slot)) visit(b, slot, s.expert[slot]);
        }
      }
    }
  };
  std::fill(out.count.begin(), out.count.end(), 0);
  for_each_kept([&](int32_t b, int64_t, int32_t e) { ++out.count[b * s.num_experts + e]; });

  std::vector<int64_t> start(s.num_experts);
  int64_t rows = 0;
  for (int32_t i = 0; i < s.num_experts; ++i) {
    const int32_t e = s.order.empty() ? i : s.order[i];
    out.expert_begin[i] = start[e] = rows;
    for (int32_t b = 0; b < s.micro_batches(); ++b) {
      rows += s.padded_rows > 0 ? s.padded_rows : out.count[b * s.num_experts + e];
    }
  }
  out.expert_begin[s.num_experts] = rows;

  std::fill(out.row_of_slot.begin(), out.row_of_slot.end(), -1);
  if (s.padded_rows > 0) std::fill(out.slot_of_row.begin(), out.slot_of_row.end(), -1);
  std::vector<int64_t> next(s.num_experts, 0);
  int32_t last_micro_batch = -1;
  for_each_kept([&](int32_t b, int64_t slot, int32_t e) {
    if (s.padded_rows > 0 && b != last_micro_batch) {
      std::fill(next.begin(), next.end(), b * s.padded_rows);
    }
    last_micro_batch = b;
    const int64_t place = next[e]++;
    if (s.padded_rows > 0 && place >= (b + 1) * s.padded_rows) return;
    out.row_of_slot[slot] = static_cast<int32_t>(start[e] + place);
    out.slot_of_row[start[e] + place] = static_cast<int32_t>(slot);
  });
  return out;
}

uint32_t Random(uint64_t seed, int64_t item) {
  return Random4({.seed = seed, .item = static_cast<uint64_t>(item)})[0];
}

// `per_micro_batch` tokens each, of 0 .. 2 k slots (k on average), some of identity experts and
// some dropped.
Slots RandomSlots(const std::vector<int64_t>& per_micro_batch, int32_t experts, int64_t k,
                  uint64_t seed) {
  Slots s;
  s.num_experts = experts;
  int64_t token = 0;
  for (const int64_t tokens : per_micro_batch) {
    for (int64_t t = 0; t < tokens; ++t, ++token) {
      const int64_t choices = k == 1 ? 1 : Random(seed, token) % (2 * k + 1);
      for (int64_t j = 0; j < choices; ++j) {
        const auto slot = s.slots();
        // One expert in three goes to the first: runs of equal ones within a warp.
        const uint32_t draw = Random(seed + 1, slot);
        s.expert.push_back(draw % 3 == 0 ? 0 : static_cast<int32_t>(draw / 3 % (experts + 2)));
        s.dropped.push_back(Random(seed + 2, slot) % 5 == 0);
      }
      s.slot_offset.push_back(s.slots());
    }
    s.micro_batch_offsets.push_back(token);
  }
  for (int32_t e = 0; e < experts; ++e) s.order.push_back(e);
  for (int32_t e = experts - 1; e > 0; --e) {
    std::swap(s.order[e], s.order[Random(seed + 3, e) % (e + 1)]);
  }
  return s;
}

void ExpectEqual(const Sorted& got, const Sorted& want) {
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.expert_begin, want.expert_begin);
  EXPECT_TRUE(got.row_of_slot == want.row_of_slot);
  EXPECT_TRUE(got.slot_of_row == want.slot_of_row);
}

// 2 micro-batches of 2 and 1 tokens, 3 experts and an identity expert (3), rows by 2, 0, 1.
Slots SlotsByHand() {
  return {.num_experts = 3,
          .slot_offset = {0, 2, 5, 7},
          .micro_batch_offsets = {0, 2, 3},
          .expert = {0, 2, 2, 3, 0, 2, 0},
          .order = {2, 0, 1},
          .dropped = {0, 0, 0, 0, 1, 0, 0}};
}

TEST(ExpertSortCuda, RowsByHand) {
  const Sorted sorted = Sort(SlotsByHand());
  EXPECT_EQ(sorted.row_of_slot, (std::vector<int32_t>{3, 0, 1, -1, -1, 2, 4}));
  EXPECT_EQ(sorted.slot_of_row, (std::vector<int32_t>{1, 2, 5, 0, 6, kUntouched, kUntouched}));
  EXPECT_EQ(sorted.expert_begin, (std::vector<int64_t>{0, 3, 5, 5}));
  EXPECT_EQ(sorted.count, (std::vector<int32_t>{1, 0, 2, 1, 0, 1}));
}

TEST(ExpertSortCuda, PaddedRowsByHand) {
  Slots slots = SlotsByHand();
  slots.padded_rows = 2;
  const Sorted sorted = Sort(slots);
  EXPECT_EQ(sorted.row_of_slot, (std::vector<int32_t>{4, 0, 1, -1, -1, 2, 6}));
  EXPECT_EQ(sorted.slot_of_row, (std::vector<int32_t>{1, 2, 5, -1, 0, -1, 6, -1, -1, -1, -1, -1}));
  EXPECT_EQ(sorted.expert_begin, (std::vector<int64_t>{0, 4, 8, 12}));
}

TEST(ExpertSortCuda, HasTheOrderOfThePlainLoopsForAnySizeAndSchedule) {
  testing::ForSchedules([&] {
    // One choice a token: sizes around a warp, a warp's share and a chunk.
    for (const int64_t slots : {int64_t{1}, int64_t{257}, kChunkSlots, kChunkSlots + 1}) {
      const Slots s = RandomSlots({slots}, 5, 1, 1);
      ExpectEqual(Sort(s), SortInPlainLoops(s));
    }
    for (const int32_t experts : {64, kMaxExperts}) {
      const Slots s = RandomSlots({40, 0, 600}, experts, 4, 10);
      ExpectEqual(Sort(s), SortInPlainLoops(s));
    }
  });
}

// Room for all; for most; a micro-batch without tokens is padded as any other.
TEST(ExpertSortCuda, PaddedRowsHaveTheOrderOfThePlainLoopsAndSlotsBeyondGetNone) {
  testing::ForSchedules([&] {
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
TEST(ExpertSortCuda, SumsOverManyChunks) {
  if (moe::testing::kSanitized) GTEST_SKIP() << "a matter of size";
  std::vector<int64_t> tokens(300, 1);
  tokens[20] = kChunkSlots + 1;
  const Slots s = RandomSlots(tokens, 7, 1, 30);
  ExpectEqual(Sort(s), SortInPlainLoops(s));
}

TEST(ExpertSortCuda, WithoutOffsetsAllSlotsAreOneMicroBatch) {
  Slots s = RandomSlots({100}, 6, 3, 40);
  s.order.clear();
  s.dropped.clear();
  const Sorted want = SortInPlainLoops(s);
  Sorted got(s);
  CudaExpertSort sort = {.slots = s.slots(),
                         .expert = s.expert.data(),
                         .num_experts = 6,
                         .row_of_slot = got.row_of_slot.data(),
                         .slot_of_row = got.slot_of_row.data(),
                         .expert_begin = got.expert_begin.data(),
                         .count = got.count.data()};
  std::vector<int32_t> scratch(ScratchElements(sort));
  sort.scratch = scratch.data();
  ASSERT_EQ(expert_sort::Run(sort, nullptr), cudaSuccess);
  ExpectEqual(got, want);
}

// Tokens with several slots, with none, and none at the end; empty places of padding.
TEST(ExpertSortCuda, EveryRowKnowsItsToken) {
  const std::vector<int64_t> slot_offset = {0, 2, 2, 5, 6, 6};
  const std::vector<int32_t> slot_of_row = {5, 0, -1, 4, 2, 1, 3, -1, 77};
  const int64_t rows = 8;  // of 9 at most
  std::vector<int32_t> token(9, kUntouched), own(9, kUntouched);
  const expert_sort::CudaRowTokens tokens = {.most_rows = 9,
                                             .rows = &rows,
                                             .slot_of_row = slot_of_row.data(),
                                             .tokens = 5,
                                             .slot_offset = slot_offset.data(),
                                             .token_of_row = token.data(),
                                             .own_row = own.data()};
  ASSERT_EQ(expert_sort::Run(tokens, nullptr), cudaSuccess);
  EXPECT_EQ(token, (std::vector<int32_t>{3, 0, -1, 2, 2, 0, 2, -1, kUntouched}));
  EXPECT_EQ(own, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, kUntouched}));
}

// More rows than threads of a block, every token with its own number of slots.
TEST(ExpertSortCuda, ManyRowsKnowTheirTokens) {
  std::vector<int64_t> slot_offset = {0};
  std::vector<int32_t> slot_of_row, want;
  for (int t = 0; t < 700; ++t) slot_offset.push_back(slot_offset.back() + t % 4);
  const int64_t rows = slot_offset.back();
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = i * 997 % rows;
    const auto after = std::upper_bound(slot_offset.begin(), slot_offset.end(), slot);
    slot_of_row.push_back(static_cast<int32_t>(slot));
    want.push_back(static_cast<int32_t>(after - slot_offset.begin()) - 1);
  }
  std::vector<int32_t> token(rows, kUntouched), own(rows, kUntouched);
  const expert_sort::CudaRowTokens tokens = {.most_rows = rows,
                                             .rows = &rows,
                                             .slot_of_row = slot_of_row.data(),
                                             .tokens = 700,
                                             .slot_offset = slot_offset.data(),
                                             .token_of_row = token.data(),
                                             .own_row = own.data()};
  ASSERT_EQ(expert_sort::Run(tokens, nullptr), cudaSuccess);
  EXPECT_EQ(token, want);
  ASSERT_EQ(expert_sort::Run(expert_sort::CudaRowTokens{}, nullptr), cudaSuccess);  // no rows
}

// Ids that no routing has get no row: nothing is written out of bounds.
TEST(ExpertSortCuda, NegativeExpertsAreNotKept) {
  Slots s = RandomSlots({50}, 3, 2, 50);
  s.expert[7] = -1;
  s.expert[8] = std::numeric_limits<int32_t>::min();
  s.expert[9] = std::numeric_limits<int32_t>::max();
  ExpectEqual(Sort(s), SortInPlainLoops(s));
}

TEST(ExpertSortCuda, NoSlotsGiveZeroOffsetsAndCounts) {
  for (const int64_t padded_rows : {0, 2}) {
    Slots s = RandomSlots({0, 0}, 3, 2, 60);
    s.padded_rows = padded_rows;
    const Sorted sorted = Sort(s);
    EXPECT_EQ(sorted.count, std::vector<int32_t>(6, 0));
    EXPECT_EQ(sorted.expert_begin,
              (std::vector<int64_t>{0, 2 * padded_rows, 4 * padded_rows, 6 * padded_rows}));
    EXPECT_EQ(sorted.slot_of_row, std::vector<int32_t>(6 * 2 * padded_rows / 2, -1));
  }
}

TEST(ExpertSortCuda, RefusesWhatItIsNotCompiledForAndWritesNothing) {
  std::vector<int64_t> offsets = {0, 0, 0};
  const auto run = [&](auto change) {
    CudaExpertSort sort = {.num_experts = 4};
    change(sort);
    return expert_sort::Run(sort, nullptr);  // its outputs are null pointers
  };
  using S = CudaExpertSort;
  EXPECT_EQ(run([](S& s) { s.slots = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.slots = int64_t{1} << 31; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.num_experts = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.num_experts = 1025; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.micro_batches = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.micro_batches = 2; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([&](S& s) { s.micro_batch_offsets = offsets.data(); }), cudaErrorInvalidValue);
  EXPECT_EQ(run([&](S& s) { s.slot_offset = offsets.data(); }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.padded_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(run([](S& s) { s.padded_rows = int64_t{1} << 29; }), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace moe
