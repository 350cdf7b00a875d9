// One micro-batch of a rank in a step or an evaluation.
#ifndef MOE_MOE_RUN_ROUND_H_
#define MOE_MOE_RUN_ROUND_H_

#include <cstdint>

namespace moe {

// One round of a step: a micro-batch of this rank, or none, for which the rank joins the exchanges
// with zero rows. Workspace memory taken in a round is given back when the next round begins.
class Round {
 public:
  Round() = default;
  // number: that among all rounds of whoever runs them.
  Round(int64_t micro_batch, int64_t index, int64_t step, uint64_t number)
      : micro_batch_(micro_batch), index_(index), step_(step), number_(number) {}

  bool empty() const { return micro_batch_ < 0; }
  // Index of the micro-batch among the global batch's M; -1: none.
  int64_t micro_batch() const { return micro_batch_; }
  int64_t index() const { return index_; }  // index in the step or evaluation, from 0
  int64_t step() const { return step_; }    // from 1
  uint64_t number() const { return number_; }

 private:
  int64_t micro_batch_ = -1, index_ = 0, step_ = 0;
  uint64_t number_ = 0;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_ROUND_H_
