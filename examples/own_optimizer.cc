// The layer of first_layer.cc followed by a bias, in a program with its own memory and Adam:
// weights are stored in the former and updated by the latter. The trainer sums gradients over
// ranks.
#include <cmath>
#include <cstdio>
#include <vector>

#include <moe/moe.h>

constexpr int64_t kTokens = 64, kHidden = 16;  // per rank; per token

// A parameter of moe whose memory, gradient and moments belong to the program.
struct Weight {
  moe::Parameter* parameter;
  std::vector<float> value, gradient, m, v;

  explicit Weight(moe::Parameter* held)
      : parameter(held),
        value(held->master().begin(), held->master().end()),  // moe's initial values
        gradient(value.size()),
        m(value.size()),
        v(value.size()) {}

  void Adam(int step, float learning_rate) {
    const float keep_m = 1 - std::pow(0.9f, float(step)),
                keep_v = 1 - std::pow(0.999f, float(step));
    for (size_t i = 0; i < value.size(); ++i) {
      m[i] = 0.9f * m[i] + 0.1f * gradient[i];
      v[i] = 0.999f * v[i] + 0.001f * gradient[i] * gradient[i];
      value[i] -= learning_rate * (m[i] / keep_m) / (std::sqrt(v[i] / keep_v) + 1e-8f);
    }
  }
};

absl::Status Train(std::unique_ptr<moe::Communicator> world) {
  const int rank = world->rank();
  const moe::TrainerOptions options = {.session = {.mesh = {.expert = 2}}};
  MOE_ASSIGN_OR_RETURN(const auto trainer, moe::Trainer::Create(options, std::move(world)));
  const moe::MoeLayerConfig config = {
      .router = {.num_experts = 8, .top_k = 2, .hidden_size = kHidden}, .ffn_hidden_size = 32};
  MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("layer.", config));
  MOE_ASSIGN_OR_RETURN(
      moe::Parameter* const bias,
      trainer->AddParameter(
          {.name = "bias", .cols = kHidden, .initializer = moe::Initializer::kZeros}));
  std::vector<Weight> weights;  // router, this rank's experts, bias
  for (const auto& parameter : trainer->parameters().parameters()) {
    weights.emplace_back(parameter.get());
  }
  for (Weight& weight : weights) {
    MOE_RETURN_IF_ERROR(
        trainer->parameters().Adopt(*weight.parameter, absl::MakeSpan(weight.value)));
  }

  std::vector<float> x(kTokens * kHidden), y(x.size()), dy(x.size()), dx(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * i + rank));
  const auto view = [](std::vector<float>& v) {
    return moe::MatrixView<float>(v.data(), kTokens, kHidden);
  };
  for (int step = 1; step <= 200; ++step) {
    MOE_ASSIGN_OR_RETURN(const moe::Round round, trainer->BeginRound());
    MOE_RETURN_IF_ERROR(layer->Forward(round, view(x), view(y)));
    const absl::Span<const float> b = bias->vector();  // the program's memory
    std::vector<float> db(kHidden);
    float loss = 0;  // mean of (y + b + x - 1)^2 / 2 over this rank's rows
    for (size_t i = 0; i < x.size(); ++i) {
      dy[i] = (y[i] + b[i % kHidden] + x[i] - 1) / static_cast<float>(x.size());
      db[i % kHidden] += dy[i];
      loss += dy[i] * dy[i] * static_cast<float>(x.size()) / 2;
    }
    MOE_RETURN_IF_ERROR(layer->Backward(round, view(dy), view(dx)));
    MOE_RETURN_IF_ERROR(trainer->AddGradient(*bias, db));
    MOE_RETURN_IF_ERROR(trainer->Reduce());
    MOE_RETURN_IF_ERROR(trainer->ClipGradNorm(1).status());
    for (Weight& weight : weights) {  // the mean over all ranks
      MOE_RETURN_IF_ERROR(trainer->Gradient(*weight.parameter, absl::MakeSpan(weight.gradient)));
    }
    MOE_RETURN_IF_ERROR(trainer->context().compute->Synchronize());
    for (Weight& weight : weights) weight.Adam(step, 0.01f);
    MOE_RETURN_IF_ERROR(trainer->EndStep());
    if (rank == 0 && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, loss);
  }
  return absl::OkStatus();
}

int main() {
  return moe::Main(Train);
}
