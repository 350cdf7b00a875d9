// Collectives of the backend nccl in streams of CUDA devices, over their memory: the contract of
// comm_contract_test.cc, which hands over memory of the host, holds for them too.
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/device_collectives.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/cusim/fake_memory.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::OnNcclRanks;
using testing::TestDevice;

constexpr int kRanks = testing::kDeviceRanks;
constexpr uint32_t kSeeds = 5;

void OnSeeds(const std::function<void(Communicator&, const TestDevice&)>& body) {
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    OnNcclRanks({.ranks = kRanks, .seed = seed}, body);
  }
}

TEST(NcclDeviceTest, CollectivesAreThoseOfEveryBackend) {
  OnSeeds(std::bind_front(testing::ExpectDeviceCollectives, AllReduceAlgorithm::kLibrary));
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
