// How long a pipeline's schedule takes.
#ifndef MOE_MOE_PLAN_PIPELINE_TIME_H_
#define MOE_MOE_PLAN_PIPELINE_TIME_H_

#include <cstdint>
#include <map>
#include <tuple>

#include "moe/pipeline/schedule.h"

namespace moe::plan {

// Of one micro-batch in one chunk of layers, in any unit.
struct OpTimes {
  double forward = 1;
  double backward = 2;  // all of it; with zero bubble half of it is the weight gradients
  double hop = 0;       // from the end of an operation to the rows' arrival on another stage
  // Stages for each core, at least 1: stages that compute share the cores evenly, and one takes no
  // more than a core. The times above are of a stage with a core to itself.
  double sharers = 1;
};

// Time from the first operation to the last, over all stages, which run the lists of MakeSchedule:
// each operation begins when that before it has ended and its rows have come. Cost: n log(stages)
// for the n operations of all stages.
double PipelineSpan(const PipelineShape& shape, int64_t rounds, const OpTimes& times);

// Shares of a step in which the busiest stage waits, for search: spans are kept, and of many rounds
// two shorter ones are simulated, beyond which each round takes as long as the one before.
class Bubbles {
 public:
  // PipelineSpan / (rounds * chunks * (forward + backward) * sharers) - 1, with `times` in units of
  // forward and the hop rounded to 1/16 of it.
  double Share(const PipelineShape& shape, int64_t rounds, const OpTimes& times);

 private:
  using Key = std::tuple<ScheduleKind, int, int, int64_t, int64_t, int64_t, double>;
  std::map<Key, double> shares_;
};

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_PIPELINE_TIME_H_
