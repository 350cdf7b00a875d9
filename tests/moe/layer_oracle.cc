#include "tests/moe/layer_oracle.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "tests/gating/routing_oracle.h"
#include "tests/gating/routing_spec.h"

namespace moe::testing {
namespace {

using Vector = std::vector<double>;

double Activate(ActivationFunction activation, double gate, double up) {
  switch (activation.kind) {
    case Activation::kSwiGlu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeGlu:
      return 0.5 * gate * (1 + std::erf(gate / std::sqrt(2.0))) * up;
    case Activation::kRelu:
      return std::max(gate, 0.0);
    case Activation::kRelu2:
      return std::max(gate, 0.0) * std::max(gate, 0.0);
    case Activation::kClampedSwiGlu: {
      const double g = std::min<double>(gate, activation.limit);
      const double u = std::clamp<double>(up, -activation.limit, activation.limit);
      return (u + 1) * g / (1 + std::exp(-activation.alpha * g));
    }
  }
  return 0;
}

constexpr int64_t kTrainerStep = 1;  // of a trainer's first
constexpr char kExpertBias[] = "mlp.gate.e_score_correction_bias";

class DenseLayer {
 public:
  DenseLayer(const LayerWork& work, const std::map<std::string, std::vector<float>>& weights)
      : work_(work), config_(work.config), hidden_(work.config.router.hidden_size) {
    for (const auto& [name, values] : weights) weights_[name] = {values.begin(), values.end()};
    x_ = {work.x.begin(), work.x.end()};
    spec_ = SpecOf(config_.router);
    input_.micro_batch_offsets = {0};
    for (const int64_t n : work.micro_batch_tokens) {
      input_.micro_batch_offsets.push_back(input_.micro_batch_offsets.back() + n);
    }
    input_.sequence_offsets = input_.micro_batch_offsets;  // one sequence each
    DrawRandomNumbers(config_.router, work.tokens(), kTrainerStep, input_);
    if (const auto bias = weights_.find(kExpertBias); bias != weights_.end()) {
      input_.expert_bias = bias->second;
      weights_.erase(bias);  // no gradient
    }
    const double total =
        std::accumulate(work.last_step_count.begin(), work.last_step_count.end(), 0.0);
    if (config_.router.load_balancing == LoadBalancing::kGlobalAuxLoss) {
      input_.expert_share.assign(config_.router.num_outputs(), 1.0 / config_.router.num_outputs());
      for (size_t e = 0; e < work.last_step_count.size(); ++e) {
        input_.expert_share[e] = static_cast<double>(work.last_step_count[e]) / total;
      }
    }
  }

  Vector& x() { return x_; }
  std::map<std::string, Vector>& weights() { return weights_; }
  const Vector& y() const { return y_; }
  const oracle::RoutingResult& routing() const { return routing_; }

  // Forward; returns sum(dy * y) + losses.
  double Loss() {
    const int64_t tokens = work_.tokens();
    input_.logits.clear();
    for (int64_t t = 0; t < tokens; ++t) input_.logits.push_back(Logits(t));
    routing_ = oracle::Route(spec_, input_);
    y_.assign(x_.size(), 0);
    double loss = routing_.aux_loss + routing_.z_loss;
    const bool weigh_input = config_.router.gate == "llama4";
    for (int64_t t = 0; t < tokens; ++t) {
      const oracle::TokenRouting& slots = routing_.token[t];
      for (size_t j = 0; j < slots.expert.size(); ++j) {
        if (slots.dropped[j]) continue;
        if (slots.expert[j] >= config_.router.num_experts) {
          for (int64_t h = 0; h < hidden_; ++h) {
            y_[t * hidden_ + h] += slots.weight[j] * x_[t * hidden_ + h];
          }
          continue;
        }
        AddExpert(absl::StrCat("mlp.experts.", slots.expert[j], "."), config_.ffn_hidden_size,
                  weigh_input ? slots.weight[j] : 1.0, weigh_input ? 1.0 : slots.weight[j], t);
      }
      if (config_.shared_expert_ffn_hidden_size > 0) {
        AddExpert("mlp.shared_expert.", config_.shared_expert_ffn_hidden_size, 1.0, SharedGate(t),
                  t);
      }
    }
    for (size_t i = 0; i < y_.size(); ++i) loss += double{work_.dy[i]} * y_[i];
    return loss;
  }

 private:
  Vector Logits(int64_t t) const {
    const Vector& gate = weights_.at("mlp.gate.weight");
    const auto bias = weights_.find("mlp.gate.bias");
    Vector logits;
    for (size_t e = 0; e < gate.size() / static_cast<size_t>(hidden_); ++e) {
      double sum = bias == weights_.end() ? 0 : bias->second[e];
      for (int64_t h = 0; h < hidden_; ++h) {
        sum += gate[e * hidden_ + h] * x_[t * hidden_ + h] * Jitter(t, h);
      }
      logits.push_back(sum);
    }
    return logits;
  }

  double Jitter(int64_t t, int64_t h) const {
    const RouterConfig& router = config_.router;
    if (router.input_jitter == 0) return 1;
    const double u = Uniform({.seed = router.seed,
                              .purpose = RandomPurpose::kJitter,
                              .layer = router.layer,
                              .step = kTrainerStep,
                              .item = static_cast<uint64_t>(t)},
                             static_cast<uint32_t>(h));
    return 1 + (2 * u - 1) * static_cast<double>(router.input_jitter);
  }

  // 1, or sigmoid(w . x_t).
  double SharedGate(int64_t t) const {
    if (!config_.gated_shared_expert) return 1;
    const Vector& w = weights_.at("mlp.shared_expert_gate.weight");
    double sum = 0;
    for (int64_t h = 0; h < hidden_; ++h) sum += w[h] * x_[t * hidden_ + h];
    return 1 / (1 + std::exp(-sum));
  }

  // y_t += weight * Expert(scale * x_t)
  void AddExpert(const std::string& prefix, int64_t width, double scale, double weight, int64_t t) {
    const bool gated = IsGated(config_.activation);
    const std::string up_name = prefix + (gated ? "gate_up_proj." : "up_proj.");
    const Vector& up = weights_.at(up_name + "weight");
    const Vector& down = weights_.at(prefix + "down_proj.weight");
    const auto bias_of = [&](const std::string& name) {
      const auto at = weights_.find(name + "bias");
      return at == weights_.end() ? nullptr : at->second.data();
    };
    const double* const up_bias = bias_of(up_name);
    const double* const down_bias = bias_of(prefix + "down_proj.");
    const auto project = [&](int64_t row) {
      double sum = up_bias == nullptr ? 0 : up_bias[row];
      for (int64_t h = 0; h < hidden_; ++h) {
        sum += up[row * hidden_ + h] * scale * x_[t * hidden_ + h];
      }
      return sum;
    };
    for (int64_t h = 0; h < hidden_ && down_bias != nullptr; ++h) {
      y_[t * hidden_ + h] += weight * down_bias[h];
    }
    for (int64_t f = 0; f < width; ++f) {
      const double a = Activate(config_.activation, project(f), gated ? project(width + f) : 0);
      for (int64_t h = 0; h < hidden_; ++h) {
        y_[t * hidden_ + h] += weight * down[h * width + f] * a;
      }
    }
  }

  const LayerWork& work_;
  const MoeLayerConfig& config_;
  const int64_t hidden_;
  oracle::RoutingSpec spec_;
  oracle::RoutingInput input_;
  Vector x_, y_;
  std::map<std::string, Vector> weights_;
  oracle::RoutingResult routing_;
};

// Error of the difference quotient: h^2 / 6 times a third derivative of order 1, plus 2^-53 / h.
constexpr double kStep = 1e-5;

Vector Gradient(DenseLayer& layer, Vector& variable) {
  Vector gradient(variable.size());
  for (size_t i = 0; i < variable.size(); ++i) {
    const double at = variable[i];
    variable[i] = at + kStep;
    const double above = layer.Loss();
    variable[i] = at - kStep;
    const double below = layer.Loss();
    variable[i] = at;
    gradient[i] = (above - below) / (2 * kStep);
  }
  return gradient;
}

}  // namespace

OracleResult DenseLoop(const LayerWork& work,
                       const std::map<std::string, std::vector<float>>& weights) {
  DenseLayer layer(work, weights);
  layer.Loss();
  OracleResult result = {
      .y = layer.y(), .aux_loss = layer.routing().aux_loss, .z_loss = layer.routing().z_loss};
  for (const auto& token : layer.routing().token) {
    for (const bool dropped : token.dropped) result.dropped_slots += dropped;
  }
  result.dx = Gradient(layer, layer.x());
  for (auto& [name, values] : layer.weights()) {
    result.gradients[name] = Gradient(layer, values);
  }
  return result;
}

}  // namespace moe::testing
