#include "moe/plan/calibration.h"

#include <algorithm>
#include <limits>

#include "kernels/base/status_macros.h"
#include "moe/plan/step_time.h"

namespace moe::plan {
namespace {

constexpr double kFree = std::numeric_limits<double>::infinity();

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

// Of y = slope x, least squares of relative errors; points of y <= 0 do not count. 0: there are no
// others.
double FitSlope(const std::vector<LinePoint>& points) {
  double one = 0, xx = 0;
  for (const LinePoint& p : points) {
    if (p.y <= 0 || p.x <= 0) continue;
    one += p.x / p.y;
    xx += p.x / p.y * p.x / p.y;
  }
  return xx > 0 ? one / xx : 0;
}

// Points: 1 / rows, and seconds of an operation.
absl::Status SetProducts(const std::vector<LinePoint>& points, Machine& machine) {
  if (points.empty()) return absl::InvalidArgumentError("no products of experts");
  const Line line = FitLine(points);
  if (line.constant <= 0) {
    return absl::InvalidArgumentError(
        "rows of a layer whose experts become faster without limit: measure more tokens, too");
  }
  machine.flops = 1 / line.constant;
  machine.half_rows = line.slope / line.constant;
  return absl::OkStatus();
}

// A machine on which nothing takes time, so that a part's seconds with one constant of 1 are what
// that constant is multiplied or divided by.
Machine FreeMachine(const Machine& like) {
  return {.name = "",
          .flops = kFree,
          .core_flops = kFree,
          .memory_bytes_per_s = kFree,
          .state_bytes_per_s = kFree,
          .node = {.latency_s = 0, .bytes_per_s = kFree},
          .network = {.latency_s = 0, .bytes_per_s = kFree},
          .node_ranks = like.node_ranks,
          .overlap = 0};
}

// Sets what steps of training say of a machine.
class StepFit {
 public:
  StepFit(const std::vector<TrainedStep>& steps, Machine& machine) : machine_(machine) {
    for (const TrainedStep& step : steps) steps_.push_back(step.WhileAllCompute(machine.sharers));
  }

  absl::Status Products() {
    std::vector<LinePoint> points;
    for (const TrainedStep& step : steps_) {
      // Experts that ranks share wait for rows and sums.
      if (step.layout.mesh.expert_tensor > 1) continue;
      Machine one = FreeMachine(machine_);
      one.flops = 1;
      const double operations = Mean(step, one).experts;
      one.half_rows = 1;
      const double by_rows = Mean(step, one).experts - operations;  // operations / rows
      if (operations > 0 && step.experts > 0) {
        points.push_back({by_rows / operations, step.experts / operations});
      }
    }
    // Where few rows were no slower, by chance or since all are few: the mean rate at any rows.
    if (!points.empty() && FitLine(points).constant <= 0) {
      for (LinePoint& point : points) point.x = 0;
    }
    return SetProducts(points, machine_);
  }

  // What the products of the same matrices leave.
  void Attention() {
    std::vector<LinePoint> points;
    Machine products = FreeMachine(machine_), core = products;
    products.flops = machine_.flops;
    products.half_rows = machine_.half_rows;
    core.core_flops = 1;
    for (const TrainedStep& step : steps_) {
      points.push_back(
          {Mean(step, core).attention, step.attention - Mean(step, products).attention});
    }
    if (const double slope = FitSlope(points); slope > 0) machine_.core_flops = 1 / slope;
  }

  void Layers() {
    std::vector<LinePoint> points;
    Machine products = FreeMachine(machine_), bytes = products, count = products;
    products.flops = machine_.flops;
    products.half_rows = machine_.half_rows;
    bytes.memory_bytes_per_s = 1;
    count.layer_s = 1;
    for (const TrainedStep& step : steps_) {
      const double layers = Mean(step, count).layers;
      const double seconds = step.layers - Mean(step, products).dense;
      if (seconds > 0) points.push_back({Mean(step, bytes).memory / layers, seconds / layers});
    }
    if (points.empty()) return;
    const Line line = FitLine(points);
    machine_.layer_s = line.constant;
    // Of one size, or where it does not grow with it: a layer's time is constant.
    machine_.memory_bytes_per_s = line.slope > 0 ? 1 / line.slope : kFree;
  }

  // The calls of steps, as bytes of a rank in each; empty where no experts are elsewhere.
  std::vector<CallSample> Exchanges() const {
    std::vector<CallSample> calls;
    Machine bytes = FreeMachine(machine_), count = bytes;
    bytes.node.bytes_per_s = bytes.network.bytes_per_s = 1;
    count.node.latency_s = count.network.latency_s = 1;
    for (const TrainedStep& step : steps_) {
      const double number = Mean(step, count).exchange;
      if (number <= 0 || step.exchange <= 0) continue;
      calls.push_back(
          {.bytes = Mean(step, bytes).exchange / number, .seconds = step.exchange / number});
    }
    return calls;
  }

  void State() {
    std::vector<LinePoint> points;
    Machine bytes = FreeMachine(machine_);
    bytes.state_bytes_per_s = 1;
    for (const TrainedStep& step : steps_) {
      points.push_back({Mean(step, bytes).optimizer, step.optimizer});
    }
    if (const double slope = FitSlope(points); slope > 0) machine_.state_bytes_per_s = 1 / slope;
  }

  // Whether there were any.
  bool Sums() {
    std::vector<LinePoint> points;
    Machine links = FreeMachine(machine_);
    links.node = machine_.node;
    links.network = machine_.network;
    for (const TrainedStep& step : steps_) {
      points.push_back({Mean(step, links).gradients, step.gradients});
    }
    const double slope = FitSlope(points);
    if (slope > 0) machine_.sum_speed = 1 / slope;
    return slope > 0;
  }

 private:
  static StepTime Mean(const TrainedStep& step, const Machine& machine) {
    return MeanStep(step.cost, machine, step.work, step.layout);
  }

  std::vector<TrainedStep> steps_;
  Machine& machine_;
};

}  // namespace

void TrainedStep::SetParts(absl::FunctionRef<double(const char* key)> milliseconds) {
  const auto seconds = [&](const char* key) {
    return milliseconds(key) * 1e-3;
  };
  attention = seconds("attention_ms");
  experts = seconds("expert_ms");
  layers = seconds("layer_ms");
  exchange = seconds("a2a_ms");
  optimizer = seconds("optimizer_ms");
  const double waits = exchange + seconds("pipeline_ms");
  const double passes = attention + experts + layers + seconds("output_ms") + waits;
  computing = passes > 0 ? 1 - Machine::kHiddenWaits * waits / passes : 1;
  gradients = seconds("step_ms") - optimizer - passes;
}

TrainedStep TrainedStep::WhileAllCompute(double sharers) const {
  const double slower = sharers / std::max(1.0, sharers * computing);
  TrainedStep step = *this;
  step.attention *= slower;
  step.experts *= slower;
  step.layers *= slower;
  step.computing = 1;
  return step;
}

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
  StepFit steps(samples.steps, machine);
  const bool trained = !samples.steps.empty();
  if (trained) {
    MOE_RETURN_IF_ERROR(steps.Products());
    steps.Attention();
    steps.Layers();
    steps.State();
  } else {
    if (samples.products.empty() || samples.layer_s.empty()) {
      return absl::InvalidArgumentError("no rows of a layer");
    }
    if (samples.copied_bytes_per_s <= 0) return absl::InvalidArgumentError("no rows of memcpy");
    std::vector<LinePoint> products;
    for (const ProductSample& sample : samples.products) {
      products.push_back({1 / sample.rows, 1 / sample.flops_per_s});
    }
    MOE_RETURN_IF_ERROR(SetProducts(products, machine));
    machine.core_flops = machine.flops / 2;
    machine.layer_s = *std::min_element(samples.layer_s.begin(), samples.layer_s.end());
    machine.memory_bytes_per_s = machine.state_bytes_per_s = samples.copied_bytes_per_s;
  }
  const std::vector<CallSample> trained_calls = steps.Exchanges();
  const std::vector<CallSample>& exchange =
      trained_calls.empty() ? samples.exchange : trained_calls;
  const bool node = !exchange.empty(), network = !samples.network.empty();
  if (node) machine.node = LinkOf(exchange);
  if (network) machine.network = LinkOf(samples.network);
  if (!node && network) machine.node = machine.network;
  if (!network) machine.network = machine.node;
  const auto& sums = samples.sums.empty() ? samples.network_sums : samples.sums;
  const Link& link = samples.sums.empty() ? machine.network : machine.node;
  if (!sums.empty() && link.bytes_per_s > 0) {
    machine.sum_speed = LinkOf(sums).bytes_per_s / link.bytes_per_s;
  }
  if (!trained) return machine;
  if (node || network) {
    steps.Sums();
    return machine;
  }
  // Sums alone are known of the links.
  machine.node = machine.network = {.latency_s = 0, .bytes_per_s = 1};
  const bool summed = steps.Sums();
  machine.node.bytes_per_s = machine.network.bytes_per_s = summed ? machine.sum_speed : kFree;
  machine.sum_speed = 1;
  return machine;
}

}  // namespace moe::plan
