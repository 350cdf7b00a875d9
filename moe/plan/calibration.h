// Constants of a machine from measurements on it.
#ifndef MOE_MOE_PLAN_CALIBRATION_H_
#define MOE_MOE_PLAN_CALIBRATION_H_

#include <vector>

#include <absl/status/statusor.h>

#include "moe/plan/machine.h"

namespace moe::plan {

struct ProductSample {
  double rows = 0;         // of an expert
  double flops_per_s = 0;  // of one rank
};

struct CallSample {
  double bytes = 0;  // that leave a rank
  double seconds = 0;
};

// What was measured with as many ranks as are planned, or on ranks that share no cores.
struct Calibration {
  std::vector<ProductSample> products;            // experts, forward and backward
  std::vector<double> layer_s;                    // gate and plan of a layer, forward and backward
  std::vector<CallSample> exchange, sums;         // all-to-alls and all-reduces within a node
  std::vector<CallSample> network, network_sums;  // between nodes
  double copied_bytes_per_s = 0;                  // of a copy in memory: read and written
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
// bytes, of a layer the least. Links of which there are no samples are as the other one.
// kInvalidArgument names samples that are missing: products, layers, copies.
absl::StatusOr<Machine> Calibrate(const Calibration& samples, Machine machine);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_CALIBRATION_H_
