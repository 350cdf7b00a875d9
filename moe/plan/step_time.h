// Predicts how long a training step of a layout takes.
#ifndef MOE_MOE_PLAN_STEP_TIME_H_
#define MOE_MOE_PLAN_STEP_TIME_H_

#include "moe/plan/layout.h"
#include "moe/plan/machine.h"
#include "moe/plan/model_cost.h"
#include "moe/plan/pipeline_time.h"

namespace moe::plan {

// Seconds of a step on the rank that takes longest; they add up to total().
struct StepTime {
  double attention = 0;  // projections, scores, and their products by values
  double experts = 0;    // experts and shared ones, router
  double dense = 0;      // networks of layers without experts
  double output = 0;     // output layer
  double memory = 0;     // what is bound by memory: norms, activations, rows put in order
  double layers = 0;     // Machine::layer_s
  double exchange = 0;   // rows to experts and home
  double tensors = 0;    // rows and sums among ranks that share matrices or experts
  double bubble = 0;     // waits of the pipeline, and its rows on their way
  double gradients = 0;  // what backward does not hide of their sums and of gathered weights
  double optimizer = 0;
  double bubble_share = 0;  // bubble / what the stage does otherwise

  // Of the passes of all rounds.
  double passes() const {
    return attention + experts + dense + output + memory + layers + exchange + tensors;
  }
  double total() const { return passes() + bubble + gradients + optimizer; }
};

// work and layout are valid: the mesh fits the ranks, and the micro-batch divides the sequences.
//   product   2 N / (flops (1 + half_rows / rows)), N its elements, thrice with backward; an expert
//             has T EP ETP K / E rows, as all experts alike
//   memory    b T (30 H + K (12 F + 10 H)) a layer, with ETP above 1 also T K ETP H (4 b + 32); the
//             optimiser reads and writes its state
//   exchange  the slower of the bytes within and between nodes (TrafficOf), and a latency for each
//             of eight movements a layer
//   tensors   bytes of TrafficOf, and with ETP above 1 a latency for each of four a layer
//   recompute layer: a forward more; activations: a third of the memory-bound time more
//   cores     that ranks share: at least the mean over ranks, and at least what the busiest stage
//             and its waits take with its cores to itself
StepTime PredictStep(const ModelCost& cost, const Machine& machine, const Workload& work,
                     const Layout& layout, Bubbles& bubbles);

// The mean over ranks, without waits: bubble is 0.
StepTime MeanStep(const ModelCost& cost, const Machine& machine, const Workload& work,
                  const Layout& layout);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_STEP_TIME_H_
