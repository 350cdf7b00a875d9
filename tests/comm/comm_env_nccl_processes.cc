#include <cstdlib>

#include <absl/time/time.h>
#include <gtest/gtest.h>

#include "comm/bootstrap.h"
#include "comm/nccl/nccl_store.h"
#include "kernels/base/cuda_devices.h"
#include "tests/comm/comm_env.h"

namespace moe::testing {
namespace {

// This process is one rank of those that scripts/nccl_one_gpu.sh or torchrun started; on machines
// without a GPU or NCCL it skips. Every rank prints and fails on its own; the script fails if one
// does.
class NcclProcessEnv final : public CommEnv, public ::testing::Environment {
 public:
  void SetUp() override {
    const auto launch = DetectLaunch({}, [](const char* name) { return std::getenv(name); });
    ASSERT_TRUE(launch.ok()) << launch.status();
    ASSERT_EQ(launch->source, LaunchSource::kTorchrun)
        << "started by hand, not as one of several ranks";
    launch_ = *launch;
    PrepareForNccl();
    const auto gpus = CudaDeviceCount();
    if (!gpus.ok()) GTEST_SKIP() << "no GPU: " << gpus.status().message();
    if (const auto nccl = NcclVersion(); !nccl.ok()) GTEST_SKIP() << "no NCCL: " << nccl.status();
    device_ = launch_.local_rank % *gpus;
  }

  const char* name() const override { return "nccl"; }
  int max_ranks() const override { return launch_.size; }
  bool wakes_peers() const override { return false; }
  bool compares_sizes() const override { return false; }
  bool sees_progress() const override { return false; }
  // Every run is a world of its own, which meets at a port of its own.
  void Run(int ranks, absl::Duration timeout, EnvStream kind,
           absl::FunctionRef<void(Communicator&, Stream&)> body) override {
    ++runs_;
    if (launch_.rank >= ranks) return;
    const char* const secret = std::getenv("MOE_NCCL_SECRET");
    const auto comm = JoinNcclByTcp({.rank = launch_.rank,
                                     .size = ranks,
                                     .device = device_,
                                     .timeout = timeout,
                                     .join_timeout = absl::Seconds(60)},
                                    {.host = launch_.address,
                                     .port = launch_.port + runs_,
                                     .secret = secret == nullptr ? "" : secret})
                          .value();
    const auto stream = MakeEnvStream(kind);
    body(*comm, *stream);
  }

 private:
  LaunchInfo launch_;
  int device_ = 0;
  int runs_ = 0;
};

NcclProcessEnv* const env = [] {
  auto* made = new NcclProcessEnv;
  ::testing::AddGlobalTestEnvironment(made);  // gtest owns it
  return made;
}();

}  // namespace

CommEnv& Env() {
  return *env;
}

}  // namespace moe::testing
