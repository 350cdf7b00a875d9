#include "moe/run/turns.h"

#include "kernels/base/caught.h"

namespace moe {

absl::StatusOr<std::unique_ptr<Turns>> Turns::Create() {
  auto turns = std::make_unique<Turns>();
  MOE_ASSIGN_OR_RETURN(turns->second_, MakeStream({.kind = DeviceKind::kCpu}));
  return turns;
}

absl::Status Turns::Run(absl::FunctionRef<absl::Status()> first,
                        absl::FunctionRef<absl::Status()> second,
                        absl::FunctionRef<void(const absl::Status&)> failed) {
  absl::Status error;
  const auto run = [&](int body, absl::FunctionRef<absl::Status()> passes) {
    const absl::Status status = Caught(passes);
    if (!status.ok() && error.ok()) {
      error = status;
      failed(status);
    }
    End(body);
  };
  Start(true);
  const absl::Status enqueued = second_->Enqueue([&] {
    Await(1);
    run(1, second);
    return absl::OkStatus();
  });
  if (!enqueued.ok()) {
    Start(false);
    return enqueued;
  }
  run(0, first);
  MOE_RETURN_IF_ERROR(second_->Synchronize());
  return error;
}

void Turns::Yield() {
  std::unique_lock<std::mutex> lock(mu_);
  const int mine = turn_, other = 1 - mine;
  if (ended_[other]) return;
  turn_ = other;
  changed_.notify_all();
  changed_.wait(lock, [&] { return turn_ == mine; });
}

void Turns::Start(bool runs) {
  const std::lock_guard<std::mutex> lock(mu_);
  turn_ = 0;
  ended_[0] = ended_[1] = !runs;
}

void Turns::Await(int body) {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [&] { return turn_ == body; });
}

void Turns::End(int body) {
  const std::lock_guard<std::mutex> lock(mu_);
  ended_[body] = true;
  turn_ = 1 - body;
  changed_.notify_all();
}

}  // namespace moe
