// Ranks of the backend nccl as threads of a test, each with a simulated device and a stream of its
// own.
#ifndef MOE_TESTS_COMM_NCCL_RANKS_H_
#define MOE_TESTS_COMM_NCCL_RANKS_H_

#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include <absl/time/time.h>
#include <gtest/gtest.h>

#include "comm/local/local_group.h"
#include "comm/nccl/nccl_world.h"
#include "tests/cusim/fake_nccl.h"
#include "tests/cusim/fake_streams.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {

enum class Fates : uint8_t {
  kShared,  // as threads of one process: one's failure ends the waits of all
  kOwn,     // as processes: a failure elsewhere is a deadline here
};

struct NcclRanks {
  int ranks = 3;
  absl::Duration timeout = absl::Seconds(30);
  absl::Duration join_timeout = absl::Seconds(60);
  Fates fates = Fates::kShared;
  int absent = -1;  // this rank never comes
  uint32_t seed = 1;
};

using NcclBody = std::function<void(absl::StatusOr<std::unique_ptr<Communicator>>, int rank)>;

// body(communicator, rank) on every rank that is not absent. What is left alive is a failure, and
// so is a call of NCCL from a thread of another device.
inline void RunNcclRanks(const NcclRanks& options, const NcclBody& body) {
  cusim::Machine with_devices = cusim::TheMachine();
  with_devices.devices = options.ranks;
  const cusim::ScopedMachine machine(with_devices);
  cusim::SeedStreams(options.seed);
  const NcclId id = MakeNcclId().value();
  const int64_t from_other_devices = cusim::NcclCallsFromOtherDevices();
  const auto shared = std::make_shared<LocalFate>();
  std::vector<std::thread> threads;
  for (int r = 0; r < options.ranks; ++r) {
    if (r == options.absent) continue;
    threads.emplace_back([&, r] {
      body(MakeNcclCommunicator({.id = id,
                                 .rank = r,
                                 .size = options.ranks,
                                 .device = r,
                                 .timeout = options.timeout,
                                 .join_timeout = options.join_timeout,
                                 .fate = options.fates == Fates::kShared ? shared : nullptr}),
           r);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(cusim::NcclCommunicators(), 0);
  EXPECT_EQ(cusim::NcclCallsFromOtherDevices(), from_other_devices);
}

// The same with a stream of the rank's device. No body starts before all ranks have joined: one
// that fails at once would stop a peer inside the meeting.
inline void OnNcclRanks(const NcclRanks& options,
                        const std::function<void(Communicator&, const TestDevice&)>& body) {
  std::latch joining(options.ranks - (options.absent >= 0 ? 1 : 0));
  RunNcclRanks(options, [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int rank) {
    const TestDevice device({DeviceKind::kCuda, rank});
    joining.arrive_and_wait();
    ASSERT_TRUE(comm.ok()) << comm.status();
    body(**comm, device);
  });
}

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_NCCL_RANKS_H_
