// One expert on one row.
#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {
namespace {

constexpr double kClampAt = 7.0;
constexpr double kGateSlope = 1.702;  // gpt-oss: g sigmoid(1.702 g)

Bounded Relu(const Bounded& a) {
  return {std::max(a.value, 0.0), a.error};
}
// 1 where a > 0; at a kink either side is right.
Bounded Step(const Bounded& a) {
  return {a.value > 0 ? 1.0 : 0.0, std::fabs(a.value) <= a.error && a.error > 0 ? 1.0 : 0.0};
}

Bounded Activate(Activation activation, const Bounded& g, const Bounded& u) {
  switch (activation) {
    case Activation::kSwiGlu:
      return g * Sigmoid(g) * u;
    case Activation::kGeGlu:
      return g * NormalCdf(g) * u;
    case Activation::kRelu:
      return Relu(g);
    case Activation::kRelu2:
      return Relu(g) * Relu(g);
    case Activation::kClampedSwiGlu: {
      const Bounded low = Clamp(g, -std::numeric_limits<double>::infinity(), kClampAt);
      return (Clamp(u, -kClampAt, kClampAt) + 1) * low * Sigmoid(low * kGateSlope);
    }
  }
  return {};
}

struct Slopes {
  Bounded by_gate, by_up;
};

Slopes ActivationSlopes(Activation activation, const Bounded& g, const Bounded& u) {
  switch (activation) {
    case Activation::kSwiGlu: {
      const Bounded s = Sigmoid(g);
      return {u * (s + g * s * (Bounded(1) - s)), g * s};
    }
    case Activation::kGeGlu:
      return {u * (NormalCdf(g) + g * NormalDensity(g)), g * NormalCdf(g)};
    case Activation::kRelu:
      return {Step(g), 0};
    case Activation::kRelu2:
      return {Relu(g) * 2, 0};
    case Activation::kClampedSwiGlu: {
      const double infinity = std::numeric_limits<double>::infinity();
      const Bounded low = Clamp(g, -infinity, kClampAt);
      const Bounded s = Sigmoid(low * kGateSlope);
      const Bounded up = Clamp(u, -kClampAt, kClampAt) + 1;
      return {up * (s + low * kGateSlope * s * (Bounded(1) - s)) * Inside(g, -infinity, kClampAt),
              low * s * Inside(u, -kClampAt, kClampAt)};
    }
  }
  return {};
}

// W x + b, stored.
std::vector<Bounded> Project(const Grid<double>& weight, const Grid<double>& bias,
                             const std::vector<Bounded>& x, const Storage& storage) {
  std::vector<Bounded> y;
  for (int64_t r = 0; r < weight.rows; ++r) {
    Sum sum;
    for (int64_t c = 0; c < weight.cols; ++c) sum.Add(Bounded(weight(r, c)) * x[c]);
    y.push_back(Stored(sum.Total(), storage));
    if (!bias.data.empty()) y.back() = Stored(y.back() + bias(0, r), storage);
  }
  return y;
}

// W^T dy, stored; dW += dy x^T, db += dy.
std::vector<Bounded> ProjectBackward(const Grid<double>& weight, const std::vector<Bounded>& x,
                                     const std::vector<Bounded>& dy, const Storage& storage,
                                     Grid<Sum>& d_weight, Grid<Sum>& d_bias) {
  std::vector<Bounded> dx;
  for (int64_t c = 0; c < weight.cols; ++c) {
    Sum sum;
    for (int64_t r = 0; r < weight.rows; ++r) {
      sum.Add(Bounded(weight(r, c)) * dy[r]);
      d_weight(r, c).Add(dy[r] * x[c]);
    }
    dx.push_back(Stored(sum.Total(), storage));
  }
  for (size_t r = 0; r < d_bias.data.size(); ++r) d_bias.data[r].Add(dy[r]);
  return dx;
}

}  // namespace

ReferenceExpertRun RunReferenceExpert(const ReferenceConfig& config,
                                      const ExpertWeights<double>& weights, int64_t ffn,
                                      std::vector<Bounded> x) {
  const Storage& storage = config.storage;
  ReferenceExpertRun run;
  run.x = std::move(x);
  run.pre = Project(weights.gate_up, weights.gate_up_bias, run.x, storage);
  for (int64_t f = 0; f < ffn; ++f) {
    const Bounded up = config.gated_activation() ? run.pre[ffn + f] : Bounded();
    run.hidden.push_back(Stored(Activate(config.activation, run.pre[f], up), storage));
  }
  run.out = Project(weights.down, weights.down_bias, run.hidden, storage);
  return run;
}

std::vector<Bounded> ReferenceExpertBackward(const ReferenceConfig& config,
                                             const ExpertWeights<double>& weights, int64_t ffn,
                                             const ReferenceExpertRun& run,
                                             const std::vector<Bounded>& d_out,
                                             ExpertWeights<Sum>& gradients) {
  const Storage& storage = config.storage;
  const std::vector<Bounded> d_hidden = ProjectBackward(weights.down, run.hidden, d_out, storage,
                                                        gradients.down, gradients.down_bias);
  std::vector<Bounded> d_pre(run.pre.size());
  for (int64_t f = 0; f < ffn; ++f) {
    const Bounded up = config.gated_activation() ? run.pre[ffn + f] : Bounded();
    const Slopes slopes = ActivationSlopes(config.activation, run.pre[f], up);
    d_pre[f] = Stored(d_hidden[f] * slopes.by_gate, storage);
    if (config.gated_activation()) d_pre[ffn + f] = Stored(d_hidden[f] * slopes.by_up, storage);
  }
  return ProjectBackward(weights.gate_up, run.x, d_pre, storage, gradients.gate_up,
                         gradients.gate_up_bias);
}

}  // namespace moe::verify
