// The unit of the exact grid that a run's gradients add up on (docs/architecture.md, numerics
// contract).
#ifndef MOE_MOE_TRAIN_GRID_UNIT_H_
#define MOE_MOE_TRAIN_GRID_UNIT_H_

#include <cstdint>
#include <optional>

#include "kernels/exact_sum/exact_sum.h"
#include "moe/train/gradient_norm.h"

namespace moe {

// Units are within 2^-this and 2^this: partials of float32, times any loss scale, ask for no other.
constexpr int kMostGridUnitLog2 = 300;

// log2 of the smallest unit on which max_terms terms of 2^headroom_log2 times `largest` add up.
// largest > 0, finite.
int GridUnitLog2(float largest, int64_t max_terms, int headroom_log2);

// Follows the gradients of a run. They are the same on every rank, and so is the unit, without
// exchange.
class GridUnit {
 public:
  // Growth of gradients from step to step that the unit has room for, where it was chosen; and how
  // much the default must have to stay.
  static constexpr int kHeadroomLog2 = 20, kLeastHeadroomLog2 = 4;

  // given: it stays. Otherwise the default holds for the first step.
  explicit GridUnit(std::optional<int> given) : stays_(given.has_value()) {
    if (given.has_value()) state_.log2 = *given;
  }

  // What a run resumes with.
  struct State {
    int log2 = ExactGrid().unit_log2;
    bool settled = false;  // a step's gradients have fitted
  };
  const State& state() const { return state_; }
  void Restore(const State& state) { state_ = state; }
  bool stays() const { return stays_; }

  // After a step: sets the unit of the following steps. The first gradients that fit the grid
  // decide: where the grid loss of a tensor is above kNamedGridLoss, the unit becomes as fine as
  // kHeadroomLog2 allows, if that is finer; where gradients come near the grid's limit, as coarse.
  // Later a partial off the grid lets the unit grow, and the next gradients that fit decide again.
  void Follow(const GradientNorm& norm, int64_t max_terms);

 private:
  const bool stays_;
  State state_;
};

}  // namespace moe

#endif  // MOE_MOE_TRAIN_GRID_UNIT_H_
