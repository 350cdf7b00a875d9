// How often a run saves: stalls against work that is done again.
#ifndef MOE_MOE_PLAN_CHECKPOINT_INTERVAL_H_
#define MOE_MOE_PLAN_CHECKPOINT_INTERVAL_H_

#include <cmath>

namespace moe::plan {

// Shares of the time that checkpoints every `interval_s` lose.
struct CheckpointInterval {
  double interval_s = 0;
  double stalled = 0;     // stall / interval
  double done_again = 0;  // half an interval for each failure

  double lost() const { return stalled + done_again; }
};

// The interval that loses least, sqrt(2 stall mtbf), for a stall much shorter than the mean time
// between failures of the whole job. Both are seconds above 0. Young, doi:10.1145/361147.361115.
inline CheckpointInterval BestInterval(double stall_s, double mtbf_s) {
  const double interval = std::sqrt(2 * stall_s * mtbf_s);
  return {
      .interval_s = interval, .stalled = stall_s / interval, .done_again = interval / (2 * mtbf_s)};
}

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_CHECKPOINT_INTERVAL_H_
