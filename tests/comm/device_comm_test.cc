// Collectives of a backend that knows the host's memory alone, over memory of a CUDA device.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/communicator.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "tests/comm/device_collectives.h"
#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

using testing::DeviceArray;
using ::testing::ElementsAre;
using testing::TestDevice;

constexpr int kRanks = testing::kDeviceRanks;

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

TEST_F(DeviceCommTest, CollectivesAreThoseOfEveryBackend) {
  OnRanks([](Communicator& comm, const TestDevice& device) {
    testing::ExpectDeviceCollectives(AllReduceAlgorithm::kDirect, comm, device);
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
