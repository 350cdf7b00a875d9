#include "tests/comm/comm_env.h"
#include "tests/comm/local_ranks.h"

namespace moe::testing {
namespace {

class LocalEnv final : public CommEnv {
 public:
  const char* name() const override { return "local"; }
  int max_ranks() const override { return 8; }
  bool wakes_peers() const override { return true; }
  void Run(int ranks, absl::Duration timeout, EnvStream kind,
           absl::FunctionRef<void(Communicator&, Stream&)> body) override {
    RunLocalRanks(
        ranks,
        [&](std::unique_ptr<Communicator> comm) {
          const auto stream = MakeEnvStream(kind);
          body(*comm, *stream);
          return absl::OkStatus();
        },
        timeout);
  }
};

}  // namespace

CommEnv& Env() {
  static LocalEnv env;
  return env;
}

}  // namespace moe::testing
