// Trains one mixture-of-experts layer to negate its input: 8 experts, divided over pairs of ranks.
// Started by hand it runs 4 ranks as threads; under mpirun every process is a rank.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <moe/moe.h>

constexpr int64_t kTokens = 64, kHidden = 16;  // of one rank; of one token

absl::Status Train(std::unique_ptr<moe::Communicator> world) {
  const int rank = world->rank(), ranks = world->size();
  MOE_ASSIGN_OR_RETURN(const auto session,
                       moe::Session::Create({.expert_parallel_size = 2}, std::move(world)));
  const moe::Context& context = session->context();
  moe::ParameterStore parameters(moe::DType::kFloat32, /*seed=*/1);
  const moe::MoeLayerConfig config = {
      .router = {.num_experts = 8, .top_k = 2, .hidden_size = kHidden, .aux_loss_coeff = 0.01f},
      .ffn_hidden_size = 32};
  MOE_ASSIGN_OR_RETURN(const auto layer,
                       moe::MoeLayer<float>::Create(config, "layer.", parameters, context));
  MOE_ASSIGN_OR_RETURN(
      const auto reducer,
      moe::GradientReducer::Create({}, parameters, context, session->gradient_stream()));
  MOE_ASSIGN_OR_RETURN(const auto optimizer, moe::Optimizer::Create({}, parameters, context));

  std::vector<float> x(kTokens * kHidden), y(x.size()), dy(x.size()), dx(x.size());
  std::mt19937 random(rank);
  for (float& value : x) value = std::normal_distribution<float>()(random);
  const auto view = [](std::vector<float>& v) {
    return moe::MatrixView<float>(v.data(), kTokens, kHidden);
  };
  for (int step = 1; step <= 200; ++step) {
    moe::WorkspaceScope scratch(*context.workspace);  // gives back what this step takes
    moe::MoeLayerSaved<float> saved;
    moe::RouterStats stats;
    MOE_RETURN_IF_ERROR(reducer->Begin());
    MOE_RETURN_IF_ERROR(layer->Forward(view(x), {.step = step}, view(y), &saved, &stats));
    float loss = 0;  // mean of (y + x)^2 / 2
    for (size_t i = 0; i < x.size(); ++i) {
      dy[i] = (y[i] + x[i]) / static_cast<float>(x.size());
      loss += dy[i] * (y[i] + x[i]) / 2;
    }
    MOE_RETURN_IF_ERROR(
        layer->Backward(view(dy), saved, /*loss_scale=*/1.0f, view(dx),
                        [&](moe::Parameter& parameter) { return reducer->MarkReady(parameter); }));
    MOE_RETURN_IF_ERROR(reducer->Finish());
    MOE_RETURN_IF_ERROR(context.compute->Synchronize());
    MOE_RETURN_IF_ERROR(optimizer->Step(*reducer, 1.0 / ranks, /*learning_rate=*/0.01).status());
    if (rank == 0 && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, loss);
  }
  return absl::OkStatus();
}

void Report(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
}

absl::Status Run() {
  MOE_ASSIGN_OR_RETURN(const moe::LaunchInfo launch, moe::DetectLaunch({}, std::getenv));
  MOE_ASSIGN_OR_RETURN(const moe::WorldPlan plan, moe::PlanWorld({.default_ranks = 4}, launch));
  return moe::RunRanks({.plan = plan, .report = Report}, Train);
}

int main() {
  const absl::Status status = Run();
  if (!status.ok()) Report(status);
  return status.ok() ? 0 : 1;
}
