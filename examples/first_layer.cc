// Trains one mixture-of-experts layer to negate its input: 8 experts, divided over pairs of ranks.
// Started by hand it runs 4 ranks as threads; under mpirun every process is a rank.
#include <cmath>
#include <cstdio>
#include <vector>

#include <moe/moe.h>

constexpr int64_t kTokens = 64, kHidden = 16;  // per rank; per token

absl::Status Train(std::unique_ptr<moe::Communicator> world) {
  const int rank = world->rank();
  const moe::TrainerOptions options = {.session = {.mesh = {.expert = 2}}};
  MOE_ASSIGN_OR_RETURN(const auto trainer, moe::Trainer::Create(options, std::move(world)));
  const moe::MoeLayerConfig config = {
      .router = {.num_experts = 8, .top_k = 2, .hidden_size = kHidden}, .ffn_hidden_size = 32};
  MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("layer.", config));
  std::vector<float> x(kTokens * kHidden), y(x.size()), dy(x.size()), dx(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * i + rank));
  const auto view = [](std::vector<float>& v) {
    return moe::MatrixView<float>(v.data(), kTokens, kHidden);
  };
  for (int step = 1; step <= 200; ++step) {
    MOE_ASSIGN_OR_RETURN(const moe::Round round, trainer->BeginRound());
    MOE_RETURN_IF_ERROR(layer->Forward(round, view(x), view(y)));
    float loss = 0;  // mean of (y + x)^2 / 2
    for (size_t i = 0; i < x.size(); ++i) {
      dy[i] = (y[i] + x[i]) / static_cast<float>(x.size());
      loss += dy[i] * (y[i] + x[i]) / 2;
    }
    MOE_RETURN_IF_ERROR(layer->Backward(round, view(dy), view(dx)));
    MOE_RETURN_IF_ERROR(trainer->Step({.learning_rate = 0.01}).status());
    if (rank == 0 && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, loss);
  }
  return absl::OkStatus();
}

int main() {
  return moe::Main(Train);
}
