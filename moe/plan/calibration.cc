#include "moe/plan/calibration.h"

#include <algorithm>

namespace moe::plan {
namespace {

Link LinkOf(const std::vector<CallSample>& calls) {
  std::vector<LinePoint> points;
  for (const CallSample& call : calls) points.push_back({call.bytes, call.seconds});
  const Line line = FitLine(points);
  // Calls of one size, or whose time does not grow with it: their best speed.
  double best = 0;
  for (const CallSample& call : calls) best = std::max(best, call.bytes / call.seconds);
  if (line.slope <= 0) return {.latency_s = 0, .bytes_per_s = best};
  return {.latency_s = line.constant, .bytes_per_s = 1 / line.slope};
}

}  // namespace

Line FitLine(const std::vector<LinePoint>& points) {
  // Sums of 1, x / y and x^2 / y^2 ...: of (constant + slope x) / y against 1.
  double n = 0, x = 0, xx = 0, one = 0, one_x = 0;
  for (const LinePoint& p : points) {
    const double w = 1 / p.y;
    n += w * w;
    x += w * w * p.x;
    xx += w * w * p.x * p.x;
    one += w;
    one_x += w * p.x;
  }
  const double determinant = n * xx - x * x;
  if (determinant > 1e-12 * n * xx) {
    const Line line = {.constant = (one * xx - one_x * x) / determinant,
                       .slope = (n * one_x - x * one) / determinant};
    if (line.slope >= 0 && line.constant >= 0) return line;
    if (line.constant < 0) return {.constant = 0, .slope = one_x / xx};
  }
  return {.constant = one / n, .slope = 0};
}

absl::StatusOr<Machine> Calibrate(const Calibration& samples, Machine machine) {
  if (samples.products.empty() || samples.layer_s.empty()) {
    return absl::InvalidArgumentError("no rows of a layer");
  }
  if (samples.copied_bytes_per_s <= 0) return absl::InvalidArgumentError("no rows of memcpy");
  std::vector<LinePoint> products;
  for (const ProductSample& sample : samples.products) {
    products.push_back({1 / sample.rows, 1 / sample.flops_per_s});
  }
  const Line line = FitLine(products);
  if (line.constant <= 0) {
    return absl::InvalidArgumentError(
        "rows of a layer whose experts become faster without limit: measure more tokens, too");
  }
  machine.flops = 1 / line.constant;
  machine.half_rows = line.slope / line.constant;
  machine.core_flops = machine.flops / 2;
  machine.layer_s = *std::min_element(samples.layer_s.begin(), samples.layer_s.end());
  machine.memory_bytes_per_s = samples.copied_bytes_per_s;
  const bool node = !samples.exchange.empty(), network = !samples.network.empty();
  if (node) machine.node = LinkOf(samples.exchange);
  if (network) machine.network = LinkOf(samples.network);
  if (!node && network) machine.node = machine.network;
  if (!network) machine.network = machine.node;
  const auto& sums = samples.sums.empty() ? samples.network_sums : samples.sums;
  const Link& link = samples.sums.empty() ? machine.network : machine.node;
  if (!sums.empty() && link.bytes_per_s > 0) {
    machine.sum_speed = LinkOf(sums).bytes_per_s / link.bytes_per_s;
  }
  return machine;
}

}  // namespace moe::plan
