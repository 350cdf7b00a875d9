// A communicator whose transfers take a known time: for tests that show overlap.
#ifndef MOE_TESTS_COMM_DELAY_COMMUNICATOR_H_
#define MOE_TESTS_COMM_DELAY_COMMUNICATOR_H_

#include <functional>
#include <memory>
#include <utility>

#include <absl/time/clock.h>
#include <absl/time/time.h>

#include "tests/comm/forwarding_communicator.h"

namespace moe::testing {

// Before each transfer the stream sleeps delay(bytes this rank sends). The thread sleeps, so a
// transfer costs time but no processor.
class DelayCommunicator final : public ForwardingCommunicator {
 public:
  using Delay = std::function<absl::Duration(int64_t bytes)>;

  DelayCommunicator(std::unique_ptr<Communicator> inner, Delay delay)
      : ForwardingCommunicator(std::move(inner)), delay_(std::move(delay)) {}

 private:
  absl::Status Before(int64_t bytes, Stream& stream) override {
    if (bytes == 0) return absl::OkStatus();
    return stream.Enqueue([time = delay_(bytes)] {
      absl::SleepFor(time);
      return absl::OkStatus();
    });
  }
  std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) override {
    return std::make_unique<DelayCommunicator>(std::move(part), delay_);
  }

  const Delay delay_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_DELAY_COMMUNICATOR_H_
