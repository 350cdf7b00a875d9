#include "comm/nccl/nccl_rank.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "comm/nccl/nccl_lane.h"
#include "kernels/base/caught.h"

namespace moe {
namespace {

// Between looks at operations under way: a fraction of the deadline, but never busy.
std::chrono::nanoseconds TickFor(absl::Duration timeout) {
  return absl::ToChronoNanoseconds(
      std::clamp(timeout / 50, absl::Milliseconds(1), absl::Milliseconds(20)));
}

// Why the calls of one rank fail once the world is dead.
class NcclGuard final : public StreamGuard {
 public:
  NcclGuard(std::shared_ptr<LocalFate> fate, int world_rank)
      : fate_(std::move(fate)), world_rank_(world_rank) {}
  absl::Status status() override {
    return fate_->dead() ? fate_->StatusOf(world_rank_) : absl::OkStatus();
  }

 private:
  const std::shared_ptr<LocalFate> fate_;
  const int world_rank_;
};

}  // namespace

NcclRank::NcclRank(const NcclApi& api, int device, int world_rank, absl::Duration timeout,
                   int stream_lane_blocks, std::shared_ptr<LocalFate> fate)
    : api_(api),
      device_(device),
      world_rank_(world_rank),
      timeout_(timeout),
      stream_lane_blocks_(stream_lane_blocks),
      fate_(std::move(fate)),
      guard_(std::make_shared<NcclGuard>(fate_, world_rank)),
      thread_([this] { Watch(); }) {}

NcclRank::~NcclRank() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

absl::Status NcclRank::Kill(absl::Status reason) {
  fate_->Kill(world_rank_, std::move(reason));
  {
    const std::lock_guard<std::mutex> lock(mu_);
    killed_ = true;
  }
  changed_.notify_all();
  return status();
}

void NcclRank::Add(NcclLane* lane) {
  const std::lock_guard<std::mutex> lock(mu_);
  lanes_.push_back(lane);
}

void NcclRank::Remove(NcclLane* lane) {
  const std::lock_guard<std::mutex> lock(mu_);
  lanes_.erase(std::find(lanes_.begin(), lanes_.end(), lane));
}

void NcclRank::Wake() {
  if (busy_.exchange(true)) return;
  const std::lock_guard<std::mutex> lock(mu_);
  changed_.notify_all();
}

// Whether anything is under way. `lock` is of mu_, held but for the waits for aborts.
bool NcclRank::LookAtLanes(std::unique_lock<std::mutex>& lock) {
  bool any = false;
  for (NcclLane* const lane : lanes_) {
    if (dead()) break;
    absl::Status status = Caught([&] { return lane->Look(&any); });
    if (!status.ok()) fate_->Kill(world_rank_, std::move(status));
  }
  if (!dead()) return any;
  // All at once: ncclCommAbort waits for the streams that its work is in, where another lane's work
  // may be stuck before it.
  for (NcclLane* const lane : lanes_) lane->handle()->BeginAbort();
  std::vector<std::shared_ptr<NcclHandle>> aborts;  // lanes may end meanwhile
  Caught([&] {
    for (NcclLane* const lane : lanes_) aborts.push_back(lane->handle());
    return absl::OkStatus();
  }).IgnoreError();
  lock.unlock();
  for (const auto& abort : aborts) abort->AwaitAbort(timeout_);
  lock.lock();
  return false;
}

void NcclRank::Watch() {
  // Else this thread's calls, and those of NCCL inside them, would be of device 0. Without it every
  // later call of the rank fails, too, with the reason.
  (void)cudaSetDevice(device_);
  const auto tick = TickFor(timeout_);
  std::unique_lock<std::mutex> lock(mu_);
  while (!stopping_) {
    killed_ = false;
    // In this order: who enqueues behind the look finds busy_ unset, and wakes this thread.
    busy_.store(false);
    if (LookAtLanes(lock)) {
      busy_.store(true);
      changed_.wait_for(lock, tick, [this] { return stopping_ || killed_; });
    } else {
      changed_.wait(lock, [this] { return stopping_ || killed_ || busy_.load(); });
    }
  }
}

}  // namespace moe
