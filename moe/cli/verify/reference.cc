#include "moe/cli/verify/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "kernels/base/rng.h"
#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {
namespace {

// Applies `function` to every pair of grids of two sets of weights of one shape.
template <typename A, typename B, typename Function>
void ForEachGrid(ExpertWeights<A>& a, ExpertWeights<B>& b, Function function) {
  function(a.gate_up, b.gate_up);
  function(a.gate_up_bias, b.gate_up_bias);
  function(a.down, b.down);
  function(a.down_bias, b.down_bias);
}
template <typename A, typename B, typename Function>
void ForEachGrid(LayerWeights<A>& a, LayerWeights<B>& b, Function function) {
  function(a.router, b.router);
  function(a.router_bias, b.router_bias);
  a.experts.resize(b.experts.size());
  for (size_t e = 0; e < b.experts.size(); ++e) ForEachGrid(a.experts[e], b.experts[e], function);
  ForEachGrid(a.shared, b.shared, function);
  function(a.shared_gate, b.shared_gate);
}

std::vector<Bounded> Row(const Grid<double>& grid, int64_t r) {
  return {grid.data.begin() + r * grid.cols, grid.data.begin() + (r + 1) * grid.cols};
}

Bounded Dot(const std::vector<Bounded>& a, const std::vector<Bounded>& b) {
  Sum sum;
  for (size_t i = 0; i < a.size(); ++i) sum.Add(a[i] * b[i]);
  return sum.Total();
}

constexpr double kClampAt = 7.0;
constexpr double kGateSlope = 1.702;  // gpt-oss: g sigmoid(1.702 g)

Bounded Relu(const Bounded& a) {
  return {std::max(a.value, 0.0), a.error};
}
// 1 where a > 0; at a kink either side is right.
Bounded Step(const Bounded& a) {
  return {a.value > 0 ? 1.0 : 0.0, std::fabs(a.value) <= a.error && a.error > 0 ? 1.0 : 0.0};
}

struct Activated {
  Bounded value;
  Bounded by_gate, by_up;  // its slopes
};

Activated Activate(Activation activation, const Bounded& g, const Bounded& u) {
  switch (activation) {
    case Activation::kSwiGlu: {
      const Bounded s = Sigmoid(g);
      return {g * s * u, u * (s + g * s * (Bounded(1) - s)), g * s};
    }
    case Activation::kGeGlu: {
      const Bounded cdf = NormalCdf(g);
      return {g * cdf * u, u * (cdf + g * NormalDensity(g)), g * cdf};
    }
    case Activation::kGeGluTanh: {
      constexpr double kTanhScale = 1.5957691216057308;  // 2 sqrt(2 / pi)
      constexpr double kCubic = 0.044715;
      const Bounded slope = (Bounded(1) + g * g * (3 * kCubic)) * kTanhScale;
      const Bounded s = Sigmoid((g + g * g * g * kCubic) * kTanhScale);
      return {g * s * u, u * (s + g * slope * s * (Bounded(1) - s)), g * s};
    }
    case Activation::kRelu:
      return {Relu(g), Step(g), 0};
    case Activation::kRelu2:
      return {Relu(g) * Relu(g), Relu(g) * 2, 0};
    case Activation::kClampedSwiGlu: {
      const double infinity = std::numeric_limits<double>::infinity();
      const Bounded low = Clamp(g, -infinity, kClampAt);
      const Bounded s = Sigmoid(low * kGateSlope);
      const Bounded up = Clamp(u, -kClampAt, kClampAt) + 1;
      return {up * low * s,
              up * (s + low * kGateSlope * s * (Bounded(1) - s)) * Inside(g, -infinity, kClampAt),
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

// The gradients of a projection.
struct Projected {
  Grid<Sum>& weight;
  Grid<Sum>& bias;
};

// W^T dy, stored; dW += dy x^T, db += dy.
std::vector<Bounded> ProjectBackward(const Grid<double>& weight, const std::vector<Bounded>& x,
                                     const std::vector<Bounded>& dy, const Storage& storage,
                                     Projected d) {
  std::vector<Bounded> dx;
  for (int64_t c = 0; c < weight.cols; ++c) {
    Sum sum;
    for (int64_t r = 0; r < weight.rows; ++r) {
      sum.Add(Bounded(weight(r, c)) * dy[r]);
      d.weight(r, c).Add(dy[r] * x[c]);
    }
    dx.push_back(Stored(sum.Total(), storage));
  }
  for (size_t r = 0; r < d.bias.data.size(); ++r) d.bias.data[r].Add(dy[r]);
  return dx;
}

struct ExpertRun {
  const ExpertWeights<double>& weights;
  int64_t ffn;
  std::vector<Bounded> x, pre, hidden, out;
};

// One expert on one row.
ExpertRun RunExpert(const ReferenceConfig& config, const ExpertWeights<double>& weights,
                    int64_t ffn, std::vector<Bounded> x) {
  const Storage& storage = config.storage;
  ExpertRun run = {.weights = weights, .ffn = ffn, .x = std::move(x)};
  run.pre = Project(weights.gate_up, weights.gate_up_bias, run.x, storage);
  for (int64_t f = 0; f < ffn; ++f) {
    const Bounded up = config.gated_activation() ? run.pre[ffn + f] : Bounded();
    run.hidden.push_back(Stored(Activate(config.activation, run.pre[f], up).value, storage));
  }
  run.out = Project(weights.down, weights.down_bias, run.hidden, storage);
  return run;
}

// Adds the gradients of weights to `gradients`; returns the gradient by x.
std::vector<Bounded> ExpertBackward(const ReferenceConfig& config, const ExpertRun& run,
                                    const std::vector<Bounded>& d_out,
                                    ExpertWeights<Sum>& gradients) {
  const Storage& storage = config.storage;
  const int64_t ffn = run.ffn;
  const std::vector<Bounded> d_hidden = ProjectBackward(
      run.weights.down, run.hidden, d_out, storage, {gradients.down, gradients.down_bias});
  std::vector<Bounded> d_pre(run.pre.size());
  for (int64_t f = 0; f < ffn; ++f) {
    const Bounded up = config.gated_activation() ? run.pre[ffn + f] : Bounded();
    const Activated at = Activate(config.activation, run.pre[f], up);
    d_pre[f] = Stored(d_hidden[f] * at.by_gate, storage);
    if (config.gated_activation()) d_pre[ffn + f] = Stored(d_hidden[f] * at.by_up, storage);
  }
  return ProjectBackward(run.weights.gate_up, run.x, d_pre, storage,
                         {gradients.gate_up, gradients.gate_up_bias});
}

class LayerRun {
 public:
  explicit LayerRun(const ReferenceInput& in)
      : in_(in), y_(batch_.x.rows, config_.hidden), dx_(batch_.x.rows, config_.hidden) {}

  ReferenceResult Run() {
    Jitter();
    tokens_ = RouteReference(in_, seen_, result_.undecided);
    d_logits_ = Grid<Sum>(seen_.rows, weights_.router.rows);
    LayerWeights<double> shape = weights_;
    ForEachGrid(gradients_, shape,
                [](Grid<Sum>& out, Grid<double>& in) { out = Grid<Sum>(in.rows, in.cols); });
    for (int64_t t = 0; t < seen_.rows; ++t) RunToken(t);

    result_.expert_count.assign(config_.outputs(), 0);
    result_.choices.resize(tokens_.size());
    for (size_t b = 0; b + 1 < batch_.micro_batch_offsets.size(); ++b) {
      const TokenRange range = {batch_.micro_batch_offsets[b], batch_.micro_batch_offsets[b + 1]};
      const ReferenceLoss loss = AddLossGradients(in_, range, tokens_, d_logits_);
      result_.aux_loss.push_back(loss.aux);
      result_.z_loss.push_back(loss.z);
      result_.dropped.push_back(0);
      for (int64_t t = range.first; t < range.second; ++t) {
        for (const ReferenceSlot& s : tokens_[t].slots) {
          ++result_.expert_count[s.expert];
          result_.dropped.back() += s.dropped ? 1 : 0;
          result_.choices[t].push_back(s.expert);
        }
      }
    }
    RouterBackward();
    Finish();
    return std::move(result_);
  }

 private:
  // x * U[1 - e, 1 + e]: exact here as in the product, which rounds the same product of two storage
  // values to float32 and then to storage.
  void Jitter() {
    seen_ = batch_.x;
    if (config_.gate.jitter == 0) return;
    factor_ = Grid<double>(seen_.rows, seen_.cols);
    for (int64_t t = 0; t < seen_.rows; ++t) {
      const RandomKey key = {.seed = config_.seed,
                             .purpose = RandomPurpose::kJitter,
                             .step = static_cast<uint64_t>(batch_.step),
                             .item = static_cast<uint64_t>(t)};
      for (int64_t h = 0; h < seen_.cols; ++h) {
        const double u = 2 * Uniform(key, static_cast<uint32_t>(h)) - 1;
        factor_(t, h) = RoundTo({}, 1 + u * config_.gate.jitter);
        const double product = RoundTo({}, seen_(t, h) * factor_(t, h));
        seen_(t, h) = RoundTo(storage_, product);
      }
    }
  }

  void RunToken(int64_t t) {
    const ReferenceToken& token = tokens_[t];
    std::vector<Bounded> d_weight(token.slots.size());
    for (size_t j = 0; j < token.slots.size(); ++j) RunSlot(t, token.slots[j], d_weight[j]);
    if (config_.shared_ffn > 0) RunShared(t);
    AddGateGradient(config_, token, d_weight, &d_logits_(t, 0));
  }

  void RunSlot(int64_t t, const ReferenceSlot& slot, Bounded& d_weight) {
    const std::vector<Bounded> x = Row(batch_.x, t), dy = Row(batch_.dy, t);
    const Bounded w = slot.weight;
    if (slot.expert >= config_.experts) {  // the token itself
      d_weight = Dot(dy, x);
      for (int64_t h = 0; h < config_.hidden; ++h) {
        y_(t, h).Add(w * x[h]);
        dx_(t, h).Add(w * dy[h]);
      }
      return;
    }
    if (slot.dropped) return;
    const bool on_input = config_.gate.weight_on_input;
    const auto scaled = [&](const std::vector<Bounded>& row) {
      std::vector<Bounded> out;
      for (const Bounded& v : row) out.push_back(Stored(w * v, storage_));
      return out;
    };
    const ExpertRun run =
        RunExpert(config_, weights_.experts[slot.expert], config_.ffn, on_input ? scaled(x) : x);
    const std::vector<Bounded> d_row =
        ExpertBackward(config_, run, on_input ? dy : scaled(dy), gradients_.experts[slot.expert]);
    d_weight = on_input ? Dot(x, d_row) : Dot(dy, run.out);
    for (int64_t h = 0; h < config_.hidden; ++h) {
      y_(t, h).Add(on_input ? run.out[h] : w * run.out[h]);
      dx_(t, h).Add(on_input ? w * d_row[h] : d_row[h]);
    }
  }

  void RunShared(int64_t t) {
    const std::vector<Bounded> x = Row(batch_.x, t), dy = Row(batch_.dy, t);
    const ExpertRun run = RunExpert(config_, weights_.shared, config_.shared_ffn, x);
    std::vector<Bounded> d_out = dy;
    Bounded gate = 1;
    if (config_.shared_gated) {
      const std::vector<Bounded> w = Row(weights_.shared_gate, 0);
      gate = Sigmoid(Dot(w, x));
      const Bounded d_logit = Dot(dy, run.out) * gate * (Bounded(1) - gate);
      for (int64_t h = 0; h < config_.hidden; ++h) {
        d_out[h] = Stored(gate * dy[h], storage_);
        dx_(t, h).Add(d_logit * w[h]);
        gradients_.shared_gate(0, h).Add(d_logit * x[h]);
      }
    }
    const std::vector<Bounded> d_row = ExpertBackward(config_, run, d_out, gradients_.shared);
    for (int64_t h = 0; h < config_.hidden; ++h) {
      y_(t, h).Add(config_.shared_gated ? Stored(gate * run.out[h], storage_) : run.out[h]);
      dx_(t, h).Add(d_row[h]);
    }
  }

  void RouterBackward() {
    for (int64_t t = 0; t < d_logits_.rows; ++t) {
      std::vector<Bounded> d(d_logits_.cols);
      for (int64_t r = 0; r < d_logits_.cols; ++r) d[r] = d_logits_(t, r).Total();
      for (int64_t h = 0; h < config_.hidden; ++h) {
        Sum sum;
        for (int64_t r = 0; r < d_logits_.cols; ++r) {
          sum.Add(d[r] * weights_.router(r, h));
          gradients_.router(r, h).Add(d[r] * seen_(t, h));
        }
        const Bounded factor = factor_.data.empty() ? Bounded(1) : Bounded(factor_(t, h));
        dx_(t, h).Add(sum.Total() * factor);
      }
      for (size_t r = 0; r < gradients_.router_bias.data.size(); ++r) {
        gradients_.router_bias.data[r].Add(d[r]);
      }
    }
  }

  void Finish() {
    // y and dx are rounded to storage after each of at most four parts: shared, identity, routed
    // experts and, in dx, the router (the shared expert's gate besides).
    constexpr int kStores = 5;
    const auto totals = [&](const Grid<Sum>& sums) {
      Grid<Bounded> out(sums.rows, sums.cols);
      for (size_t i = 0; i < sums.data.size(); ++i) {
        out.data[i] = sums.data[i].Total(storage_, kStores);
      }
      return out;
    };
    result_.y = totals(y_);
    result_.dx = totals(dx_);
    // Layout-invariant sums round one partial per micro-batch to a grid of 2^-50.
    const double grid = 0x1p-51 * static_cast<double>(batch_.micro_batch_offsets.size());
    ForEachGrid(result_.gradients, gradients_, [&](Grid<Bounded>& out, Grid<Sum>& sums) {
      out = Grid<Bounded>(sums.rows, sums.cols);
      for (size_t i = 0; i < sums.data.size(); ++i) {
        out.data[i] = sums.data[i].Total();
        out.data[i].error += grid;
      }
    });
  }

  const ReferenceInput in_;
  const ReferenceConfig& config_ = in_.config;
  const LayerWeights<double>& weights_ = in_.weights;
  const ReferenceBatch& batch_ = in_.batch;
  const Storage storage_ = in_.config.storage;
  Grid<double> seen_, factor_;  // the router's tokens; their jitter, empty without
  std::vector<ReferenceToken> tokens_;
  Grid<Sum> y_, dx_, d_logits_;
  LayerWeights<Sum> gradients_;
  ReferenceResult result_;
};

}  // namespace

ReferenceResult RunReference(const ReferenceConfig& config, const LayerWeights<double>& weights,
                             const ReferenceState& state, const ReferenceBatch& batch) {
  return LayerRun({config, weights, state, batch}).Run();
}

void EndReferenceStep(const ReferenceConfig& config, const std::vector<int64_t>& expert_count,
                      ReferenceState& state) {
  const int64_t total = std::accumulate(expert_count.begin(), expert_count.end(), int64_t{0});
  if (total == 0) return;
  state.expert_share.resize(expert_count.size());
  for (size_t e = 0; e < expert_count.size(); ++e) {
    const auto outputs = static_cast<int64_t>(expert_count.size());
    state.expert_share[e] = static_cast<double>(expert_count[e]) / static_cast<double>(total);
    if (state.expert_bias.empty()) continue;
    const int64_t above_mean = expert_count[e] * outputs - total;
    const double sign = above_mean < 0 ? 1 : above_mean > 0 ? -1 : 0;
    state.expert_bias[e] = RoundTo({}, state.expert_bias[e] + sign * config.bias_update_rate);
  }
}

double RoundTo(const Storage& storage, double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::ignore = std::frexp(value, &exponent);  // |value| in [0.5, 1) x 2^exponent
  const int spacing_log2 = std::max(exponent - storage.bits, storage.least_log2);
  return std::ldexp(std::nearbyint(std::ldexp(value, -spacing_log2)), spacing_log2);
}

}  // namespace moe::verify
