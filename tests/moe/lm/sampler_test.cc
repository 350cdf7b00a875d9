#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/lm/text_data.h"
#include "moe/micro_batches.h"

namespace moe::lm {
namespace {

// The sequences that `rank` reads in one step, as training does.
std::vector<int64_t> SequencesOf(Sampler& sampler, int rank, int ranks, int64_t micro_batches,
                                 int64_t micro_batch_size, int64_t step) {
  std::vector<int64_t> sequences;
  const MicroBatchRange mine = MicroBatchesOf(rank, ranks, micro_batches);
  for (int64_t i = mine.begin * micro_batch_size; i < mine.end * micro_batch_size; ++i) {
    sequences.push_back(sampler.At(step, i));
  }
  return sequences;
}

TEST(SamplerTest, AnEpochReadsEverySequenceOnce) {
  Sampler sampler(24, 4, 7);
  ASSERT_EQ(sampler.batches_per_epoch(), 6);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<int64_t> seen;
    for (int64_t step = epoch * 6; step < (epoch + 1) * 6; ++step) {
      for (int64_t i = 0; i < 4; ++i) seen.insert(sampler.At(step, i));
    }
    EXPECT_EQ(seen.size(), 24u);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), 23);
  }
}

TEST(SamplerTest, DropsTheIncompleteLastBatch) {
  Sampler sampler(10, 4, 7);
  EXPECT_EQ(sampler.batches_per_epoch(), 2);
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 2; ++step) {
    for (int64_t i = 0; i < 4; ++i) seen.insert(sampler.At(step, i));
  }
  EXPECT_EQ(seen.size(), 8u);
}

TEST(SamplerTest, OneSequenceIsReadEveryStep) {
  Sampler sampler(1, 1, 7);
  EXPECT_EQ(sampler.At(0, 0), 0);
  EXPECT_EQ(sampler.At(41, 0), 0);
}

TEST(SamplerTest, EpochsAndSeedsDiffer) {
  const auto order = [](uint64_t seed, int64_t epoch) {
    Sampler sampler(64, 64, seed);
    std::vector<int64_t> v;
    for (int64_t i = 0; i < 64; ++i) v.push_back(sampler.At(epoch, i));
    return v;
  };
  EXPECT_EQ(order(7, 0), order(7, 0));
  EXPECT_NE(order(7, 0), order(7, 1));
  EXPECT_NE(order(7, 0), order(8, 0));
}

TEST(SamplerTest, GoingBackGivesTheSameOrder) {
  Sampler sampler(10, 2, 7);
  const int64_t early = sampler.At(1, 1);
  sampler.At(12, 0);
  EXPECT_EQ(sampler.At(1, 1), early);
}

// Every place of a shuffle of n = 8 is equally likely. Over k = 4000 epochs a count has mean
// k / 8 = 500 and standard deviation sqrt(k/8 * 7/8) = 20.9; six of them are exceeded by one of 64
// counts about once in 10^7 seeds, and the seed is fixed.
TEST(SamplerTest, ShufflesEvenly) {
  Sampler sampler(8, 8, 99);
  std::map<std::pair<int64_t, int64_t>, int> count;
  for (int64_t epoch = 0; epoch < 4000; ++epoch) {
    for (int64_t place = 0; place < 8; ++place) ++count[{place, sampler.At(epoch, place)}];
  }
  for (int64_t place = 0; place < 8; ++place) {
    for (int64_t sequence = 0; sequence < 8; ++sequence) {
      EXPECT_NEAR((count[{place, sequence}]), 500, 126) << place << " " << sequence;
    }
  }
}

TEST(SamplerTest, RanksReadDisjointPartsOfOneOrder) {
  constexpr int64_t kMicroBatches = 6;
  constexpr int64_t kSize = 3;
  Sampler alone(100, kMicroBatches * kSize, 7);
  for (const int ranks : {1, 2, 3, 4, 5, 6, 8}) {
    for (int64_t step = 0; step < 12; ++step) {
      std::vector<int64_t> together;
      for (int rank = 0; rank < ranks; ++rank) {
        Sampler sampler(100, kMicroBatches * kSize, 7);
        const auto part = SequencesOf(sampler, rank, ranks, kMicroBatches, kSize, step);
        together.insert(together.end(), part.begin(), part.end());
      }
      EXPECT_EQ(together, SequencesOf(alone, 0, 1, kMicroBatches, kSize, step)) << ranks;
      EXPECT_EQ(std::set<int64_t>(together.begin(), together.end()).size(), together.size());
    }
  }
}

TEST(MicroBatchesOfTest, RangesAreContiguousAndBalanced) {
  EXPECT_EQ(MicroBatchesOf(1, 3, 7).begin, 2);
  EXPECT_EQ(MicroBatchesOf(1, 3, 7).end, 4);
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const int64_t micro_batches : {1, 3, 8, 13}) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const MicroBatchRange range = MicroBatchesOf(rank, ranks, micro_batches);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.end - range.begin, micro_batches / ranks);
        EXPECT_LE(range.end - range.begin, (micro_batches + ranks - 1) / ranks);
        next = range.end;
      }
      EXPECT_EQ(next, micro_batches);
    }
  }
}

}  // namespace
}  // namespace moe::lm
