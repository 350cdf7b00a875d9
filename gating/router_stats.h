// What a call of the router measured.
#ifndef MOE_GATING_ROUTER_STATS_H_
#define MOE_GATING_ROUTER_STATS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "gating/router_check.h"
#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"

namespace moe {

// As the stream's device sums it up. All bits 0: nothing yet.
struct RouterMeasures {
  double aux_loss, z_loss, entropy_sum;
  int64_t dropped_slots;
  int64_t bad_logit;  // AddEntropy's
};

// Load measures and losses of one call, over the tokens of this rank. A Forward on a CUDA device
// does not wait for them: before Wait the reals are NaN and the counts -1. Move-only.
struct RouterStats {
  double aux_loss = 0;  // sum over micro-batches of the balance losses, coefficient in
  double z_loss = 0;    // likewise
  double loss() const { return aux_loss + z_loss; }
  double entropy_sum = 0;             // sum over tokens of the entropy of p, nats
  std::vector<int64_t> expert_count;  // [E] slots routed to each expert, dropped ones included
  int64_t dropped_slots = 0;

  // The values are there when it returns. On a CUDA device the first call blocks the host until the
  // stream has passed the call's router; elsewhere they are there at once. Every call returns the
  // same: kDataLoss, naming layer, token and expert, for a logit that is not finite; errors of the
  // stream. Check it before weights move by what the call computed.
  absl::Status Wait();

  // The router's: takes the measures and the count [E], memory of the stream's device. Enqueues on
  // a CUDA device, where this object may go at any time and then waits; blocks on a CPU.
  absl::Status Take(const RouterMeasures* measures, absl::Span<const int64_t> count,
                    const LogitPlace& place, Stream& stream);

 private:
  // The measures, then the counts, on their way to pinned memory.
  struct Arrival {
    Arrival() = default;
    Arrival(const Arrival&) = delete;
    Arrival& operator=(const Arrival&) = delete;
    ~Arrival() { Wait().IgnoreError(); }
    absl::Status Wait();

    Buffer memory;
    Event passed;  // none: it has been waited for
  };
  void Fill(const RouterMeasures& measures, absl::Span<const int64_t> count);

  LogitPlace place_;
  absl::Status status_;
  std::unique_ptr<Arrival> arrival_;  // null until a call on a CUDA device
};

}  // namespace moe

#endif  // MOE_GATING_ROUTER_STATS_H_
