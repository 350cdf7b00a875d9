// Collectives of the backend nccl in streams of CUDA devices, over their memory: the contract of
// comm_contract_test.cc, which hands over memory of the host, holds for them too.
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/all_reduce.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/cusim/fake_memory.h"

namespace moe {
namespace {

using testing::DeviceArray;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::OnNcclRanks;
using testing::TestDevice;

constexpr int kRanks = 3;
constexpr uint32_t kSeeds = 5;

#define EXPECT_OK(call)                   \
  do {                                    \
    const absl::Status status_ = (call);  \
    EXPECT_TRUE(status_.ok()) << status_; \
  } while (false)

void OnSeeds(const std::function<void(Communicator&, const TestDevice&)>& body) {
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    OnNcclRanks({.ranks = kRanks, .seed = seed}, body);
  }
}

TEST(NcclDeviceTest, CollectivesFollowEachOtherWithoutTheHost) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    Stream& stream = device.stream();
    const int r = comm.rank();
    const auto sum = device.Copy<int64_t>({r, 10 + r});
    const auto all = device.Copy(std::vector<int64_t>(2 * kRanks));
    const auto largest = device.Copy<float>({-1});
    const auto parts = device.Copy<float>({1, 2, static_cast<float>(r)});
    EXPECT_OK(comm.AllReduce<int64_t>(sum.span(), ReduceOp::kSum, stream));
    EXPECT_OK(comm.AllGather<int64_t>(sum.span(), all.span(), stream));
    EXPECT_OK(comm.ReduceScatter<float>(parts.span(), largest.span(), ReduceOp::kMax, stream));
    EXPECT_OK(comm.Fence(stream));
    EXPECT_OK(comm.Broadcast<int64_t>(sum.span().first(1), 2, stream));
    EXPECT_THAT(device.Read(all), ElementsAre(3, 33, 3, 33, 3, 33));
    EXPECT_THAT(device.Read(largest), ElementsAre(r == 0 ? 1 : 2));
    EXPECT_THAT(device.Read(sum), ElementsAre(3, 33));
  });
}

// bf16 is summed in one scratch, which the next sum, in another stream, may not have before the
// cast.
TEST(NcclDeviceTest, SumsOfBFloat16InSeveralStreamsDoNotMeet) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    const TestDevice second({DeviceKind::kCuda, comm.rank()});
    const auto x = device.Copy(std::vector<BFloat16>(300, BFloat16(1.0f)));
    const auto y = second.Copy(std::vector<BFloat16>(300, BFloat16(2.0f)));
    std::vector<BFloat16> z(300, BFloat16(4.0f));
    const auto host = MakeInlineStream();
    EXPECT_OK(comm.AllReduce<BFloat16>(x.span(), ReduceOp::kSum, device.stream()));
    EXPECT_OK(comm.AllReduce<BFloat16>(y.span(), ReduceOp::kSum, second.stream()));
    EXPECT_OK(comm.AllReduce<BFloat16>(absl::MakeSpan(z), ReduceOp::kSum, *host));
    EXPECT_OK(comm.Fence(second.stream()));
    EXPECT_THAT(device.Read(x), Each(BFloat16(3.0f)));
    EXPECT_THAT(second.Read(y), Each(BFloat16(6.0f)));
    EXPECT_THAT(z, Each(BFloat16(12.0f)));
  });
}

TEST(NcclDeviceTest, InPlaceAndFromARoot) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    Stream& stream = device.stream();
    const int r = comm.rank();
    const auto all = device.Copy<int32_t>({-1, -1, -1});
    const auto own = all.span().subspan(static_cast<size_t>(r), 1);
    EXPECT_OK(stream.Upload(&r, own.data(), sizeof(int32_t)));
    EXPECT_OK(comm.AllGather<int32_t>(own, all.span(), stream));
    const auto scattered = device.Copy<int32_t>({r, 10 * r, 100 * r});
    const auto mine = scattered.span().subspan(static_cast<size_t>(r), 1);
    EXPECT_OK(comm.ReduceScatter<int32_t>(scattered.span(), mine, ReduceOp::kSum, stream));
    const auto roots = device.Copy<int32_t>({r, r});
    EXPECT_OK(comm.Broadcast<int32_t>(roots.span(), 2, stream));
    EXPECT_THAT(device.Read(all), ElementsAre(0, 1, 2));
    const std::vector<int> sums = {3, 30, 300};
    EXPECT_EQ(device.Read(scattered)[static_cast<size_t>(r)], sums[static_cast<size_t>(r)]);
    EXPECT_THAT(device.Read(roots), ElementsAre(2, 2));
  });
}

// Rank r sends r + 1 elements to each, nothing to rank 1.
TEST(NcclDeviceTest, AllToAllVOfUnequalParts) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    const int r = comm.rank();
    std::vector<float> values(static_cast<size_t>(2 * (r + 1)));
    std::iota(values.begin(), values.end(), 10.0f * static_cast<float>(r));
    const auto send = device.Copy(values);
    const auto recv = device.Copy(std::vector<float>(r == 1 ? 0 : 6));
    const std::vector<int64_t> out = {r + 1, 0, r + 1};
    const std::vector<int64_t> in =
        r == 1 ? std::vector<int64_t>{0, 0, 0} : std::vector<int64_t>{1, 2, 3};
    EXPECT_OK(comm.AllToAllV<float>(send.span(), out, recv.span(), in, device.stream()));
    const std::vector<float> expected[kRanks] = {
        {0, 10, 11, 20, 21, 22}, {}, {1, 12, 13, 23, 24, 25}};
    EXPECT_EQ(device.Read(recv), expected[r]);
  });
}

TEST(NcclDeviceTest, SendRecvMatchesInOrderAndReachesItself) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    const int r = comm.rank(), next = (r + 1) % kRanks, previous = (r + kRanks - 1) % kRanks;
    const auto from = device.Copy<int32_t>({10 * r, 10 * r + 1, 10 * r + 2});
    const auto to = device.Copy<int32_t>({-1, -1, -1});
    int32_t *const out = from.span().data(), *const in = to.span().data();
    const SendRecvOp ops[] = {{.peer = next, .send = out, .bytes = 4},
                              {.peer = next, .send = out + 1, .bytes = 4},
                              {.peer = previous, .recv = in, .bytes = 4},
                              {.peer = previous, .recv = in + 1, .bytes = 4},
                              {.peer = r, .send = out + 2, .bytes = 4},
                              {.peer = r, .recv = in + 2, .bytes = 4},
                              {.peer = next, .bytes = 0}};
    EXPECT_OK(comm.SendRecv(ops, device.stream()));
    EXPECT_THAT(device.Read(to), ElementsAre(10 * previous, 10 * previous + 1, 10 * r + 2));
  });
}

// large + 1 is not a T: NCCL's own sum, rounded at every rank, would lose the ones.
template <typename T>
void ExpectSummedInFloat32(Communicator& comm, const TestDevice& device, float large) {
  const T mine(comm.rank() == 0 ? large : 1.0f);
  const auto x = device.Copy<T>({mine, mine, mine});
  const auto parts = device.Copy<T>({mine, mine, mine});
  const auto own = device.Copy<T>({T()});
  EXPECT_OK(comm.AllReduce<T>(x.span(), ReduceOp::kSum, device.stream()));
  EXPECT_OK(comm.ReduceScatter<T>(parts.span(), own.span(), ReduceOp::kSum, device.stream()));
  EXPECT_THAT(device.Read(x), Each(T(large + 2)));
  EXPECT_THAT(device.Read(own), Each(T(large + 2)));
}

TEST(NcclDeviceTest, NarrowTypesAreSummedInFloat32AndRoundedOnce) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    ExpectSummedInFloat32<BFloat16>(comm, device, 256);
    ExpectSummedInFloat32<Float16>(comm, device, 2048);
  });
}

TEST(NcclDeviceTest, GroupsWorkOnStreamsOfTheirOwn) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    const auto other = comm.Split(0, -comm.rank()).value();
    EXPECT_EQ(other->rank(), kRanks - 1 - comm.rank());
    const TestDevice second({DeviceKind::kCuda, comm.rank()});
    const auto a = device.Copy<int32_t>({1, 2}), b = second.Copy<int32_t>({3, 4});
    for (int i = 0; i < 3; ++i) {
      EXPECT_OK(comm.AllReduce<int32_t>(a.span(), ReduceOp::kSum, device.stream()));
      EXPECT_OK(other->AllReduce<int32_t>(b.span(), ReduceOp::kSum, second.stream()));
    }
    EXPECT_THAT(second.Read(b), ElementsAre(81, 108));
    EXPECT_THAT(device.Read(a), ElementsAre(27, 54));
    EXPECT_OK(comm.Barrier());
  });
}

TEST(NcclDeviceTest, HostAndDeviceMemoryTakeTurns) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    const auto host = MakeInlineStream();
    for (int i = 0; i < 3; ++i) {
      std::vector<int64_t> counts(kRanks);
      const std::vector<int64_t> mine = {comm.rank() + i};
      const auto x = device.Copy<int64_t>({comm.rank()});
      EXPECT_OK(comm.AllReduce<int64_t>(x.span(), ReduceOp::kSum, device.stream()));
      EXPECT_OK(comm.AllGather<int64_t>(mine, absl::MakeSpan(counts), *host));
      EXPECT_THAT(counts, ElementsAre(i, i + 1, i + 2));
      EXPECT_THAT(device.Read(x), ElementsAre(3));
    }
  });
}

TEST(NcclDeviceTest, TheRingSumsToo) {
  OnSeeds([](Communicator& comm, const TestDevice& device) {
    for (const auto algorithm : {AllReduceAlgorithm::kRing, AllReduceAlgorithm::kLibrary}) {
      const auto x = device.Copy<float>({1, static_cast<float>(comm.rank()), 3, 4});
      const auto reducer = AllReducer::Create(algorithm, comm).value();
      EXPECT_OK(reducer->Sum(x.span(), device.stream()));
      EXPECT_THAT(device.Read(x), ElementsAre(3, 3, 9, 12));
    }
  });
}

TEST(NcclDeviceTest, AllocatesNothingAfterTheFirstTime) {
  OnNcclRanks({.ranks = 1}, [](Communicator& comm, const TestDevice& device) {
    const auto host = MakeInlineStream();
    const auto x = device.Copy(std::vector<BFloat16>(100));
    std::vector<float> y(100);
    int64_t before = 0;
    for (int i = 0; i < 3; ++i) {
      if (i == 1) before = cusim::DeviceAllocations();
      EXPECT_OK(comm.AllReduce<BFloat16>(x.span(), ReduceOp::kSum, device.stream()));
      EXPECT_OK(comm.AllReduce<float>(absl::MakeSpan(y), ReduceOp::kSum, *host));
      EXPECT_OK(device.stream().Synchronize());
    }
    EXPECT_EQ(cusim::DeviceAllocations(), before);
  });
}

TEST(NcclDeviceTest, AStreamOfAnotherDeviceIsRefused) {
  OnNcclRanks({.ranks = 2}, [](Communicator& comm, const TestDevice& device) {
    const TestDevice other({DeviceKind::kCuda, 1 - comm.rank()});
    const auto x = other.Copy<float>({1});
    const absl::Status status = comm.AllReduce<float>(x.span(), ReduceOp::kSum, other.stream());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected this rank's"));
    const auto own = device.Copy<float>({1});
    EXPECT_OK(comm.AllReduce<float>(own.span(), ReduceOp::kSum, device.stream()));
    EXPECT_THAT(device.Read(own), ElementsAre(2));
    EXPECT_FALSE(comm.has_peer_memory(DeviceKind::kCuda));
  });
}

}  // namespace
}  // namespace moe
