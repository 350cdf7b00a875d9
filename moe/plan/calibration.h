// Constants of a machine from measurements on it.
#ifndef MOE_MOE_PLAN_CALIBRATION_H_
#define MOE_MOE_PLAN_CALIBRATION_H_

#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>

#include "moe/plan/layout.h"
#include "moe/plan/machine.h"
#include "moe/plan/model_cost.h"

namespace moe::plan {

struct ProductSample {
  double rows = 0;         // of an expert
  double flops_per_s = 0;  // of one rank
};

struct CallSample {
  double bytes = 0;  // that leave a rank
  double seconds = 0;
};

// A step of a training run: seconds of its parts, means over ranks.
struct TrainedStep {
  ModelCost cost;
  Workload work;
  Layout layout;
  double attention = 0;  // with projections and norms
  double experts = 0;    // with shared ones
  double layers = 0;     // gate, plan, dense networks, norms, embedding
  double exchange = 0;   // rows to experts and home, with waits for other ranks
  double optimizer = 0;
  double gradients = 0;  // what is in no other part
  double computing = 1;  // share of the passes that a rank does not leave to others

  // Sets the parts; milliseconds(key) of the keys that metrics.jsonl and rows of moe sweep have.
  void SetParts(absl::FunctionRef<double(const char* key)> milliseconds);

  // The step with the parts of its passes that compute as long as they were if no rank waited: what
  // a rank computes while others wait is faster, where `sharers` ranks share a core.
  TrainedStep WhileAllCompute(double sharers) const;
};

// What was measured with as many ranks as are planned, or on ranks that share no cores.
struct Calibration {
  std::vector<ProductSample> products;            // experts, forward and backward
  std::vector<double> layer_s;                    // gate and plan of a layer, forward and backward
  std::vector<CallSample> exchange, sums;         // all-to-alls and all-reduces within a node
  std::vector<CallSample> network, network_sums;  // between nodes
  double copied_bytes_per_s = 0;                  // of a copy in memory: read and written
  std::vector<TrainedStep> steps;                 // within a node
};

// y = constant + slope x, least squares of relative errors; neither is negative. One x: the slope
// is 0. `points` is not empty, y > 0.
struct Line {
  double constant = 0, slope = 0;
};
struct LinePoint {
  double x = 0, y = 0;
};
Line FitLine(const std::vector<LinePoint>& points);

// `machine` with what the samples say: seconds per operation by 1 / rows, seconds of a call by
// bytes, of a layer the least. A part that steps of training have is taken from these alone: of a
// layer and micro-batch a constant and seconds by bytes, of attention what projections leave.
// Links of which there are no samples are as the other one. kInvalidArgument names samples that are
// missing: products, layers, copies. machine.sharers and overlap are those of the measured ranks.
absl::StatusOr<Machine> Calibrate(const Calibration& samples, Machine machine);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_CALIBRATION_H_
