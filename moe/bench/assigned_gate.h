// A gate whose choices are given beforehand, so that a layer moves what a benchmark wants moved.
#ifndef MOE_MOE_BENCH_ASSIGNED_GATE_H_
#define MOE_MOE_BENCH_ASSIGNED_GATE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "gating/router_config.h"
#include "moe/bench/slots.h"

namespace moe::bench {

// The slots of one rank in each call; of a batch with step s: calls[s mod n]. The gate does the work
// of mixtral's (softmax, top-k, counts), then puts the given experts in the place of the ones that
// it found: weights are their probabilities, divided by their sum, and gradients flow accordingly.
// What comes after a gate (capacity, drops, losses) is the router's as ever.
//
// Gates of RouterConfig are known by name to the whole process, ranks of threads included, so an
// assignment is found through the seed of the configuration. Alive as long as layers use it.
class AssignedGate {
 public:
  explicit AssignedGate(std::vector<TokenSlots> calls);
  ~AssignedGate();
  AssignedGate(const AssignedGate&) = delete;
  AssignedGate& operator=(const AssignedGate&) = delete;

  // Makes `config` name this gate.
  void Choose(RouterConfig& config) const;
  // Slots of a call; tokens that a batch of it must have.
  const TokenSlots& slots(int64_t step) const { return (*calls_)[step % calls()]; }
  int64_t calls() const { return static_cast<int64_t>(calls_->size()); }

 private:
  const std::shared_ptr<const std::vector<TokenSlots>> calls_;
  uint64_t id_ = 0;
};

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_ASSIGNED_GATE_H_
