#include "tests/layer_oracle.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "tests/routing_oracle.h"

namespace moe::testing {
namespace {

using Vector = std::vector<double>;

double Activate(Activation activation, double gate, double up) {
  switch (activation) {
    case Activation::kSwiGlu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeGlu:
      return 0.5 * gate * (1 + std::erf(gate / std::sqrt(2.0))) * up;
    case Activation::kRelu:
      return std::max(gate, 0.0);
    case Activation::kRelu2:
      return std::max(gate, 0.0) * std::max(gate, 0.0);
    case Activation::kClampedSwiGlu: {
      const double g = std::min<double>(gate, kClampLimit);
      const double u = std::clamp<double>(up, -kClampLimit, kClampLimit);
      return (u + 1) * g / (1 + std::exp(-kClampAlpha * g));
    }
  }
  return 0;
}

class DenseLayer {
 public:
  DenseLayer(const LayerWork& work, const std::map<std::string, std::vector<float>>& weights)
      : work_(work), config_(work.config), hidden_(work.config.router.hidden_size) {
    for (const auto& [name, values] : weights) weights_[name] = {values.begin(), values.end()};
    x_ = {work.x.begin(), work.x.end()};
    const RouterConfig& router = config_.router;
    spec_ = oracle::RuleOf(router.gate, router.top_k);
    spec_.experts = router.num_experts;
    spec_.capacity_factor = router.capacity_factor.value_or(0);
    spec_.drop = router.drop_policy == DropPolicy::kPosition ? oracle::Drop::kByPosition
                                                             : oracle::Drop::kByWeight;
    spec_.balance_unit = router.load_balancing == LoadBalancing::kSeqAuxLoss
                             ? oracle::Unit::kSequence
                             : oracle::Unit::kMicroBatch;
    spec_.aux_coeff = router.aux_loss_coeff;
    spec_.z_coeff = router.z_loss_coeff;
    input_.micro_batch_offsets = {0};
    for (const int64_t n : work.micro_batch_tokens) {
      input_.micro_batch_offsets.push_back(input_.micro_batch_offsets.back() + n);
    }
    input_.sequence_offsets = input_.micro_batch_offsets;  // one sequence each
  }

  Vector& x() { return x_; }
  std::map<std::string, Vector>& weights() { return weights_; }
  const Vector& y() const { return y_; }
  const oracle::RoutingResult& routing() const { return routing_; }

  // Forward; returns sum(dy * y) + losses.
  double Loss() {
    const int64_t tokens = work_.tokens();
    const Vector& gate = weights_.at("mlp.gate.weight");
    input_.logits.assign(tokens, Vector(config_.router.num_experts, 0));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int e = 0; e < config_.router.num_experts; ++e) {
        for (int64_t h = 0; h < hidden_; ++h) {
          input_.logits[t][e] += gate[e * hidden_ + h] * x_[t * hidden_ + h];
        }
      }
    }
    routing_ = oracle::Route(spec_, input_);
    y_.assign(x_.size(), 0);
    double loss = routing_.aux_loss + routing_.z_loss;
    for (int64_t t = 0; t < tokens; ++t) {
      const oracle::TokenRouting& slots = routing_.token[t];
      for (size_t j = 0; j < slots.expert.size(); ++j) {
        if (slots.dropped[j]) continue;
        AddExpert(absl::StrCat("mlp.experts.", slots.expert[j], "."), config_.ffn_hidden_size,
                  slots.weight[j], t);
      }
      if (config_.shared_expert_ffn_hidden_size > 0) {
        AddExpert("mlp.shared_expert.", config_.shared_expert_ffn_hidden_size, 1.0, t);
      }
    }
    for (size_t i = 0; i < y_.size(); ++i) loss += double{work_.dy[i]} * y_[i];
    return loss;
  }

 private:
  // y_t += weight * Expert(x_t)
  void AddExpert(const std::string& prefix, int64_t width, double weight, int64_t t) {
    const bool gated = IsGated(config_.activation);
    const Vector& up = weights_.at(prefix + (gated ? "gate_up_proj.weight" : "up_proj.weight"));
    const Vector& down = weights_.at(prefix + "down_proj.weight");
    const auto dot = [&](int64_t row) {
      double sum = 0;
      for (int64_t h = 0; h < hidden_; ++h) sum += up[row * hidden_ + h] * x_[t * hidden_ + h];
      return sum;
    };
    for (int64_t f = 0; f < width; ++f) {
      const double a = Activate(config_.activation, dot(f), gated ? dot(width + f) : 0);
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
