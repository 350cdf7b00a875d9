#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/local/local_group.h"
#include "comm/nccl/nccl_world.h"
#include "tests/comm/comm_env.h"
#include "tests/cusim/fake_nccl.h"
#include "tests/cusim/fake_streams.h"

namespace moe::testing {
namespace {

// Sanitizers find with four ranks what they find with eight, which take them minutes.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kMostRanks = 4;
#else
constexpr int kMostRanks = 8;
#endif

// Ranks are threads, each with a simulated device of its own. What tests hand over lies in memory
// of the host; it goes through the devices.
class NcclEnv final : public CommEnv {
 public:
  const char* name() const override { return "nccl"; }
  int max_ranks() const override { return kMostRanks; }
  bool wakes_peers() const override { return true; }
  bool compares_sizes() const override { return false; }
  bool sees_progress() const override { return false; }
  void Run(int ranks, absl::Duration timeout, EnvStream kind,
           absl::FunctionRef<void(Communicator&, Stream&)> body) override {
    const cusim::ScopedMachine machine({.devices = kMostRanks});
    // Where NCCL is told counts that differ, it may wait for ever.
    const cusim::ScopedNccl nccl({.mismatch_hangs = true});
    const NcclId id = MakeNcclId().value();
    const auto fate = std::make_shared<LocalFate>();
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        const auto comm = MakeNcclCommunicator({.id = id,
                                                .rank = r,
                                                .size = ranks,
                                                .device = r,
                                                .timeout = timeout,
                                                .join_timeout = absl::Seconds(60),
                                                .fate = fate})
                              .value();
        const auto stream = MakeEnvStream(kind);
        body(*comm, *stream);
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(cusim::NcclCommunicators(), 0);
  }
};

}  // namespace

CommEnv& Env() {
  static NcclEnv env;
  return env;
}

}  // namespace moe::testing
