#include <thread>
#include <vector>

#include "comm/local/local_world.h"
#include "tests/comm/comm_env.h"

namespace moe::testing {
namespace {

class LocalEnv final : public CommEnv {
 public:
  const char* name() const override { return "local"; }
  int max_ranks() const override { return 8; }
  bool wakes_peers() const override { return true; }
  void Run(int ranks, absl::Duration timeout, EnvStream kind,
           absl::FunctionRef<void(Communicator&, Stream&)> body) override {
    auto comms = MakeLocalWorld({.ranks = ranks, .timeout = timeout});
    std::vector<std::thread> threads;
    threads.reserve(comms.size());
    for (auto& comm : comms) {
      threads.emplace_back([&body, &comm, kind] {
        const auto stream = MakeEnvStream(kind);
        body(*comm, *stream);
      });
    }
    for (auto& thread : threads) thread.join();
  }
};

}  // namespace

CommEnv& Env() {
  static LocalEnv env;
  return env;
}

}  // namespace moe::testing
