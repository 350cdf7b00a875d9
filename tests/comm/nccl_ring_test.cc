// RingAllReduce over NCCL adds on the device: the bits of the ring over threads of the host.
#include <atomic>
#include <barrier>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/ring_all_reduce.h"
#include "kernels/base/rng.h"
#include "tests/comm/local_ranks.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/cusim/fake_memory.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::OnNcclRanks;
using testing::TestDevice;

constexpr uint32_t kRingSeeds = 3;

// Nothing, fewer elements than ranks, odd, and blocks of several chunks, the last of one element.
// Few: under ThreadSanitizer an addition of a chunk takes milliseconds.
constexpr size_t kLengths[] = {0, 1, 3, 7, 8, 101, 257};

template <typename T>
std::vector<T> Values(int rank, size_t n) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i) {
    const RandomKey key = {.seed = static_cast<uint64_t>(rank), .item = i};
    if constexpr (std::is_same_v<T, float>) {
      values[i] = static_cast<float>(Normal(key));
    } else {
      const auto random = Random4(key);
      values[i] = static_cast<T>(uint64_t{random[0]} << 32 | random[1]);
    }
  }
  return values;
}

// By length: what every rank has after the ring over threads.
template <typename T>
std::vector<std::vector<T>> SumsOnTheHost(int ranks) {
  std::vector<std::vector<T>> sums;
  testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> comm) {
    RingAllReduce ring(*comm);
    const auto stream = MakeInlineStream();
    for (const size_t n : kLengths) {
      std::vector<T> values = Values<T>(comm->rank(), n);
      EXPECT_TRUE(ring.Sum(absl::MakeSpan(values), *stream).ok());
      if (comm->rank() == 0) sums.push_back(std::move(values));
    }
    return comm->Barrier();
  });
  return sums;
}

template <typename T>
class NcclRingTest : public ::testing::Test {};
using Types = ::testing::Types<float, int64_t>;
TYPED_TEST_SUITE(NcclRingTest, Types);

TYPED_TEST(NcclRingTest, HasTheBitsOfTheRingOverThreadsOfTheHost) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    const auto want = SumsOnTheHost<TypeParam>(ranks);
    for (const int64_t chunk_bytes : {128, 0}) {
      for (uint32_t seed = 1; seed <= kRingSeeds; ++seed) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << chunk_bytes << ", " << seed);
        OnNcclRanks({.ranks = ranks, .seed = seed}, [&](Communicator& comm, const TestDevice& at) {
          RingAllReduce ring(comm, {.chunk_bytes = chunk_bytes});
          for (size_t i = 0; i < std::size(kLengths); ++i) {
            const auto values = at.Copy(Values<TypeParam>(comm.rank(), kLengths[i]));
            const absl::Status status = ring.Sum(values.span(), at.stream());
            EXPECT_TRUE(status.ok()) << status;
            EXPECT_TRUE(testing::SameBits(at.Read(values), want[i])) << kLengths[i];
          }
        });
      }
    }
  }
}

// Nobody waits for a stream before every rank has been given back its host: a task that is ahead of
// the sums must not have run by then.
TEST(NcclRingOrderTest, TheHostWaitsForNothing) {
  constexpr int kRanks = 3;
  std::barrier<> everybody(kRanks);
  OnNcclRanks({.ranks = kRanks}, [&](Communicator& comm, const TestDevice& at) {
    RingAllReduce ring(comm);
    const auto values = at.Copy(std::vector<float>(1000, 1.0f));
    EXPECT_TRUE(ring.Sum(values.span(), at.stream()).ok());  // connects, allocates
    EXPECT_TRUE(at.stream().Synchronize().ok());
    everybody.arrive_and_wait();
    const int64_t allocations = cusim::DeviceAllocations();
    std::atomic<bool> returned = false, waited = true;
    const auto look = [&] {
      waited = !returned;
      return absl::OkStatus();
    };
    EXPECT_TRUE(at.stream().Enqueue(look).ok());
    EXPECT_TRUE(ring.Sum(values.span(), at.stream()).ok());
    EXPECT_TRUE(ring.Sum(values.span(), at.stream()).ok());
    returned = true;
    everybody.arrive_and_wait();
    EXPECT_EQ(at.Read(values), std::vector<float>(1000, 27));
    EXPECT_FALSE(waited);
    EXPECT_EQ(cusim::DeviceAllocations(), allocations);
  });
}

// Both streams use one scratch; a sum that did not wait for the other's would add what is not its
// own.
TEST(NcclRingOrderTest, StreamsOfADeviceTakeTurns) {
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(seed);
    OnNcclRanks({.ranks = 2, .seed = seed}, [](Communicator& comm, const TestDevice& first) {
      const TestDevice second({DeviceKind::kCuda, comm.rank()});
      RingAllReduce ring(comm, {.chunk_bytes = 64});
      const auto x = first.Copy(std::vector<float>(100, 1.0f));
      const auto y = second.Copy(std::vector<float>(100, 8.0f));
      for (int i = 0; i < 2; ++i) {
        EXPECT_TRUE(ring.Sum(x.span(), first.stream()).ok());
        EXPECT_TRUE(ring.Sum(y.span(), second.stream()).ok());
      }
      EXPECT_EQ(first.Read(x), std::vector<float>(100, 4));
      EXPECT_EQ(second.Read(y), std::vector<float>(100, 32));
    });
  }
}

TEST(NcclRingOrderTest, AStreamOfAnotherDeviceIsRefused) {
  OnNcclRanks({.ranks = 2}, [](Communicator& comm, const TestDevice& at) {
    RingAllReduce ring(comm);
    const auto x = at.Copy<float>({1, 2});
    EXPECT_TRUE(ring.Sum(x.span(), at.stream()).ok());
    std::vector<float> host = {3, 4};
    const auto stream = MakeInlineStream();
    EXPECT_EQ(ring.Sum(absl::MakeSpan(host), *stream).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(ring.Sum(x.span(), at.stream()).ok());
    EXPECT_EQ(at.Read(x), (std::vector<float>{4, 8}));
  });
}

// The last rank leaves after the first sum; the others' hosts go on, and learn it from their
// stream.
TEST(NcclRingOrderTest, ARankThatLeavesIsADeadlineOfTheStream) {
  OnNcclRanks({.ranks = 3, .timeout = absl::Milliseconds(300), .fates = testing::Fates::kOwn},
              [](Communicator& comm, const TestDevice& at) {
                RingAllReduce ring(comm);
                const auto x = at.Copy(std::vector<float>(1000, 1.0f));
                const Site site = {.name = "all-reduce", .step = 7};
                EXPECT_TRUE(ring.Sum(x.span(), at.stream(), site).ok());
                EXPECT_EQ(at.Read(x), std::vector<float>(1000, 3));
                if (comm.rank() == 2) return;
                const absl::Time start = absl::Now();
                absl::Status status = ring.Sum(x.span(), at.stream(), site);
                status.Update(at.stream().Synchronize());
                EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
                EXPECT_THAT(std::string(status.message()),
                            ::testing::HasSubstr("in SendRecv (all-reduce, step 7): waited"));
                EXPECT_LT(absl::Now() - start, absl::Seconds(2.3));
              });
}

// The scratch goes with the ring, and only when the stream is done with it.
TEST(NcclRingOrderTest, TheRingMayGoBeforeItsStreamIsThrough) {
  OnNcclRanks({.ranks = 3}, [](Communicator& comm, const TestDevice& at) {
    const auto x = at.Copy(std::vector<float>(1000, 1.0f));
    EXPECT_TRUE(RingAllReduce(comm, {.chunk_bytes = 64}).Sum(x.span(), at.stream()).ok());
    EXPECT_EQ(at.Read(x), std::vector<float>(1000, 3));
  });
}

}  // namespace
}  // namespace moe
