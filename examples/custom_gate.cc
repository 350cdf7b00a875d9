// A user-defined gate, without a change to the library: "sharp" selects the k largest probabilities
// and weighs them by their squares, w_j = p_j^2 / sum p^2. Once registered, its name can be used in
// any RouterConfig, so in any layer, at any layout. The program routes one token and compares the
// gate's gradient with a difference quotient.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include <moe/moe.h>

// TokenChoiceGate selects; the derived gate computes the weights of the selected probabilities, and
// their gradient. Gates with other rules of selection derive from moe::Gate (gating/gate.h) and
// write the slots themselves.
class SharpGate final : public moe::TokenChoiceGate {
 public:
  explicit SharpGate(int top_k) : TokenChoiceGate({.top_k = top_k}) {}

 private:
  void Weigh(absl::Span<float> weight) const override {
    for (float& w : weight) w *= w;
    moe::Normalise(weight);
  }
  // With u = p^2, S = sum u:  dp_j = 2 p_j (dw_j - sum_m w_m dw_m) / S.
  void WeighBackward(const moe::TokenWeightGradient& token) const override {
    double sum = 0, mean = 0;
    for (size_t j = 0; j < token.score.size(); ++j) {
      const double u = double{token.score[j]} * double{token.score[j]};
      sum += u;
      mean += u * double{token.d_weight[j]};
    }
    for (size_t j = 0; j < token.score.size(); ++j) {
      token.d_score[j] =
          2 * double{token.score[j]} * (double{token.d_weight[j]} - mean / sum) / sum;
    }
  }
};

constexpr int kExperts = 4;

// Routes one token whose logits are x (the router's weight is the identity); returns the first
// weight. d_x, if not null, receives the gradient of that weight with respect to x.
absl::StatusOr<float> FirstWeight(std::vector<float> x, std::vector<float>* d_x) {
  std::vector<float> weight(kExperts * kExperts), d_weight(weight.size());
  for (int e = 0; e < kExperts; ++e) weight[e * kExperts + e] = 1;
  const moe::MatrixView<const float> w(weight.data(), kExperts, kExperts);
  const moe::MatrixView<const float> tokens(x.data(), 1, kExperts);

  MOE_ASSIGN_OR_RETURN(
      const auto router,
      moe::Router<float>::Create(
          {.gate = "sharp", .num_experts = kExperts, .top_k = 2, .hidden_size = kExperts}));
  moe::Workspace workspace;
  const auto stream = moe::MakeInlineStream();
  moe::RouterSaved<float> saved;
  const moe::RouterCall<float> call = {.tokens = tokens,
                                       .inputs = {.weight = w},
                                       .workspace = workspace,
                                       .host = workspace,
                                       .stream = *stream};
  MOE_RETURN_IF_ERROR(router->Logits(call, saved));
  MOE_RETURN_IF_ERROR(router->Decide(call, saved, nullptr));
  const moe::Routing& routing = saved.routing;
  const float first = routing.weight[0];
  if (d_x == nullptr) return first;
  std::printf("expert %d weight %.4f, expert %d weight %.4f\n", routing.expert[0],
              routing.weight[0], routing.expert[1], routing.weight[1]);
  const std::vector<float> d_slot = {1, 0};
  d_x->assign(kExperts, 0.0f);
  MOE_RETURN_IF_ERROR(router->Backward(
      {.d_weight = d_slot,
       .weight = w,
       .d_tokens = {d_x->data(), 1, kExperts},
       .gradients = moe::RouterGradients{.weight = moe::GradAccumulator(absl::MakeSpan(d_weight)),
                                         .bias = {}},
       .workspace = workspace,
       .host = workspace,
       .stream = *stream},
      saved));
  return first;
}

absl::Status Run() {
  MOE_RETURN_IF_ERROR(moe::RegisterGate({.name = "sharp", .make = [](const auto& config) {
                                           return std::make_unique<SharpGate>(config.top_k);
                                         }}));
  const std::vector<float> x = {0.5f, -1.0f, 1.2f, 0.1f};
  std::vector<float> gradient;
  MOE_RETURN_IF_ERROR(FirstWeight(x, &gradient).status());
  double largest_error = 0;
  for (int e = 0; e < kExperts; ++e) {
    const float step = 0x1p-8f;
    std::vector<float> above = x, below = x;
    above[e] += step;
    below[e] -= step;
    MOE_ASSIGN_OR_RETURN(const float high, FirstWeight(above, nullptr));
    MOE_ASSIGN_OR_RETURN(const float low, FirstWeight(below, nullptr));
    largest_error = std::fmax(largest_error, std::fabs((high - low) / (2 * step) - gradient[e]));
  }
  // h^2 / 6 times a third derivative below 2, and float32 rounding over 2h.
  if (largest_error > 5e-5) return absl::InternalError("the gradient is wrong");
  std::printf("gradient agrees with differences\n");
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
