// A model of the program's own in two pipeline stages, each y = x + MoE(x):
//
//   two_stages              four ranks, which are threads: two pipelines, each with half of the
//                           micro-batches
//   mpirun -n 2 two_stages
#include <cmath>
#include <cstdio>
#include <memory>

#include <moe/moe.h>

constexpr int64_t kTokens = 64, kHidden = 16;  // per micro-batch; per token

// The first stage makes x, and the last one computes the loss from y.
struct Stage final : moe::Module<float> {
  std::unique_ptr<moe::MoeLayer<float>> layer;
  bool first = false, last = false;
  moe::PerStash<moe::MatrixView<float>> outputs;  // of the last stage, until Backward
  float loss = 0;                                 // sum over this step's micro-batches

  absl::Span<moe::Parameter* const> parameters() const override { return layer->parameters(); }

  absl::Status Forward(const moe::Pass& pass, moe::MatrixView<const float> x,
                       moe::MatrixView<float> y) override {
    if (first) {
      MOE_ASSIGN_OR_RETURN(const auto made, pass.kept().Matrix<float>(kTokens, kHidden));
      for (int64_t i = 0; i < kTokens * kHidden; ++i) {
        made.data()[i] = std::sin(float(i * i + pass.batch.first_global_token));
      }
      x = made;
    }
    if (last) {
      MOE_ASSIGN_OR_RETURN(y, pass.kept().Matrix<float>(x.rows(), kHidden));
      outputs.Begin(pass.stash) = y;
    }
    MOE_RETURN_IF_ERROR(layer->Forward(pass, x, y));
    return moe::AddRows<float>(x, y, y, *pass.context.compute);
  }

  absl::Status Backward(const moe::Pass& pass, moe::MatrixView<const float> dy,
                        moe::MatrixView<float> dx, moe::GradientReady ready) override {
    if (last) {  // mean of (y - 1)^2 / 2
      const moe::MatrixView<float> y = *outputs.Find(pass.stash);
      const float elements = float(y.rows() * kHidden);
      for (int64_t i = 0; i < y.rows() * kHidden; ++i) {
        const float error = y.data()[i] - 1;
        loss += error * error / 2 / elements;
        y.data()[i] = error / elements;
      }
      dy = y;
    }
    const moe::WorkspaceScope scope(*pass.context.workspace);
    MOE_ASSIGN_OR_RETURN(const auto by_layer,
                         pass.context.workspace->Matrix<float>(dy.rows(), kHidden));
    MOE_RETURN_IF_ERROR(layer->Backward(pass, dy, by_layer, ready));
    return moe::AddRows<float>(dy, by_layer, dx, *pass.context.compute);
  }
};

struct Loop final : moe::RoundHost {
  int64_t RowsOf(const moe::Round& round) const override { return round.empty() ? 0 : kTokens; }
  absl::Status BeginRound(const moe::Round& round, int, moe::Pass& pass) override {
    pass.batch.first_global_token = round.micro_batch() * kTokens;
    return absl::OkStatus();
  }
};

absl::Status Train(std::unique_ptr<moe::Communicator> world) {
  const bool speaks = world->rank() == world->size() - 1;
  const moe::TrainerOptions options = {.session = {.mesh = {.pipeline = 2}}, .micro_batches = 8};
  MOE_ASSIGN_OR_RETURN(const auto trainer, moe::Trainer::Create(options, std::move(world)));
  Stage stage;
  stage.first = trainer->context().mesh->index(moe::MeshGroup::kPipeline) == 0;
  stage.last = !stage.first;
  const moe::MoeLayerConfig config = {.router = {.num_experts = 4, .hidden_size = kHidden},
                                      .ffn_hidden_size = 32};
  MOE_ASSIGN_OR_RETURN(stage.layer,
                       moe::MoeLayer<float>::Create(config, stage.first ? "layers.0." : "layers.1.",
                                                    trainer->parameters(), trainer->context()));
  Loop loop;
  for (int step = 1; step <= 200; ++step) {
    stage.loss = 0;
    MOE_RETURN_IF_ERROR(trainer->RunRounds<float>({{&stage}, kHidden}, loop));
    MOE_RETURN_IF_ERROR(trainer->Step({.learning_rate = 0.01}).status());
    if (speaks && step % 50 == 0) {
      std::printf("step %3d  loss %.4f\n", step, stage.loss / float(trainer->rounds()));
    }
  }
  return absl::OkStatus();
}

int main() {
  return moe::Main(Train);
}
