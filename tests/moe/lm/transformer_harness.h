// Runs one optimiser step's rounds of the reference model in any layout of local ranks.
#ifndef MOE_TESTS_MOE_LM_TRANSFORMER_HARNESS_H_
#define MOE_TESTS_MOE_LM_TRANSFORMER_HARNESS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "moe/lm/stage.h"
#include "moe/run/session.h"
#include "tests/moe/layer_harness.h"

namespace moe::testing {

// A dense layer, then a mixture with a shared expert; every size odd where it may be. Weights are
// large, so that attention and routing are far from uniform.
inline lm::TransformerConfig SmallConfig() {
  lm::TransformerConfig config = {.vocab_size = 11,
                                  .hidden_size = 12,
                                  .num_layers = 2,
                                  .num_attention_heads = 2,
                                  .rotary_base = 100.0f,
                                  .init_std = 0.4,
                                  .moe_layer_freq = 2,
                                  .dense_ffn_hidden_size = 9};
  config.moe.router = {.gate = "mixtral",
                       .num_experts = 5,
                       .top_k = 2,
                       .load_balancing = LoadBalancing::kAuxLoss,
                       .aux_loss_coeff = 0.3f,
                       .z_loss_coeff = 0.1f};
  config.moe.ffn_hidden_size = 7;
  config.moe.shared_expert_ffn_hidden_size = 5;
  return config;
}

// SmallConfig with what the public families add: grouped queries, heads of a width of their own,
// biases, norms of queries and keys, tied embeddings.
inline lm::TransformerConfig GroupedConfig(lm::QkNorm qk_norm) {
  lm::TransformerConfig config = SmallConfig();
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 4;  // 16 columns of queries, of a hidden size of 12
  config.qkv_bias = true;
  config.qk_norm = qk_norm;
  config.tied_embeddings = true;
  return config;
}

// One rank with a model of its own.
template <typename T>
class OneRank {
 public:
  explicit OneRank(const lm::TransformerConfig& config, uint64_t seed = 3)
      : store(DTypeOf<T>::value, seed) {
    session = *Session::Create({}, std::move(MakeLocalWorld({.ranks = 1}).front()));
    auto created = lm::Stage<T>::Create(config, store, session->context());
    EXPECT_TRUE(created.ok()) << created.status();
    model = *std::move(created);
  }
  const Context& context() const { return session->context(); }
  // Memory for the gradients of all parameters.
  void AddSums() {
    for (const auto& p : store.parameters()) {
      p->set_sum(
          [sum = GradAccumulator(absl::MakeSpan(sums.emplace_back(p->size())))] { return sum; });
    }
  }

  std::vector<std::vector<float>> sums;
  std::unique_ptr<Session> session;
  ParameterStore store;
  std::unique_ptr<lm::Stage<T>> model;
};

// A micro-batch through `model`: forward and, with a stash, backward. Losses are in batch.row_loss.
template <typename T>
absl::Status RunPasses(
    lm::Stage<T>& model, const Pass& pass, const lm::TokenBatch& batch,
    GradientReady ready = [](Parameter&) { return absl::OkStatus(); }) {
  MOE_RETURN_IF_ERROR(model.Load(pass, batch));
  MOE_RETURN_IF_ERROR(model.Forward(pass, {}, {}));
  if (pass.stash != nullptr) MOE_RETURN_IF_ERROR(model.Backward(pass, {}, {}, ready));
  return model.TakeLosses(pass);
}

struct NamedTensor {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
};

// The work: micro-batches of whole sequences.
struct ModelWork {
  lm::TransformerConfig config;
  std::vector<std::vector<int64_t>> micro_batches;  // sequence lengths of each
  std::vector<int32_t> tokens, targets;             // those of all micro-batches
  float loss_scale = 1.0f;
  // Masters are rounded to bfloat16, so that models of both types hold the same weights.
  bool bfloat16_weights = false;

  // Offsets of micro-batch b's tokens among all, [micro-batches + 1].
  std::vector<int64_t> TokenOffsets() const;
  // Offsets of the sequences of `micro_batch`, from 0.
  std::vector<int64_t> SequenceOffsets(size_t micro_batch) const;
};

// Random tokens and targets.
ModelWork MakeModelWork(const lm::TransformerConfig& config,
                        std::vector<std::vector<int64_t>> micro_batches);

// Everything the model computes, put together from all ranks.
struct ModelResult {
  std::vector<float> row_loss;  // one per token
  std::map<std::string, NamedTensor> weights;
  Tensors gradients;                            // summed over micro-batches
  std::vector<std::vector<std::string>> ready;  // [rank] names, in order, every round
  double aux_loss = 0, z_loss = 0;              // sums over micro-batches
};

// Initial ones and zeros (norms, biases) are moved away: otherwise no test would see them.
template <typename T>
ModelResult RunModel(const ModelWork& work, const Layout& layout, Numerics numerics);

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LM_TRANSFORMER_HARNESS_H_
