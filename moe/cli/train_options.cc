#include "moe/cli/train_options.h"

#include <algorithm>
#include <limits>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "gating/gate.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/common_settings.h"
#include "moe/cli/config_file.h"
#include "moe/cli/launch.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/train_batch.h"
#include "moe/cli/train_settings.h"

namespace moe::cli {
namespace {

constexpr int64_t kDefaultTraceSteps = 10;

absl::StatusOr<lm::TransformerConfig> ModelOf(const Settings& settings) {
  lm::TransformerConfig model;
  model.hidden_size = settings.integer("hidden-size");
  model.num_layers = settings.integer("num-layers");
  model.num_attention_heads = settings.integer("num-attention-heads");
  model.moe_layer_freq = settings.integer("moe-layer-freq");
  MOE_ASSIGN_OR_RETURN(model.moe, LayerConfigOf(settings));
  model.moe.dispatcher = DispatcherOf(settings);
  model.moe.overlap_degree = settings.integer("moe-overlap-degree");
  return model;
}

void SetOptimizer(const Settings& settings, lm::TrainConfig& train) {
  train.schedule = {.peak = settings.real("lr"),
                    .minimum = settings.real("min-lr"),
                    .warmup_steps = settings.integer("lr-warmup-steps"),
                    .total_steps = settings.empty("lr-decay-steps")
                                       ? train.steps
                                       : settings.integer("lr-decay-steps")};
  train.optimizer = {.beta1 = static_cast<float>(settings.real("adam-beta1")),
                     .beta2 = static_cast<float>(settings.real("adam-beta2")),
                     .epsilon = static_cast<float>(settings.real("adam-eps")),
                     .weight_decay = static_cast<float>(settings.real("weight-decay")),
                     .clip_grad = settings.real("clip-grad")};
  train.loss_scale = {.constant = settings.real("loss-scale"),
                      .initial = settings.real("initial-loss-scale"),
                      .minimum = settings.real("min-loss-scale"),
                      .window = settings.integer("loss-scale-window"),
                      .hysteresis = settings.integer("hysteresis")};
}

absl::StatusOr<GroupedGemmKernel> GroupedGemmOf(const Settings& settings) {
  const std::string& name = settings.text("grouped-gemm");
  if (name == "auto") return GroupedGemmKernel::kAuto;
  if (!settings.is("device", "cuda")) {
    return WrongFlag("--grouped-gemm", name, "auto: it chooses among the products of a GPU");
  }
  if (name == "wgmma") {
    return absl::UnimplementedError(
        "--grouped-gemm is wgmma, expected auto, cublas or mma: this build has no such kernel");
  }
  if (name == "mma") return GroupedGemmKernel::kMma;
  if (settings.is("numerics", "fast")) return GroupedGemmKernel::kCublas;
  return WrongFlag("--grouped-gemm", name,
                   "auto or mma, or --numerics fast: rows by cuBLAS depend on how many there are");
}

absl::StatusOr<lm::TrainConfig> TrainConfigOf(const Settings& settings, const World& world) {
  lm::TrainConfig train;
  MOE_ASSIGN_OR_RETURN(train.model, ModelOf(settings));
  train.dtype = ComputeTypeOf(settings);
  train.numerics = settings.is("numerics", "fast") ? Numerics::kFast : Numerics::kLayoutInvariant;
  if (settings.is("device", "cuda")) train.device = DeviceKind::kCuda;
  MOE_ASSIGN_OR_RETURN(train.grouped_gemm, GroupedGemmOf(settings));
  train.sequence_length = settings.integer("seq-length");
  MOE_ASSIGN_OR_RETURN(const BatchSizes batch, ResolveBatch(settings, world.ranks));
  train.micro_batch_size = batch.micro_batch_size;
  train.micro_batches = batch.micro_batches;
  train.model.moe.router.micro_batch_tokens = batch.micro_batch_size * train.sequence_length;
  train.steps = settings.integer("steps");
  train.seed = settings.seed("seed");
  SetOptimizer(settings, train);
  train.all_reduce = settings.is("all-reduce", "direct")    ? AllReduceAlgorithm::kDirect
                     : settings.is("all-reduce", "library") ? AllReduceAlgorithm::kLibrary
                                                            : AllReduceAlgorithm::kRing;
  train.bucket_bytes = static_cast<int64_t>(settings.real("bucket-size-mb") * 0x1p20);
  train.expert_parallel_size = settings.integer("expert-model-parallel-size");
  train.threads = settings.is("threads", "auto")
                      ? std::max(1, world.cores / std::max(1, world.local_ranks))
                      : settings.integer("threads");
  train.log_interval = settings.integer("log-interval");
  train.eval_interval = settings.integer("eval-interval");
  train.eval_sequences = settings.integer("eval-sequences");
  train.verify_replicas = settings.integer("verify-replicas");
  train.record_routing = !settings.empty("record-routing");
  if (!settings.empty("trace")) {
    train.trace_first_step = settings.integer("profile-step-start");
    train.trace_last_step = settings.empty("profile-step-end")
                                ? train.trace_first_step + kDefaultTraceSteps - 1
                                : settings.integer("profile-step-end");
  }
  return train;
}

absl::Status CheckTraceSteps(const Settings& settings, const lm::TrainConfig& train) {
  if (settings.empty("trace")) return absl::OkStatus();
  const int64_t first = train.trace_first_step;
  if (first < 1 || first > train.steps) {
    return WrongFlag("--profile-step-start", settings.text("profile-step-start"),
                     absl::StrCat("a step from 1 to --steps, ", train.steps));
  }
  if (train.trace_last_step >= first) return absl::OkStatus();
  return WrongFlag("--profile-step-end", settings.text("profile-step-end"),
                   absl::StrCat("at least --profile-step-start, ", first));
}

// What ValidateTrainConfig does not look at.
absl::Status CheckProgram(const Settings& settings, const World& world,
                          const lm::TrainConfig& train) {
  const auto at_least = [&](const char* name, int least) {
    const std::string& text = settings.text(name);
    return settings.integer(name) >= least
               ? absl::OkStatus()
               : WrongFlag(absl::StrCat("--", name), text, absl::StrCat("at least ", least));
  };
  MOE_RETURN_IF_ERROR(at_least("log-interval", 1));
  MOE_RETURN_IF_ERROR(at_least("eval-interval", 0));
  MOE_RETURN_IF_ERROR(at_least("node-size", 0));
  MOE_RETURN_IF_ERROR(at_least("lr-warmup-steps", 0));
  if (!settings.empty("lr-decay-steps") && train.schedule.total_steps < 1) {
    return WrongFlag("--lr-decay-steps", settings.text("lr-decay-steps"), "at least 1");
  }
  const auto in_unit = [&](const char* name) {
    const double value = settings.real(name);
    return value >= 0 && value < 1
               ? absl::OkStatus()
               : WrongFlag(absl::StrCat("--", name), settings.text(name), "0 <= beta < 1");
  };
  MOE_RETURN_IF_ERROR(in_unit("adam-beta1"));
  MOE_RETURN_IF_ERROR(in_unit("adam-beta2"));
  for (const char* name : {"weight-decay", "clip-grad", "adam-eps"}) {
    if (settings.real(name) < 0) {
      return WrongFlag(absl::StrCat("--", name), settings.text(name), "0 or more");
    }
  }
  if (settings.real("comm-timeout") <= 0) {
    return WrongFlag("--comm-timeout", settings.text("comm-timeout"), "more than 0");
  }
  if (train.bucket_bytes < 1) {
    return WrongFlag("--bucket-size-mb", settings.text("bucket-size-mb"), "at least 1e-6, a byte");
  }
  return CheckAllReduce(settings, world.backend);
}

absl::Status CheckSizes(const lm::TrainConfig& train) {
  const double batch = static_cast<double>(train.micro_batches) *
                       static_cast<double>(train.micro_batch_size) *
                       static_cast<double>(train.sequence_length);
  if (batch > kMostElements) {
    return WrongFlag("a step", absl::StrCat(batch, " tokens"), "at most 1e12");
  }
  const lm::TransformerConfig& model = train.model;
  const auto hidden = static_cast<double>(model.hidden_size);
  const double widest = std::max(
      {static_cast<double>(model.moe.ffn_hidden_size) * std::max(model.moe.router.num_experts, 1),
       static_cast<double>(model.moe.shared_expert_ffn_hidden_size), 4 * hidden});
  const double parameters = 3 * hidden * widest * model.num_layers;
  if (parameters > kMostElements) {
    return WrongFlag("the model", absl::StrCat("about ", parameters, " parameters"),
                     "at most 1e12");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Settings> LoadTrainSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings) {
  Settings settings(TrainSettings());
  MOE_RETURN_IF_ERROR(LoadSettings(args, environment, settings, warnings));
  if (settings.on("help")) return settings;
  MOE_RETURN_IF_ERROR(ApplyRouterPreset(settings));
  return settings;
}

absl::StatusOr<TrainOptions> MakeTrainOptions(const Settings& settings, const World& world) {
  TrainOptions options;
  MOE_ASSIGN_OR_RETURN(options.train, TrainConfigOf(settings, world));
  MOE_RETURN_IF_ERROR(CheckProgram(settings, world, options.train));
  if (const absl::Status status = lm::ValidateTrainConfig(options.train, world.ranks);
      !status.ok()) {
    return absl::InvalidArgumentError(InFlags(status.message(), settings));
  }
  MOE_RETURN_IF_ERROR(CheckSizes(options.train));
  MOE_RETURN_IF_ERROR(CheckTraceSteps(settings, options.train));
  options.data = settings.value("data").texts;
  options.out = settings.text("out");
  options.trace = settings.text("trace");
  options.record_routing = settings.text("record-routing");
  options.ranks = world.ranks;
  options.comm_timeout = absl::Seconds(settings.real("comm-timeout"));
  if (options.data.empty()) {
    return absl::InvalidArgumentError("--data is missing, expected a text file or a folder");
  }
  return options;
}

ModelSize SizeOf(const lm::TransformerConfig& config) {
  const int64_t hidden = config.hidden_size;
  const MoeLayerConfig& moe = config.moe;
  const int64_t matrices = IsGated(moe.activation) ? 3 : 2;
  const int64_t biases = moe.projection_biases ? (matrices - 1) * moe.ffn_hidden_size + hidden : 0;
  const int64_t expert = matrices * hidden * moe.ffn_hidden_size + biases;
  const GateDefinition* const gate = FindGate(moe.router.gate);
  const GateTraits traits = gate == nullptr ? GateTraits() : gate->make(moe.router)->traits();
  const int64_t logits = int64_t{traits.logit_sets} * moe.router.num_outputs();
  const int64_t router = logits * hidden + (traits.router_bias ? logits : 0);
  const int64_t shared = matrices * hidden * moe.shared_expert_ffn_hidden_size +
                         (moe.gated_shared_expert ? hidden : 0);
  const int64_t dense_width = config.dense_ffn_hidden_size > 0
                                  ? config.dense_ffn_hidden_size
                                  : moe.router.top_k * moe.ffn_hidden_size;
  const int64_t moe_layers = config.num_layers / config.moe_layer_freq;
  const int64_t dense_layers = config.num_layers - moe_layers;
  ModelSize size;
  size.active = 2 * config.vocab_size * hidden + hidden +
                config.num_layers * (4 * hidden * hidden + 2 * hidden) +
                dense_layers * matrices * hidden * dense_width +
                moe_layers * (router + moe.router.top_k * expert + shared);
  size.total = size.active + moe_layers * (moe.router.num_experts - moe.router.top_k) * expert;
  return size;
}

}  // namespace moe::cli
