#include "moe/lm/train_settings.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

namespace moe::lm {
namespace {

using Rows = std::vector<SettingRow>;
using enum SettingKind;

// Values that older programs, which had no such setting, computed with.
constexpr char kOff[] = "0", kOne[] = "1", kLeftOut[] = "-1";

void AddRows(Rows more, Rows& rows) {
  rows.insert(rows.end(), std::make_move_iterator(more.begin()),
              std::make_move_iterator(more.end()));
}

SettingRow GateRow(MoeLayerConfig& layer) {
  return {"--router", kModel, &layer.router.gate};
}

Rows ShapeRows(MoeLayerConfig& layer) {
  return {
      {"--num-experts", kModel, &layer.router.num_experts},
      {"--moe-ffn-hidden-size", kModel, &layer.ffn_hidden_size},
      {"--moe-shared-expert-intermediate-size", kModel, &layer.shared_expert_ffn_hidden_size},
      {"--moe-shared-expert-gate", kModel, &layer.gated_shared_expert},
      {"--activation", kModel, EnumField(&layer.activation.kind, kActivationWords)},
      {"activation alpha", kModel, &layer.activation.alpha},
      {"activation limit", kModel, &layer.activation.limit},
      {"--moe-projection-biases", kModel, &layer.projection_biases},
  };
}

Rows MovementRows(MoeLayerConfig& layer) {
  return {
      {"--dispatch", kLayout, EnumField(&layer.dispatcher.algorithm, kDispatchWords)},
      {"--node-size", kLayout, &layer.dispatcher.node_size},
      {"--moe-overlap-degree", kLayout, &layer.overlap_degree},
  };
}

Rows RoutingRows(RouterConfig& router) {
  return {
      {"--num-zero-experts", kTrainer, &router.num_zero_experts},
      {"--moe-router-topk", kTrainer, &router.top_k},
      {"--moe-router-score-function", kTrainer,
       EnumField(&router.score_function, kScoreFunctionWords)},
      {"--moe-router-pre-softmax", kTrainer, &router.pre_softmax},
      {"--moe-router-num-groups", kTrainer, &router.num_groups},
      {"--moe-router-group-topk", kTrainer, &router.group_top_k},
      {"--moe-router-topk-scaling-factor", kTrainer, &router.scaling_factor},
      {"norm_topk_prob", kTrainer, &router.norm_topk_prob},
      {"norm_epsilon", kTrainer, &router.norm_epsilon},
      {"--moe-router-enable-expert-bias", kTrainer, &router.expert_bias},
      {"--moe-router-bias-update-rate", kTrainer, &router.bias_update_rate},
      {"--moe-input-jitter-eps", kTrainer, &router.input_jitter},
      {"--moe-router-random-second", kTrainer, &router.random_second_expert},
      {"--moe-router-jitter-eps", kTrainer, &router.router_jitter},
      {"--moe-expert-capacity-factor", kTrainer, &router.capacity_factor},
      {"--moe-token-drop-policy", kTrainer, EnumField(&router.drop_policy, kDropPolicyWords)},
      {"--moe-pad-expert-input-to-capacity", kTrainer, &router.pad_to_capacity},
      {"--moe-token-group", kTrainer, &router.token_group.tokens},
      {"--moe-router-load-balancing-type", kTrainer,
       EnumField(&router.load_balancing, kLoadBalancingWords)},
      {"--moe-aux-loss-coeff", kTrainer, &router.aux_loss_coeff},
      {"--moe-z-loss-coeff", kTrainer, &router.z_loss_coeff},
  };
}

Rows TransformerRows(TransformerConfig& model) {
  const int heads = std::max(1, model.num_attention_heads);
  return {
      {"--vocab-size", kModel, &model.vocab_size},
      {"--hidden-size", kModel, &model.hidden_size},
      {"--num-layers", kModel, &model.num_layers},
      {"--num-attention-heads", kModel, &model.num_attention_heads},
      {"--num-query-groups", kModel, &model.num_query_groups, absl::StrCat(heads)},
      {"--kv-channels", kModel, &model.kv_channels, absl::StrCat(model.hidden_size / heads)},
      {"--add-qkv-bias", kModel, &model.qkv_bias, kOff},
      {"--qk-layernorm", kModel, EnumField(&model.qk_norm, kQkNormWords), kOff},
      {"--tie-word-embeddings", kModel, &model.tied_embeddings, kOff},
      {"--rotary-base", kModel, &model.rotary_base},
      {"--norm-epsilon", kModel, &model.norm_epsilon},
      {"init_std", kModel, &model.init_std},
      {"--moe-layer-freq", kModel, &model.moe_layer_freq},
      {"dense_ffn_hidden_size", kModel, &model.dense_ffn_hidden_size},
  };
}

// No pass reads them: a run may resume with others.
Rows UseRows(TransformerConfig& model) {
  return {
      {"--max-position-embeddings", kTrainer, &model.max_position_embeddings, kOff},
      {"--bos-token-id", kTrainer, &model.bos_token_id, kLeftOut},
      {"--eos-token-id", kTrainer, &model.eos_token_ids},
  };
}

Rows RunRows(TrainConfig& config) {
  TrainerOptions& trainer = config.trainer;
  SessionOptions& session = trainer.session;
  const char* const older_order =
      HasBFloat16Order(trainer) ? NameOf(BFloat16Order::kDot, kBFloat16OrderWords) : kLeftOut;
  return {
      {"--expert-model-parallel-size", kLayout, &session.mesh.expert},
      {"--tensor-model-parallel-size", kLayout, &session.mesh.tensor, kOne},
      {"--expert-tensor-parallel-size", kLayout, &session.mesh.expert_tensor, kOne},
      {"--pipeline-model-parallel-size", kLayout, &session.mesh.pipeline, kOne},
      {"--num-virtual-stages-per-pipeline-rank", kLayout, &trainer.pipeline_chunks, kOne},
      {"--pipeline-layout", kLayout, &config.model.pipeline_layout},
      {"--pipeline-schedule", kLayout, EnumField(&trainer.pipeline_schedule, kScheduleWords), kOne},
      {"--recompute", kLayout, EnumField(&config.model.recompute, kRecomputeWords), kOff},
      {kNumericsVersionName, kNumerics, &kNumericsVersion},
      {"--device", kNumerics, EnumField(&session.device, kDeviceWords)},
      {"--dtype", kNumerics, &trainer.dtype},
      {"--numerics", kNumerics, EnumField(&session.numerics, kNumericsWords)},
      {"--tensor-leaves", kNumerics, &session.tensor_leaves},
      {"--bf16-order", kNumerics, &session.bfloat16_order, older_order},
      {"--grid-unit-log2", kNumerics, &trainer.unit_log2, kLeftOut},
      {"--grouped-gemm", kNumerics, EnumField(&session.grouped_gemm, kGroupedGemmWords)},
      {"--seq-length", kNumerics, &config.sequence_length},
      {"--micro-batch-size", kNumerics, &config.micro_batch_size},
      {"--micro-batches", kNumerics, &trainer.micro_batches},
      {"--reset-position-ids", kTrainer, &config.documents.reset_position_ids, kOff},
      {"--reset-attention-mask", kTrainer, &config.documents.reset_attention_mask, kOff},
      {"--eod-mask-loss", kTrainer, &config.documents.eod_mask_loss, kOff},
      {"--seed", kTrainer, &trainer.seed},
      {"--steps", kLayout, &config.steps},
      {"--eval-interval", kLayout, &config.evaluation.interval},
      {"--eval-sequences", kLayout, &config.evaluation.sequences},
      {"--verify-replicas", kLayout, &config.verify_replicas},
      {"--all-reduce", kLayout, EnumField(&trainer.all_reduce, kAllReduceWords)},
      {"--zero", kLayout, EnumField(&trainer.zero, kZeroWords)},
      {"--offload", kLayout, EnumField(&trainer.offload.optimizer, kOffloadWords), kOff},
      {"--bucket-size-mb", kLayout, &trainer.bucket_bytes},
  };
}

Rows CheckpointRows(TrainCheckpoints& checkpoints) {
  return {
      // How the folder is spelled is each rank's own: OpenFolder finds out whether it is one.
      {"--save", kLayout, GivenField{&checkpoints.folder}},
      {"--save-interval", kLayout, &checkpoints.interval},
      {"--checkpoint-keep", kLayout, &checkpoints.keep},
      {"--checkpoint-keep-every", kLayout, &checkpoints.keep_every},
      {"--checkpoint-async", kLayout, &checkpoints.asynchronous},
      {"--checkpoint-failures", kLayout, &checkpoints.max_failures},
      {"--resume", kLayout, EnumField(&checkpoints.resume, TrainCheckpoints::kResumeWords)},
      {"--allow-numerics-change", kLayout, &checkpoints.allow_numerics_change},
  };
}

Rows OptimizerRows(TrainConfig& config) {
  LearningRateSchedule& schedule = config.schedule;
  OptimizerOptions& optimizer = config.trainer.optimizer;
  LossScaleOptions& scale = config.loss_scale;
  return {
      {"--lr", kOptimizer, &schedule.peak},
      {"--min-lr", kOptimizer, &schedule.minimum},
      {"--lr-warmup-steps", kOptimizer, &schedule.warmup_steps},
      {"--lr-decay-steps", kOptimizer, &schedule.total_steps},
      {"--lr-decay-style", kOptimizer, EnumField(&schedule.decay, kDecayWords)},
      {"--adam-beta1", kOptimizer, &optimizer.beta1},
      {"--adam-beta2", kOptimizer, &optimizer.beta2},
      {"--adam-eps", kOptimizer, &optimizer.epsilon},
      {"--weight-decay", kOptimizer, &optimizer.weight_decay},
      {"--clip-grad", kOptimizer, &optimizer.clip_grad},
      {"--loss-scale", kOptimizer, &scale.constant},
      {"--initial-loss-scale", kOptimizer, &scale.initial},
      {"--min-loss-scale", kOptimizer, &scale.minimum},
      {"--loss-scale-window", kOptimizer, &scale.window},
      {"--hysteresis", kOptimizer, &scale.hysteresis},
  };
}

}  // namespace

SettingRows RowsOf(TrainConfig& config) {
  TransformerConfig& model = config.model;
  Rows rows = RunRows(config);
  AddRows(CheckpointRows(config.checkpoints), rows);
  rows.push_back(GateRow(model.moe));
  AddRows(TransformerRows(model), rows);
  AddRows(ShapeRows(model.moe), rows);
  AddRows(UseRows(model), rows);
  AddRows(MovementRows(model.moe), rows);
  AddRows(RoutingRows(model.moe.router), rows);
  AddRows(OptimizerRows(config), rows);
  return rows;
}

SettingRows RowsOf(MoeLayerConfig& layer) {
  Rows rows = {GateRow(layer)};
  AddRows(ShapeRows(layer), rows);
  AddRows(MovementRows(layer), rows);
  AddRows(RoutingRows(layer.router), rows);
  return rows;
}

}  // namespace moe::lm
