// comm/ring_all_reduce.h and comm/all_reduce.h on threads.
#include <limits>
#include <numeric>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/all_reduce.h"
#include "comm/extremes.h"
#include "tests/comm/comm_env.h"
#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

using ::testing::Each;
using testing::ExpectDone;

constexpr absl::Duration kPatience = absl::Seconds(30);

int64_t Value(int rank, size_t i) {
  return static_cast<int64_t>((i + 1) * 0x9E3779B97F4A7C15U + 77U * static_cast<size_t>(rank)) >> 4;
}

float FloatValue(int rank, size_t i) {
  return static_cast<float>(Value(rank, i) >> 20) * 0x1p-24F;
}

class RingAllReduceTest : public ::testing::TestWithParam<int> {
 protected:
  static void OnEachRank(absl::FunctionRef<void(Communicator&, Stream&)> body) {
    testing::Env().Run(GetParam(), kPatience, testing::EnvStream::kQueue, body);
  }
};

// Lengths below R, not divisible by R, below and beyond several chunks (of 16 int64).
constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 8, 9, 128, 129, 1000, 4099};

TEST_P(RingAllReduceTest, Int64SumsAreExactForEveryLength) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    RingAllReduce ring(comm, {.chunk_bytes = 128});
    for (const size_t n : kLengths) {
      std::vector<int64_t> x(n);
      for (size_t i = 0; i < n; ++i) x[i] = Value(comm.rank(), i);
      ExpectDone(ring.Sum(absl::MakeSpan(x), stream), stream);
      for (size_t i = 0; i < n; ++i) {
        uint64_t wrapped = 0;
        for (int r = 0; r < comm.size(); ++r) wrapped += static_cast<uint64_t>(Value(r, i));
        ASSERT_EQ(static_cast<uint64_t>(x[i]), wrapped) << "i=" << i << " n=" << n;
      }
    }
  });
}

// The order that the header promises, whatever the chunk: block b is summed as b+1, b+2, ..., b.
// The first n mod R blocks have an element more than the others.
TEST_P(RingAllReduceTest, FloatsAreSummedInTheOrderOfTheRing) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    for (const size_t n : kLengths) {
      std::vector<float> expected;
      for (int block = 0; block < ranks; ++block) {
        const size_t size = n / ranks + (static_cast<size_t>(block) < n % ranks ? 1 : 0);
        for (size_t end = expected.size() + size; expected.size() < end;) {
          float sum = FloatValue((block + 1) % ranks, expected.size());
          for (int k = 2; k <= ranks; ++k) {
            sum += FloatValue((block + k) % ranks, expected.size());
          }
          expected.push_back(sum);
        }
      }
      for (const int64_t chunk : {64, 128, 128, 1 << 18}) {
        std::vector<float> x(n);
        for (size_t i = 0; i < n; ++i) x[i] = FloatValue(comm.rank(), i);
        RingAllReduce ring(comm, {.chunk_bytes = chunk});
        ExpectDone(ring.Sum(absl::MakeSpan(x), stream), stream);
        EXPECT_EQ(x, expected) << "n " << n << " chunk " << chunk;
      }
    }
  });
}

// Every algorithm's reduce-scatter, over parts of which some are empty.
TEST_P(RingAllReduceTest, ReduceScatterSumsTheOwnPartOfAnySize) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (const AllReduceAlgorithm algorithm :
         {AllReduceAlgorithm::kRing, AllReduceAlgorithm::kDirect}) {
      const auto reducer = AllReducer::Create(algorithm, comm, {.chunk_bytes = 128}).value();
      for (int shift = 0; shift < 3; ++shift) {
        std::vector<int64_t> counts;
        for (int r = 0; r < comm.size(); ++r) counts.push_back((r + shift) % 3 * 50);
        const auto before =
            std::accumulate(counts.begin(), counts.begin() + comm.rank(), int64_t{0});
        std::vector<int64_t> x(std::accumulate(counts.begin(), counts.end(), size_t{0}));
        for (size_t i = 0; i < x.size(); ++i) x[i] = Value(comm.rank(), i);
        ExpectDone(reducer->ReduceScatter(absl::MakeSpan(x), counts, stream), stream);
        for (int64_t i = before; i < before + counts[comm.rank()]; ++i) {
          uint64_t wrapped = 0;
          for (int r = 0; r < comm.size(); ++r) wrapped += static_cast<uint64_t>(Value(r, i));
          ASSERT_EQ(static_cast<uint64_t>(x[i]), wrapped) << "i=" << i << " shift " << shift;
        }
      }
      std::vector<int64_t> x(3);
      const std::vector<int64_t> counts(comm.size(), 4);
      EXPECT_EQ(reducer->ReduceScatter(absl::MakeSpan(x), counts, stream).code(),
                absl::StatusCode::kInvalidArgument);
    }
  });
}

// The first stream of every other rank is late: without the wait its second sum would go first.
TEST_P(RingAllReduceTest, StreamsTakeTurns) {
  OnEachRank([](Communicator& comm, Stream& first) {
    const auto second = MakeStream({}).value();
    std::vector<float> x(100, 1.0F), y(100, 8.0F);
    RingAllReduce ring(comm, {.chunk_bytes = 64});
    const auto pause = absl::Milliseconds(comm.rank() % 2 == 0 ? 20 : 0);
    ASSERT_TRUE(first
                    .Enqueue([pause] {
                      absl::SleepFor(pause);
                      return absl::OkStatus();
                    })
                    .ok());
    ASSERT_TRUE(ring.Sum(absl::MakeSpan(x), first).ok());
    ASSERT_TRUE(ring.Sum(absl::MakeSpan(y), *second).ok());
    ASSERT_TRUE(first.Synchronize().ok());
    ASSERT_TRUE(second->Synchronize().ok());
    EXPECT_THAT(x, Each(static_cast<float>(comm.size())));
    EXPECT_THAT(y, Each(8.0F * static_cast<float>(comm.size())));
  });
}

TEST_P(RingAllReduceTest, DirectSumsInRankOrder) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const auto direct = AllReducer::Create(AllReduceAlgorithm::kDirect, comm).value();
    std::vector<float> x(1237);
    for (size_t i = 0; i < x.size(); ++i) x[i] = FloatValue(comm.rank(), i);
    ExpectDone(direct->Sum(absl::MakeSpan(x), stream), stream);
    for (size_t i = 0; i < x.size(); ++i) {
      float expected = FloatValue(0, i);
      for (int r = 1; r < comm.size(); ++r) expected += FloatValue(r, i);
      ASSERT_EQ(x[i], expected) << "i=" << i;
    }
  });
}

TEST_P(RingAllReduceTest, LibraryIsRefusedOnThreads) {
  OnEachRank([](Communicator& comm, Stream&) {
    EXPECT_EQ(AllReducer::Create(AllReduceAlgorithm::kLibrary, comm).status().code(),
              absl::StatusCode::kInvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RingAllReduceTest, ::testing::Range(1, 9),
                         [](const auto& p) { return absl::StrCat("R", p.param); });

// comm/extremes.h on threads.

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(ExtremesTest, AreTheLeastAndTheLargestOnEveryRank) {
  for (const int ranks : {1, 3, 8}) {
    testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const int64_t rank = world->rank(), last = ranks - 1;
      const auto stream = MakeInlineStream();
      const int64_t values[] = {7, rank, -rank, rank == last ? kLeast : kMost};
      const auto extremes = ExtremesOverRanks(values, *world, *stream);
      if (!extremes.ok()) return extremes.status();
      EXPECT_EQ(extremes->size(), 4u);
      const auto expect = [&](int i, int64_t least, int64_t most) {
        EXPECT_EQ((*extremes)[i].least, least) << ranks << " " << i;
        EXPECT_EQ((*extremes)[i].most, most) << ranks << " " << i;
        EXPECT_EQ((*extremes)[i].same(), least == most) << ranks << " " << i;
      };
      expect(0, 7, 7);
      expect(1, 0, last);
      expect(2, -last, 0);
      expect(3, kLeast, ranks == 1 ? kLeast : kMost);
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace moe
