// A communicator that hands every call to another one: what communicators with a twist start from,
// such as one whose rank dies, for tests of what the others do.
#ifndef MOE_TESTS_COMM_FORWARDING_COMMUNICATOR_H_
#define MOE_TESTS_COMM_FORWARDING_COMMUNICATOR_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/time/clock.h>

#include "comm/communicator.h"
#include "kernels/base/status_macros.h"

namespace moe::testing {

// Without peer memory. Groups that are split off are those of `inner`, unless Wrap says otherwise.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> inner)
      : owned_(std::move(inner)), inner_(owned_.get()) {}
  explicit ForwardingCommunicator(Communicator& inner) : inner_(&inner) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::string_view backend() const override { return inner_->backend(); }
  absl::Duration timeout() const override { return inner_->timeout(); }
  int64_t lingered_ns() const override { return inner_->lingered_ns(); }
  std::optional<Device> device() const override { return inner_->device(); }
  bool moves(DeviceKind kind) const override { return inner_->moves(kind); }
  void Abort(absl::Status reason) override { inner_->Abort(std::move(reason)); }

 protected:
  // The twist. Before a collective in `stream`, of which this rank sends `bytes` to others.
  virtual absl::Status Before(int64_t /*bytes*/, Stream& /*stream*/, const Site& /*site*/) {
    return absl::OkStatus();
  }
  // Before a call that blocks the host.
  virtual absl::Status BeforeMeeting() { return absl::OkStatus(); }
  virtual std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) { return part; }

  absl::Status DoCollective(CollectiveCall call, Stream& stream) override {
    MOE_RETURN_IF_ERROR(Before(BytesToOthers(call), stream, call.site));
    return inner_->Collect(std::move(call), stream);
  }
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) override {
    int64_t sent = 0;
    for (const SendRecvOp& op : ops) sent += op.send != nullptr ? op.bytes : 0;
    MOE_RETURN_IF_ERROR(Before(sent, stream, site));
    return inner_->SendRecv(ops, stream, site);
  }
  absl::Status DoFence(Stream& stream, const Site& site) override {
    MOE_RETURN_IF_ERROR(Before(0, stream, site));
    return inner_->Fence(stream, site);
  }
  absl::Status DoBarrier() override {
    MOE_RETURN_IF_ERROR(BeforeMeeting());
    return inner_->Barrier();
  }
  absl::StatusOr<std::unique_ptr<Communicator>> DoSplit(int color, int key) override {
    MOE_RETURN_IF_ERROR(BeforeMeeting());
    MOE_ASSIGN_OR_RETURN(auto part, inner_->Split(color, key));
    if (part == nullptr) return part;
    return Wrap(std::move(part));
  }

 private:
  int64_t BytesToOthers(const CollectiveCall& call) const {
    const auto bytes = static_cast<int64_t>(call.send.size());
    switch (call.kind) {
      case CollectiveKind::kAllReduce:
        return 2 * bytes * (size() - 1) / size();
      case CollectiveKind::kAllGather:
      case CollectiveKind::kAllGatherV:
        return bytes * (size() - 1);
      case CollectiveKind::kBroadcast:
        return bytes;
      default:
        return bytes - call.send_counts[rank()];
    }
  }

  const std::unique_ptr<Communicator> owned_;
  Communicator* const inner_;
};

// How one rank dies, as all of its communicators know it.
struct Death {
  // Asked before every collective in a stream while the rank lives; any of its threads.
  std::function<bool(const Site&)> comes;
  std::atomic<bool> dead{false};
  std::atomic<int64_t> at_ns{0};  // absl::GetCurrentTimeNanos
};

// One that never comes, but adds to `phases` those in which its rank meets others in `step`.
inline std::shared_ptr<Death> NotePhases(int64_t step, std::vector<std::string>& phases) {
  auto death = std::make_shared<Death>();
  death->comes = [step, &phases, mu = std::make_shared<std::mutex>()](const Site& at) {
    const std::lock_guard<std::mutex> lock(*mu);
    const bool known = std::find(phases.begin(), phases.end(), at.name) != phases.end();
    if (at.step == step && !known) phases.emplace_back(at.name);
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
  absl::Status Before(int64_t /*bytes*/, Stream& stream, const Site& site) override {
    if (!death_->dead && death_->comes(site)) {
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

#endif  // MOE_TESTS_COMM_FORWARDING_COMMUNICATOR_H_
