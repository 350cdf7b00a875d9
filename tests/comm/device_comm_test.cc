// Collectives of a backend that knows the host's memory alone, over memory of a CUDA device.
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/all_reduce.h"
#include "comm/communicator.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "tests/comm/local_ranks.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::DeviceArray;
using ::testing::ElementsAre;
using testing::TestDevice;

constexpr int kRanks = 3;

class DeviceCommTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto devices = CudaDevices(); !devices.ok()) GTEST_SKIP() << devices.status();
  }

  using Body = std::function<absl::Status(Communicator&, const TestDevice&)>;
  // Each rank with a stream of its own on one device.
  static void OnRanks(const Body& body) {
    testing::RunLocalRanks(kRanks, [&](std::unique_ptr<Communicator> world) {
      const TestDevice device({DeviceKind::kCuda, 0});
      return body(*world, device);
    });
  }
};

TEST_F(DeviceCommTest, SumsAreThereForTheNextKernelOfTheStream) {
  OnRanks([](Communicator& comm, const TestDevice& device) -> absl::Status {
    const int r = comm.rank();
    const auto sum = device.Copy<int64_t>({r, 10 + r});
    const auto all = device.Copy<int64_t>(std::vector<int64_t>(2 * kRanks));
    MOE_RETURN_IF_ERROR(comm.AllReduce<int64_t>(sum.span(), ReduceOp::kSum, device.stream()));
    MOE_RETURN_IF_ERROR(comm.AllGather<int64_t>(sum.span(), all.span(), device.stream()));
    EXPECT_THAT(device.Read(all), ElementsAre(3, 33, 3, 33, 3, 33));

    const auto mine = device.Copy<float>({-1});
    const auto parts = device.Copy<float>({1, 2, static_cast<float>(r)});
    MOE_RETURN_IF_ERROR(
        comm.ReduceScatter<float>(parts.span(), mine.span(), ReduceOp::kMax, device.stream()));
    EXPECT_THAT(device.Read(mine), ElementsAre(r == 0 ? 1 : 2));
    return absl::OkStatus();
  });
}

TEST_F(DeviceCommTest, InPlaceGatherAndBroadcast) {
  OnRanks([](Communicator& comm, const TestDevice& device) -> absl::Status {
    const int r = comm.rank();
    const auto all = device.Copy<int32_t>({-1, -1, -1});
    const auto block = all.span().subspan(static_cast<size_t>(r), 1);
    MOE_RETURN_IF_ERROR(device.stream().Upload(&r, block.data(), sizeof(int32_t)));
    MOE_RETURN_IF_ERROR(comm.AllGather<int32_t>(block, all.span(), device.stream()));
    EXPECT_THAT(device.Read(all), ElementsAre(0, 1, 2));
    const auto roots = device.Copy<int32_t>({r, r});
    MOE_RETURN_IF_ERROR(comm.Broadcast<int32_t>(roots.span(), 2, device.stream()));
    EXPECT_THAT(device.Read(roots), ElementsAre(2, 2));
    return absl::OkStatus();
  });
}

// Rank r sends r + 1 elements to each, nothing to rank 1.
TEST_F(DeviceCommTest, AllToAllOfUnequalParts) {
  OnRanks([](Communicator& comm, const TestDevice& device) -> absl::Status {
    const int r = comm.rank();
    std::vector<float> values(static_cast<size_t>(2 * (r + 1)));
    std::iota(values.begin(), values.end(), 10.0f * static_cast<float>(r));
    const auto send = device.Copy(values);
    const int64_t received = r == 1 ? 0 : 6;
    const auto recv = device.Copy(std::vector<float>(static_cast<size_t>(received)));
    const std::vector<int64_t> out = {r + 1, 0, r + 1};
    const std::vector<int64_t> in =
        r == 1 ? std::vector<int64_t>{0, 0, 0} : std::vector<int64_t>{1, 2, 3};
    MOE_RETURN_IF_ERROR(comm.AllToAllV<float>(send.span(), out, recv.span(), in, device.stream()));
    const auto got = device.Read(recv);
    const std::vector<float> expected[kRanks] = {
        {0, 10, 11, 20, 21, 22}, {}, {1, 12, 13, 23, 24, 25}};
    EXPECT_EQ(device.Read(recv), expected[r]);
    return comm.Fence(device.stream());
  });
}

TEST_F(DeviceCommTest, PointToPointAndTheRing) {
  OnRanks([](Communicator& comm, const TestDevice& device) -> absl::Status {
    const int r = comm.rank(), next = (r + 1) % kRanks, previous = (r + kRanks - 1) % kRanks;
    const auto send = device.Copy<int32_t>({r}), recv = device.Copy<int32_t>({-1});
    const SendRecvOp ops[] = {
        {.peer = next, .send = send.span().data(), .bytes = sizeof(int32_t)},
        {.peer = previous, .recv = recv.span().data(), .bytes = sizeof(int32_t)}};
    MOE_RETURN_IF_ERROR(comm.SendRecv(ops, device.stream()));
    EXPECT_THAT(device.Read(recv), ElementsAre(previous));

    for (const auto algorithm : {AllReduceAlgorithm::kRing, AllReduceAlgorithm::kDirect}) {
      const auto values = device.Copy<float>({1, static_cast<float>(r), 3, 4});
      MOE_ASSIGN_OR_RETURN(const auto reducer, AllReducer::Create(algorithm, comm));
      MOE_RETURN_IF_ERROR(reducer->Sum(values.span(), device.stream()));
      EXPECT_THAT(device.Read(values), ElementsAre(3, 3, 9, 12));
    }
    return absl::OkStatus();
  });
}

// Every rank writes its part and reads all, twice: what is written over was read before.
absl::Status ReadEachOther(Communicator& comm, const TestDevice& device, PeerBuffer& shared) {
  for (const int32_t round : {100, 200}) {
    const std::vector<int32_t> mine = {comm.rank(), round + comm.rank()};
    MOE_RETURN_IF_ERROR(device.stream().Upload(mine.data(), shared.local().data(), 8));
    MOE_RETURN_IF_ERROR(comm.Fence(device.stream()));
    std::vector<DeviceArray<int32_t>> theirs;  // on this rank's device
    for (int r = 0; r < kRanks; ++r) {
      theirs.push_back(device.Copy<int32_t>({-1, -1, -1}));
      MOE_RETURN_IF_ERROR(
          device.stream().CopyBytes(shared.peer(r), theirs.back().span().data(), 12));
    }
    MOE_RETURN_IF_ERROR(comm.Fence(device.stream()));
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_THAT(device.Read(theirs[r]), ElementsAre(r, round + r, 0));
    }
  }
  return absl::OkStatus();
}

TEST_F(DeviceCommTest, PeerMemoryOfOneDevice) {
  OnRanks([](Communicator& comm, const TestDevice& device) -> absl::Status {
    EXPECT_TRUE(comm.has_peer_memory(DeviceKind::kCuda));
    MOE_ASSIGN_OR_RETURN(const auto shared, comm.AllocatePeerBuffer(64, device.memory()));
    return ReadEachOther(comm, device, *shared);
  });
}

TEST_F(DeviceCommTest, PeerMemoryOfTwoDevices) {
  if (CudaDevices()->size() < 2) GTEST_SKIP() << "one CUDA device";
  testing::RunLocalRanks(kRanks, [](std::unique_ptr<Communicator> comm) {
    const TestDevice device({DeviceKind::kCuda, comm->rank() == 1 ? 1 : 0});
    const auto shared = comm->AllocatePeerBuffer(64, device.memory());
    if (shared.ok()) return ReadEachOther(*comm, device, **shared);
    EXPECT_EQ(shared.status().code(), absl::StatusCode::kUnimplemented) << shared.status();
    return comm->Barrier();  // it is no fault: the group lives
  });
}

TEST_F(DeviceCommTest, NoPeerMemoryOfTheHostAndADevice) {
  testing::RunLocalRanks(kRanks, [](std::unique_ptr<Communicator> comm) {
    const TestDevice device(comm->rank() == 1 ? Device() : Device{DeviceKind::kCuda, 0});
    const absl::Status status = comm->AllocatePeerBuffer(64, device.memory()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(status.message(), "AllocatePeerBuffer: memory of the host and of CUDA devices");
    return comm->Barrier();
  });
}

// What a call refuses it refuses on any stream, before anything is copied.
TEST_F(DeviceCommTest, BadArguments) {
  OnRanks([](Communicator& comm, const TestDevice& device) -> absl::Status {
    const auto send = device.Copy<float>({1, 2}), recv = device.Copy<float>({0});
    EXPECT_EQ(comm.AllGather<float>(send.span(), recv.span(), device.stream()).code(),
              absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
