// A communicator whose rank dies: for tests of what the others do.
#ifndef MOE_TESTS_COMM_DYING_COMMUNICATOR_H_
#define MOE_TESTS_COMM_DYING_COMMUNICATOR_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <absl/time/clock.h>

#include "tests/comm/forwarding_communicator.h"

namespace moe::testing {

// How one rank dies, as all of its communicators know it.
struct Death {
  // Asked before every collective in a stream while the rank lives; any of its threads.
  std::function<bool(const CommPhase&)> comes;
  std::atomic<bool> dead{false};
  std::atomic<int64_t> at_ns{0};  // absl::GetCurrentTimeNanos
};

// One that never comes, but adds to `phases` those in which its rank meets others in `step`.
inline std::shared_ptr<Death> NotePhases(int64_t step, std::vector<std::string>& phases) {
  auto death = std::make_shared<Death>();
  death->comes = [step, &phases, mu = std::make_shared<std::mutex>()](const CommPhase& at) {
    const std::lock_guard<std::mutex> lock(*mu);
    const std::string name = at.name == nullptr ? "" : at.name;
    const bool known = std::find(phases.begin(), phases.end(), name) != phases.end();
    if (at.step == step && !known) phases.push_back(name);
    return false;
  };
  return death;
}

// From the collective on at which death comes nothing is called any more, as if the process were
// gone.
class DyingCommunicator final : public ForwardingCommunicator {
 public:
  DyingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Death> death)
      : ForwardingCommunicator(std::move(inner)), death_(std::move(death)) {}

 private:
  absl::Status Before(int64_t /*bytes*/, Stream& stream) override {
    if (!death_->dead && death_->comes(phase())) {
      MOE_RETURN_IF_ERROR(stream.Synchronize());  // what came before it still happened
      death_->at_ns = absl::GetCurrentTimeNanos();
      death_->dead = true;
    }
    return BeforeMeeting();
  }
  absl::Status BeforeMeeting() override {
    return death_->dead ? absl::AbortedError("this rank is dead") : absl::OkStatus();
  }
  std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) override {
    return std::make_unique<DyingCommunicator>(std::move(part), death_);
  }

  const std::shared_ptr<Death> death_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_DYING_COMMUNICATOR_H_
