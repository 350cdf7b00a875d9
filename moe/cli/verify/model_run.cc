#include <algorithm>
#include <memory>
#include <utility>

#include "comm/mesh/mesh_shape.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tree_cut.h"
#include "moe/cli/base/offload_text.h"
#include "moe/cli/verify/compare.h"
#include "moe/lm/train_config.h"

namespace moe::verify {
namespace {

// By which Problem::tensors and RunResult::tensors are in one order.
enum ModelTensor : size_t {
  kLoss,
  kAuxLoss,
  kGradNorm,
  kDropped,
  kExpertCount,
  kHeldOutLoss,
  kWeights,
  kModelTensors
};

// Adds 64 bits as four numbers that float32 holds.
void AddBits(uint64_t bits, std::vector<float>& values) {
  for (int shift = 48; shift >= 0; shift -= 16) {
    values.push_back(static_cast<float>(bits >> shift & 0xffff));
  }
}

void AddStep(const lm::StepMetrics& step, RunResult& result) {
  result.tensors[kLoss].push_back(step.loss);
  result.tensors[kAuxLoss].push_back(static_cast<float>(step.aux_loss));
  result.tensors[kGradNorm].push_back(static_cast<float>(step.grad_norm));
  result.tensors[kDropped].push_back(static_cast<float>(step.drop_fraction));
  for (const std::vector<int64_t>& layer : step.expert_load) {
    for (const int64_t slots : layer) {
      result.tensors[kExpertCount].push_back(static_cast<float>(slots));
    }
  }
}

// Random bytes: a block that is held out, and more than a step reads to train on.
std::vector<uint8_t> RandomText(const lm::TrainConfig& config, uint64_t seed) {
  const int64_t step =
      config.trainer.micro_batches * config.micro_batch_size * config.sequence_length;
  std::vector<uint8_t> text(3 * lm::kHeldOutBlock + 2 * step);
  for (size_t i = 0; i < text.size(); ++i) {
    const RandomKey key = {.seed = seed, .purpose = RandomPurpose::kShuffle, .item = i};
    text[i] = static_cast<uint8_t>(Uniform(key) * 256);
  }
  return text;
}

}  // namespace

lm::TrainConfig TrainConfigOf(const ProblemSpec& spec, const ProblemRunOptions& options) {
  const Layout& layout = options.layout;
  lm::TrainConfig config = *spec.model;
  config.model.hidden_size = spec.layer.router.hidden_size;
  config.model.moe = spec.layer;
  config.model.moe.dispatcher = {.algorithm = layout.dispatch, .node_size = layout.node_size()};
  config.model.moe.overlap_degree = layout.overlap;
  config.model.recompute = layout.recompute;
  config.evaluation.sequences = config.micro_batch_size;
  TrainerOptions& trainer = config.trainer;
  trainer.dtype = spec.dtype;
  trainer.seed = spec.seed;
  trainer.micro_batches = static_cast<int64_t>(spec.micro_batch_tokens.size());
  trainer.pipeline_schedule = layout.schedule;
  trainer.pipeline_chunks = layout.chunks;
  trainer.zero = layout.zero;
  trainer.offload = cli::ParseOffload(layout.offload).value();
  trainer.bucket_bytes = 4096;
  SessionOptions& session = trainer.session;
  session.device = options.device;
  session.mesh = {.tensor = layout.tensor,
                  .pipeline = layout.pipeline,
                  .expert_tensor = layout.expert_tensor,
                  .expert = layout.expert_parallel};
  session.numerics = options.numerics;
  session.bfloat16_order = options.bfloat16_order;
  const int sharing = std::max(layout.tensor, layout.expert_tensor);
  if (options.fault == Fault::kTreeOrder && sharing > 1) {
    session.tensor_leaves = sharing;
    while (!IsTreeLeaves(session.tensor_leaves)) ++session.tensor_leaves;
  }
  if (options.fault == Fault::kLostMicroBatch && layout.ranks > 1) --trainer.micro_batches;
  return config;
}

absl::StatusOr<Problem> MakeModelProblem(const ProblemSpec& spec) {
  Problem problem = {.spec = spec, .data_seed = spec.seed, .micro_batch_offsets = {0}};
  for (const int64_t tokens : spec.micro_batch_tokens) {
    problem.micro_batch_offsets.push_back(problem.micro_batch_offsets.back() + tokens);
  }
  const lm::TrainConfig config = TrainConfigOf(spec, {});
  MOE_RETURN_IF_ERROR(lm::ValidateTrainConfig(config, 1));
  MOE_ASSIGN_OR_RETURN(lm::Corpus corpus,
                       lm::CorpusOf(RandomText(config, spec.seed), config.sequence_length));
  problem.corpus = std::make_shared<const lm::Corpus>(std::move(corpus));
  const int64_t steps = config.steps;
  int64_t layers = 0;
  for (int l = 0; l < config.model.num_layers; ++l) layers += config.model.has_experts(l) ? 1 : 0;
  const auto per_step = [&](const char* name) {
    return TensorSpec{.name = name, .family = name, .kind = TensorKind::kPerStep, .rows = steps};
  };
  problem.tensors.resize(kModelTensors);
  problem.tensors[kLoss] = per_step("loss");
  problem.tensors[kAuxLoss] = per_step("aux_loss");
  problem.tensors[kGradNorm] = per_step("grad_norm");
  problem.tensors[kDropped] = per_step("dropped");
  problem.tensors[kExpertCount] = {.name = "expert_count",
                                   .family = "expert_count",
                                   .kind = TensorKind::kPerStepExpert,
                                   .rows = steps * layers,
                                   .cols = spec.layer.router.num_outputs(),
                                   .rows_of_step = layers};
  problem.tensors[kHeldOutLoss] = {.name = "val_loss", .family = "val_loss", .rows = 2};
  problem.tensors[kWeights] = {.name = "weights_xxh3", .family = "weights_xxh3", .cols = 4};
  return problem;
}

absl::StatusOr<RunResult> RunModel(const Problem& problem, const ProblemRunOptions& options,
                                   std::unique_ptr<Communicator> world) {
  const bool first = world->rank() == 0;
  RunResult result;
  result.tensors.resize(kModelTensors);
  const lm::TrainHooks hooks = {.on_step = [&](const lm::StepMetrics& step) {
    AddStep(step, result);
    return absl::OkStatus();
  }};
  MOE_ASSIGN_OR_RETURN(
      const lm::TrainReport report,
      lm::Train(TrainConfigOf(problem.spec, options), *problem.corpus, std::move(world), hooks));
  if (!first) return RunResult();
  result.tensors[kHeldOutLoss] = {report.validation_loss_before, report.validation_loss_after};
  result.bfloat16_order = report.bfloat16_order;
  AddBits(report.weights_xxh3, result.tensors[kWeights]);
  return result;
}

}  // namespace moe::verify
