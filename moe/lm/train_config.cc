#include "moe/lm/train_config.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "kernels/base/divisors.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/lm/evaluation.h"
#include "moe/tensor/tensor_share.h"

namespace moe::lm {

bool NeedsWholeMicroBatches(const TrainConfig& config) {
  const RouterConfig& router = config.model.moe.router;
  return router.pad_to_capacity || router.token_group.tokens > 0;
}

TransformerConfig ModelConfig(const TrainConfig& config) {
  TransformerConfig model = config.model;
  model.moe.router.micro_batch_tokens =
      NeedsWholeMicroBatches(config) ? config.micro_batch_size * config.sequence_length : 0;
  model.moe.router.seed = config.trainer.seed;
  return model;
}

absl::StatusOr<std::unique_ptr<Trainer>> CreateTrainer(const TrainConfig& config,
                                                       std::unique_ptr<Communicator> world) {
  TrainerOptions options = config.trainer;
  options.session.overlap_exchange = config.model.moe.overlap_degree > 1;
  if (config.trace_last_step > 0) options.session.trace_capacity = kTraceEvents;
  return Trainer::Create(options, std::move(world));
}

absl::Status CheckTextLength(const TrainConfig& config, const Corpus& corpus) {
  const int64_t batch = config.trainer.micro_batches * config.micro_batch_size;
  const int64_t sequences = SequenceCount(corpus.train, config.sequence_length);
  if (sequences < batch) {
    return absl::InvalidArgumentError(
        absl::StrCat("the training text has ", sequences, " sequences of ", config.sequence_length,
                     " ", corpus.unit, "s, expected at least one global batch of ", batch,
                     ": lower --micro-batches or --micro-batch-size"));
  }
  if (EvaluationSequences(config, corpus.held_out, config.evaluation.sequences) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the held-out text has ", SequenceCount(corpus.held_out, config.sequence_length),
        " sequences of ", config.sequence_length, " ", corpus.unit, "s and --eval-sequences is ",
        config.evaluation.sequences, ", expected at least one micro-batch of ",
        config.micro_batch_size, ": lower --micro-batch-size"));
  }
  return absl::OkStatus();
}

absl::Status CheckTraceSteps(const TrainConfig& config) {
  if (config.trace_last_step > 0 &&
      (config.trace_first_step < 1 || config.trace_last_step < config.trace_first_step)) {
    return absl::InvalidArgumentError(absl::StrCat("traced steps are ", config.trace_first_step,
                                                   " to ", config.trace_last_step,
                                                   ", expected the first from 1 to the last"));
  }
  return absl::OkStatus();
}

absl::Status CheckRecords(const TrainConfig& config, const TrainHooks& hooks, Communicator& world,
                          Stream& stream) {
  const bool first = world.rank() == 0;
  const int64_t no_routing = first && config.record_routing && !hooks.on_routing ? 1 : 0;
  const int64_t no_trace = first && config.trace_last_step > 0 && hooks.trace == nullptr ? 1 : 0;
  const int64_t record = config.record_routing ? 1 : 0;
  MOE_ASSIGN_OR_RETURN(const auto extremes,
                       ExtremesOverRanks({record, config.trace_first_step, config.trace_last_step,
                                          no_routing, no_trace},
                                         world, stream));
  const char* const kNames[] = {"--record-routing", "--trace or --profile-step-start",
                                "--trace or --profile-step-end"};
  for (int i = 0; i < 3; ++i) {
    if (extremes[i].same()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("ranks were given a different ", kNames[i],
                     ", expected the same on all: as a flag, or in the environment of every host"));
  }
  if (extremes[3].most > 0) {
    return absl::InvalidArgumentError("record_routing without an on_routing hook");
  }
  if (extremes[4].most > 0) {
    return absl::InvalidArgumentError("trace_last_step without a trace hook");
  }
  return absl::OkStatus();
}

namespace {

absl::Status CheckDivides(const char* flag, int size, int ranks, const char* what) {
  if (size >= 1 && ranks % size == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, " is ", size, ", expected a divisor of the ",
                                                 ranks, " ", what, ": ", DivisorsOf(ranks)));
}

}  // namespace

absl::Status CheckExpertParallelSize(int size, int ranks) {
  return CheckDivides("--ep", size, ranks, "ranks");
}

namespace {

absl::Status AtLeast(int64_t least, const char* flag, int64_t value) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " is ", value, ", expected at least ", least));
}

// That each rank has some of what ranks share.
absl::Status CheckShares(const TrainConfig& config) {
  const SessionOptions& session = config.trainer.session;
  const TransformerConfig& model = config.model;
  const int64_t shared = model.moe.shared_expert_ffn_hidden_size;
  const int tensor = session.mesh.tensor, expert_tensor = session.mesh.expert_tensor;
  const struct {
    const char* name;
    int64_t extent, item;  // no extent: there is none
    int ranks;
    const char* flag = "--tp";
  } cuts[] = {
      {"heads of keys", model.key_value_heads(), 1, tensor},
      {"columns of dense layers", model.moe_layer_freq > 1 ? model.dense_width() : 0, kCutItem,
       tensor},
      {"columns of the shared expert", shared, kCutItem, tensor},
      {"tokens of --vocab-size", model.tied_embeddings ? 0 : model.vocab_size, kCutItem, tensor},
      {"columns of experts", model.moe.ffn_hidden_size, kCutItem, expert_tensor, "--etp"}};
  for (const auto& cut : cuts) {
    if (cut.extent == 0) continue;
    const TreeCut whole = {session.tensor_leaves, cut.extent, cut.item};
    const int most = MostRanks(whole, cut.ranks);
    if (most == cut.ranks) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(cut.flag, " is ", cut.ranks, " and --tensor-leaves ", whole.leaves, " of ",
                     cut.extent, " ", cut.name, cut.item > 1 ? absl::StrCat(" by ", cut.item) : "",
                     ", expected some for each rank: ", cut.flag, " ", most));
  }
  return absl::OkStatus();
}

// Stages, their chunks, and a layer for each.
absl::Status CheckPipelineSettings(const TrainConfig& config, int ranks) {
  const int stages = config.trainer.session.mesh.pipeline;
  MOE_RETURN_IF_ERROR(AtLeast(1, "--pp", stages));
  MOE_RETURN_IF_ERROR(CheckDivides("--pp", stages, ranks, "ranks"));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--vp", config.trainer.pipeline_chunks));
  const PipelineShape shape = PipelineOf(config.trainer);
  if (stages == 1 && shape.chunks > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--vp is ", shape.chunks, " with --pp 1, expected 1, or more stages"));
  }
  MOE_RETURN_IF_ERROR(CheckPipeline(shape));
  if (shape.schedule == ScheduleKind::k1F1BOverlap &&
      config.model.moe.dispatcher.algorithm == DispatchAlgorithm::kDirect) {
    return absl::InvalidArgumentError(
        "--dispatch is direct with --pipeline-schedule 1f1b-overlap, expected staged or "
        "hierarchical");
  }
  if (shape.parts() > 1 && config.model.num_layers < shape.parts()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--num-layers is ", config.model.num_layers, " with --pp ", stages, " and --vp ",
        shape.chunks, ", expected at least ", shape.parts(), ", a layer for each part"));
  }
  return CheckPipelineLayout(config.model, shape.parts());
}

}  // namespace

absl::Status CheckBatch(const TrainConfig& config) {
  MOE_RETURN_IF_ERROR(AtLeast(1, "--seq-length", config.sequence_length));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--micro-batch-size", config.micro_batch_size));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--micro-batches", config.trainer.micro_batches));
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  int64_t tokens = 0;
  if (!__builtin_mul_overflow(config.micro_batch_size, config.sequence_length, &tokens) &&
      tokens <= kMostTokens &&
      !__builtin_mul_overflow(tokens, config.trainer.micro_batches, &tokens)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--micro-batch-size is ", config.micro_batch_size, " at --seq-length ",
                   config.sequence_length, " and ", config.trainer.micro_batches,
                   " --micro-batches, expected at most ", kMostTokens,
                   " tokens in a micro-batch and fewer than 2^63 in a step"));
}

absl::Status ValidateTrainConfig(const TrainConfig& config, int ranks) {
  if (config.documents.any() && config.model.eos_token_ids.empty()) {
    const DocumentOptions& documents = config.documents;
    return absl::InvalidArgumentError(
        absl::StrCat(documents.reset_position_ids     ? "--reset-position-ids"
                     : documents.reset_attention_mask ? "--reset-attention-mask"
                                                      : "--eod-mask-loss",
                     " without --eos-token-id, expected the ids that end a document"));
  }
  MOE_RETURN_IF_ERROR(AtLeast(1, "--steps", config.steps));
  MOE_RETURN_IF_ERROR(CheckBatch(config));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--threads", config.trainer.session.threads));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--eval-sequences", config.evaluation.sequences));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--ep", config.trainer.session.mesh.expert));
  MOE_RETURN_IF_ERROR(AtLeast(0, "--verify-replicas", config.verify_replicas));
  const int ep = config.trainer.session.mesh.expert;
  MOE_RETURN_IF_ERROR(CheckPipelineSettings(config, ranks));
  const int stages = config.trainer.session.mesh.pipeline;
  MOE_RETURN_IF_ERROR(
      CheckDivides("--ep", ep, ranks / stages, stages == 1 ? "ranks" : "ranks of a stage"));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--tp", config.trainer.session.mesh.tensor));
  MOE_RETURN_IF_ERROR(AtLeast(1, "--etp", config.trainer.session.mesh.expert_tensor));
  MOE_RETURN_IF_ERROR(CheckMesh(config.trainer.session, ranks));
  MOE_RETURN_IF_ERROR(CheckBFloat16Order(config.trainer));
  const DispatcherOptions& dispatcher = config.model.moe.dispatcher;
  if (dispatcher.algorithm == DispatchAlgorithm::kHierarchical && dispatcher.node_size != 0 &&
      (dispatcher.node_size < 0 || ep % dispatcher.node_size != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--node-size is ", dispatcher.node_size,
                     ", expected 0 (nodes are hosts) or a divisor of --ep ", ep));
  }
  MOE_RETURN_IF_ERROR(AtLeast(1, "--moe-overlap-degree", config.model.moe.overlap_degree));
  if (!(config.schedule.peak > 0) || config.schedule.minimum < 0 ||
      config.schedule.minimum > config.schedule.peak) {
    return absl::InvalidArgumentError(absl::StrCat("--lr is ", config.schedule.peak,
                                                   " and --min-lr ", config.schedule.minimum,
                                                   ", expected 0 <= min-lr <= lr and lr > 0"));
  }
  if (!IsStorageType(config.trainer.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype is ", NameOf(config.trainer.dtype), ", expected f32, bf16 or f16"));
  }
  MOE_RETURN_IF_ERROR(ValidateLossScale(config.loss_scale));
  MOE_RETURN_IF_ERROR(ValidateTransformerConfig(ModelConfig(config)));
  return CheckShares(config);
}

}  // namespace moe::lm
