#include "tests/comm/comm_env.h"
#include "tests/comm/nccl_ranks.h"

namespace moe::testing {
namespace {

// Ranks are threads, each with a simulated device of its own. What tests hand over lies in memory
// of the host; it goes through the devices.
class NcclEnv final : public CommEnv {
 public:
  const char* name() const override { return "nccl"; }
  // Sanitizers find with four ranks what they find with eight, which take them minutes.
  int max_ranks() const override { return kSanitized ? 4 : 8; }
  bool wakes_peers() const override { return true; }
  bool compares_sizes() const override { return false; }
  bool sees_progress() const override { return false; }
  void Run(int ranks, absl::Duration timeout, EnvStream kind,
           absl::FunctionRef<void(Communicator&, Stream&)> body) override {
    // Where NCCL is told counts that differ, it may wait for ever.
    const cusim::ScopedNccl nccl({.mismatch_hangs = true});
    RunNcclRanks({.ranks = ranks, .timeout = timeout, .seed = ++runs_},
                 [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
                   ASSERT_TRUE(comm.ok()) << comm.status();
                   const auto stream = MakeEnvStream(kind);
                   body(**comm, *stream);
                 });
  }

 private:
  uint32_t runs_ = 0;
};

}  // namespace

CommEnv& Env() {
  static NcclEnv env;
  return env;
}

}  // namespace moe::testing
