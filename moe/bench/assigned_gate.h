// A gate whose choices are given beforehand, so that a layer moves what a benchmark wants moved.
#ifndef MOE_MOE_BENCH_ASSIGNED_GATE_H_
#define MOE_MOE_BENCH_ASSIGNED_GATE_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "gating/router_config.h"
#include "moe/bench/slots.h"

namespace moe::bench {

// The slots of one rank's next call. The gate does the work of mixtral's (softmax, top-k, counts),
// then puts the given experts in the place of the ones that it found: weights are their
// probabilities, divided by their sum, and gradients flow accordingly.
// What comes after a gate (capacity, drops, losses) is the router's as ever.
//
// Gates of RouterConfig are known by name to the whole process, ranks of threads included, so an
// assignment is found through the seed of the configuration. Alive as long as layers use it.
class AssignedGate {
 public:
  // most_slots: of a token, in any call.
  AssignedGate(TokenSlots slots, int32_t most_slots);
  ~AssignedGate();
  AssignedGate(const AssignedGate&) = delete;
  AssignedGate& operator=(const AssignedGate&) = delete;

  // Makes `config` name this gate.
  void Choose(RouterConfig& config) const;
  // Of calls from now on. Not while one runs, nor between its forward and its backward.
  void Assign(TokenSlots slots) { given_->slots = std::move(slots); }
  // Tokens that a batch must have.
  int64_t tokens() const { return given_->slots.tokens(); }

  struct Given {
    TokenSlots slots;
    int32_t most_slots = 1;
  };

 private:
  const std::shared_ptr<Given> given_;  // layers hold it too
  uint64_t id_ = 0;
};

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_ASSIGNED_GATE_H_
