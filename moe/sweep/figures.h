// What is measured at a point of a sweep, and its mean over repetitions.
#ifndef MOE_MOE_SWEEP_FIGURES_H_
#define MOE_MOE_SWEEP_FIGURES_H_

#include <cstdint>
#include <limits>
#include <vector>

#include <absl/types/span.h>

#include "moe/bench/layer_bench.h"
#include "moe/lm/trainer.h"

namespace moe::sweep {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Of one repetition. kUnknown: the mode has no such figure.
struct Figures {
  double params_total = kUnknown, params_active = kUnknown;
  double tokens_per_s = kUnknown;  // over all ranks
  double step_ms = kUnknown;       // layer: forward + backward
  double a2a_ms = kUnknown;        // dispatch + combine
  double all_reduce_ms = kUnknown;
  double expert_ms = kUnknown;
  double drop_initial_pct = kUnknown, drop_final_pct = kUnknown;  // of slots
  double max_violation = kUnknown;                                // of the worst layer
  double dead_experts = kUnknown;                                 // over all layers
  double validation_loss = kUnknown;                              // nats
  double peak_bytes = kUnknown;                                   // of the largest rank
};

struct MeanSd {
  double mean = kUnknown;
  double sd = kUnknown;  // sqrt(sum (x - mean)^2 / (n - 1)); unknown for fewer than two
};
// Of values of which none, or all, are unknown.
MeanSd MeanSdOf(absl::Span<const double> values);

// Means over repetitions; the peak is the largest.
struct Summary {
  Figures mean;
  double tokens_per_s_sd = kUnknown;
  double validation_loss_sd = kUnknown;
};
Summary Summarize(absl::Span<const Figures> repetitions);

// The figures of a training run, from its steps:
//   speed, times   over the steps after the first, which pays for memory and code that later ones
//                  reuse; tokens / seconds, and means
//   drops          of the first step, at the initial weights; and the mean over the last tenth of
//                  the steps (at least one), as are MaxVio and dead experts
class TrainFigures {
 public:
  void Add(const lm::StepMetrics& metrics) { steps_.push_back(metrics); }
  // After the last step.
  Figures Finish(const lm::TrainReport& report) const;

 private:
  std::vector<lm::StepMetrics> steps_;
};

// The figures of a layer's calls: step and phases are medians of the slowest rank, forward and
// backward added. Nothing is learned between the calls: drops are the same at the start and the
// end.
Figures LayerFigures(const bench::LayerResult& result);

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_FIGURES_H_
