#include "moe/lm/agreement.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <absl/strings/str_cat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "comm/extremes.h"
#include "kernels/base/status_macros.h"

namespace moe::lm {
namespace {

// One int64 of equal values, another of others (of a string, almost always).
struct Fields {
  std::vector<const char*> names;
  std::vector<int64_t> values;

  template <typename V>
  void Add(const char* name, const V& value) {
    names.push_back(name);
    if constexpr (std::is_floating_point_v<V>) {
      values.push_back(std::bit_cast<int64_t>(static_cast<double>(value)));
    } else if constexpr (std::is_same_v<V, std::string>) {
      values.push_back(std::bit_cast<int64_t>(XXH3_64bits(value.data(), value.size())));
    } else {
      values.push_back(static_cast<int64_t>(value));
    }
  }
};

// What presets others, as --router does, comes before them: it is the one to be named.
void AddModel(const TransformerConfig& model, Fields& fields) {
  const MoeLayerConfig& moe = model.moe;
  fields.Add("--router", moe.router.gate);
  fields.Add("vocab_size", model.vocab_size);
  fields.Add("--hidden-size", model.hidden_size);
  fields.Add("--num-layers", model.num_layers);
  fields.Add("--num-attention-heads", model.num_attention_heads);
  fields.Add("rotary_base", model.rotary_base);
  fields.Add("norm_epsilon", model.norm_epsilon);
  fields.Add("init_std", model.init_std);
  fields.Add("--moe-layer-freq", model.moe_layer_freq);
  fields.Add("dense_ffn_hidden_size", model.dense_ffn_hidden_size);
  fields.Add("--num-experts", moe.router.num_experts);
  fields.Add("--moe-ffn-hidden-size", moe.ffn_hidden_size);
  fields.Add("--moe-shared-expert-intermediate-size", moe.shared_expert_ffn_hidden_size);
  fields.Add("--moe-shared-expert-gate", moe.gated_shared_expert);
  fields.Add("--activation", moe.activation.kind);
  fields.Add("activation alpha", moe.activation.alpha);
  fields.Add("activation limit", moe.activation.limit);
  fields.Add("--moe-projection-biases", moe.projection_biases);
  fields.Add("--dispatch", moe.dispatcher.algorithm);
  fields.Add("--node-size", moe.dispatcher.node_size);
  fields.Add("--moe-overlap-degree", moe.overlap_degree);
}

void AddRouter(const RouterConfig& router, Fields& fields) {
  fields.Add("--num-zero-experts", router.num_zero_experts);
  fields.Add("--moe-router-topk", router.top_k);
  fields.Add("--moe-router-score-function", router.score_function);
  fields.Add("--moe-router-pre-softmax", router.pre_softmax);
  fields.Add("--moe-router-num-groups", router.num_groups);
  fields.Add("--moe-router-group-topk", router.group_top_k);
  fields.Add("--moe-router-topk-scaling-factor", router.scaling_factor);
  fields.Add("norm_topk_prob",
             router.norm_topk_prob.has_value() ? static_cast<int>(*router.norm_topk_prob) : -1);
  fields.Add("norm_epsilon", router.norm_epsilon.value_or(-1.0f));
  fields.Add("--moe-router-enable-expert-bias", router.expert_bias);
  fields.Add("--moe-router-bias-update-rate", router.bias_update_rate);
  fields.Add("--moe-input-jitter-eps", router.input_jitter);
  fields.Add("--moe-router-random-second", router.random_second_expert);
  fields.Add("--moe-expert-capacity-factor", router.capacity_factor.value_or(-1.0));
  fields.Add("--moe-token-drop-policy", router.drop_policy);
  fields.Add("--moe-pad-expert-input-to-capacity", router.pad_to_capacity);
  fields.Add("--moe-token-group", router.token_group.tokens);
  fields.Add("--moe-router-load-balancing-type", router.load_balancing);
  fields.Add("--moe-aux-loss-coeff", router.aux_loss_coeff);
  fields.Add("--moe-z-loss-coeff", router.z_loss_coeff);
}

void AddOptimizer(const TrainConfig& config, Fields& fields) {
  fields.Add("--lr", config.schedule.peak);
  fields.Add("--min-lr", config.schedule.minimum);
  fields.Add("--lr-warmup-steps", config.schedule.warmup_steps);
  fields.Add("--lr-decay-steps", config.schedule.total_steps);
  fields.Add("--lr-decay-style", config.schedule.decay);
  fields.Add("--adam-beta1", config.optimizer.beta1);
  fields.Add("--adam-beta2", config.optimizer.beta2);
  fields.Add("--adam-eps", config.optimizer.epsilon);
  fields.Add("--weight-decay", config.optimizer.weight_decay);
  fields.Add("--clip-grad", config.optimizer.clip_grad);
  fields.Add("--loss-scale", config.loss_scale.constant);
  fields.Add("--initial-loss-scale", config.loss_scale.initial);
  fields.Add("--min-loss-scale", config.loss_scale.minimum);
  fields.Add("--loss-scale-window", config.loss_scale.window);
  fields.Add("--hysteresis", config.loss_scale.hysteresis);
}

Fields FieldsOf(const TrainConfig& config, const Corpus& corpus) {
  Fields fields;
  fields.Add("--expert-model-parallel-size", config.expert_parallel_size);
  fields.Add("--device", config.device);
  fields.Add("--dtype", config.dtype);
  fields.Add("--numerics", config.numerics);
  fields.Add("--grouped-gemm", config.grouped_gemm);
  fields.Add("--seed", config.seed);
  fields.Add("--seq-length", config.sequence_length);
  fields.Add("--micro-batch-size", config.micro_batch_size);
  fields.Add("--micro-batches", config.micro_batches);
  fields.Add("--steps", config.steps);
  fields.Add("--eval-interval", config.eval_interval);
  fields.Add("--eval-sequences", config.eval_sequences);
  fields.Add("--verify-replicas", config.verify_replicas);
  fields.Add("--all-reduce", config.all_reduce);
  fields.Add("--bucket-size-mb", config.bucket_bytes);
  AddModel(config.model, fields);
  AddRouter(config.model.moe.router, fields);
  AddOptimizer(config, fields);
  fields.Add("text (--data)", HashText(corpus));
  return fields;
}

}  // namespace

absl::Status CheckAgreement(const TrainConfig& config, const Corpus& corpus, Communicator& world) {
  const auto stream = MakeInlineStream();
  const Fields fields = FieldsOf(config, corpus);
  MOE_ASSIGN_OR_RETURN(const auto extremes, ExtremesOverRanks(fields.values, world, *stream));
  for (size_t i = 0; i < extremes.size(); ++i) {
    if (extremes[i].same()) continue;
    // The first rank of either value; all ranks are at the same i.
    const int64_t rank = world.rank(), none = std::numeric_limits<int64_t>::max();
    const int64_t has[] = {fields.values[i] == extremes[i].least ? rank : none,
                           fields.values[i] == extremes[i].most ? rank : none};
    MOE_ASSIGN_OR_RETURN(const auto ranks, ExtremesOverRanks(has, world, *stream));
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks ", std::min(ranks[0].least, ranks[1].least), " and ",
        std::max(ranks[0].least, ranks[1].least), " were given a different ", fields.names[i],
        ", expected the same on all: as a flag, or in the environment of every host"));
  }
  return absl::OkStatus();
}

}  // namespace moe::lm
