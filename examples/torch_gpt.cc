// Trains a small GPT of LibTorch, whose feed-forward networks are mixtures of experts, on a text.
// Started by hand it runs 4 ranks as threads (or the number in its argument); under mpirun every
// process is a rank. The weights' hash at the end is the same for any number of ranks.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <moe/checkpoint/training_state.h>
#include <moe/moe.h>
#include <moe/torch.h>

using torch::Tensor;
constexpr int64_t kVocab = 128, kHidden = 32, kHeads = 2, kLayers = 2, kLength = 32, kBatch = 2;
constexpr char kText[] =
    "A gate sends each token to a few of many experts. Each expert is a small network of its own, "
    "and what it returns is weighed by the gate. Ranks hold different experts and exchange tokens.";

struct BlockImpl : torch::nn::Module {
  BlockImpl(const std::shared_ptr<moe::torch::Trainer>& trainer, const std::string& name) {
    using torch::nn::LayerNorm, torch::nn::LayerNormOptions, torch::nn::Linear;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({kHidden})));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({kHidden})));
    qkv = register_module("qkv", Linear(kHidden, 3 * kHidden));
    out = register_module("out", Linear(kHidden, kHidden));
    const moe::MoeLayerConfig config = {
        .router = {.num_experts = 8, .top_k = 2, .hidden_size = kHidden, .aux_loss_coeff = 0.01f},
        .ffn_hidden_size = 64};
    ffn = register_module("moe", moe::torch::MoeFfn(trainer, config, name + ".moe."));
  }
  // x [B, S, H] → {x, the router's loss}
  std::pair<Tensor, Tensor> forward(Tensor x) {
    const auto batch = x.size(0);
    const Tensor parts =
        qkv(norm1(x)).view({batch, kLength, 3, kHeads, kHidden / kHeads}).permute({2, 0, 3, 1, 4});
    const Tensor scores =
        parts[0].matmul(parts[1].transpose(-1, -2)) / std::sqrt(double(kHidden) / kHeads);
    const Tensor past = torch::ones({kLength, kLength}).tril().log();
    const Tensor mixed = torch::softmax(scores + past, -1).matmul(parts[2]);
    x = x + out(mixed.permute({0, 2, 1, 3}).reshape({batch, kLength, kHidden}));
    const auto [y, router] = ffn(norm2(x));
    return {x + y, router};
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr};
  moe::torch::MoeFfn ffn{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const std::shared_ptr<moe::torch::Trainer>& trainer) {
    tokens = register_module("tokens", torch::nn::Embedding(kVocab, kHidden));
    places = register_parameter("places", torch::zeros({kLength, kHidden}));
    for (int64_t l = 0; l < kLayers; ++l) {
      const std::string name = "block" + std::to_string(l);
      blocks.push_back(register_module(name, Block(trainer, name)));
    }
    head = register_module("head", torch::nn::Linear(kHidden, kVocab));
    // The same initial weights in every run: threads share torch's generator.
    const torch::NoGradGuard off;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
    for (auto& item : named_parameters()) {
      if (item.value().dim() < 2 || item.key().find(".moe.") != std::string::npos) continue;
      item.value().normal_(0, 0.1, generator);
    }
    for (auto& block : blocks) {
      block->qkv->bias.zero_();
      block->out->bias.zero_();
    }
    head->bias.zero_();
  }
  // ids [B, S] → {logits [B, S, V], the routers' losses}
  std::pair<Tensor, Tensor> forward(const Tensor& ids) {
    Tensor x = tokens(ids) + places, routers = torch::zeros({});
    for (auto& block : blocks) {
      const auto [y, router] = block(x);
      x = y;
      routers = routers + router;
    }
    return {head(x), routers};
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Linear head{nullptr};
  Tensor places;
  std::vector<Block> blocks;
};
TORCH_MODULE(Gpt);

absl::Status Train(std::unique_ptr<moe::Communicator> world) {
  at::set_num_threads(1);  // torch's bits depend on its number of threads
  const bool first = world->rank() == 0;
  const int ranks = world->size();
  const auto trainer = std::make_shared<moe::torch::Trainer>(
      moe::TrainerOptions{.session = {.mesh = {.expert = ranks % 2 == 0 ? 2 : 1}},
                          .micro_batches = 4},
      std::move(world));
  Gpt model(trainer);
  trainer->Adopt(*model);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  for (int step = 1; step <= 60; ++step) {
    optimizer.zero_grad();
    double loss_here = 0;
    for (int64_t r = 0; r < (*trainer)->rounds(); ++r) {
      const moe::Round round = trainer->BeginRound();
      const int64_t rows = round.empty() ? 0 : kBatch;  // no tokens without a micro-batch
      const Tensor text = torch::empty({rows, kLength + 1}, torch::kInt64);
      for (int64_t i = 0; i < text.numel(); ++i) {
        const int64_t row = (step * 4 + round.micro_batch()) * kBatch + i / (kLength + 1);
        const int64_t at = row * 7919 % (sizeof(kText) - kLength - 1) + i % (kLength + 1);
        text.data_ptr<int64_t>()[i] = kText[at];
      }
      const auto [logits, routers] = model(text.narrow(1, 0, kLength));
      const Tensor loss = torch::nn::functional::cross_entropy(
          logits.reshape({-1, kVocab}), text.narrow(1, 1, kLength).reshape({-1}));
      (loss + routers).backward();
      if (!round.empty()) loss_here = loss.item<double>();
    }
    trainer->Reduce();
    optimizer.step();
    if (first && step % 20 == 0) std::printf("step %2d  loss %.4f\n", step, loss_here);
  }
  moe::TrainingState state((*trainer)->parameters(), (*trainer)->context());
  const auto hash = static_cast<unsigned long long>(state.HashWeights().value());
  if (first) std::printf("weights %016llx\n", hash);
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  return moe::Main(Train, argc > 1 ? std::atoi(argv[1]) : 4);
}
