#include "moe/cli/base/train_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "gating/gate.h"
#include "kernels/activation/activation_kind.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/fault_settings.h"
#include "moe/cli/base/offload_text.h"
#include "moe/cli/base/program.h"
#include "moe/hf/hf_model.h"
#include "moe/run/session.h"

namespace moe::cli {
namespace {

constexpr int64_t kDefaultTraceSteps = 10;

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

absl::Status CompleteCheckpoints(const Settings& settings, lm::TrainCheckpoints& checkpoints) {
  using Resume = lm::TrainCheckpoints::Resume;
  const std::string& resume = settings.text("resume");
  checkpoints.resume = resume == "none"   ? Resume::kNone
                       : resume == "auto" ? Resume::kAuto
                                          : Resume::kPath;
  if (checkpoints.resume == Resume::kPath) checkpoints.path = resume;
  std::error_code error;
  const auto there = std::filesystem::status(checkpoints.folder, error);
  if (std::filesystem::exists(there) && !std::filesystem::is_directory(there)) {
    return WrongValue(settings, "save", "a folder");
  }
  if (!checkpoints.folder.empty()) return absl::OkStatus();
  if (checkpoints.resume == Resume::kAuto) {
    return WrongFlag("--resume", resume, "--save DIR with it, or the folder of a checkpoint");
  }
  if (checkpoints.interval == 0) return absl::OkStatus();
  return WrongValue(settings, "save-interval", "--save DIR with it");
}

absl::StatusOr<Offload> OffloadOf(const Settings& settings) {
  const std::string& text = settings.text("offload");
  absl::StatusOr<Offload> parsed = ParseOffload(text);
  if (absl::StartsWith(text, kWeightOffload)) {
    return WrongFlag("--offload", text,
                     absl::StrCat(kOffloadForms,
                                  ": moe eval and moe generate have weights in files; "
                                  "--zero 3 divides those of a run over its ranks"));
  }
  if (!parsed.ok()) return WrongFlag("--offload", text, kOffloadForms);
  Offload offload = *std::move(parsed);
  if (offload.optimizer != OffloadTo::kNone && settings.is("device", "cuda")) {
    return WrongFlag("--offload", text, "none: state is not offloaded from GPUs yet");
  }
  return offload;
}

struct BatchSizes {
  int64_t micro_batch_size = 0;
  int64_t micro_batches = 0;  // M, over all ranks
};

std::optional<int64_t> Given(const Settings& settings, const char* name) {
  if (!settings.given(name)) return std::nullopt;
  return settings.integer(name);
}

// batch / part, or the nearest batch that `part` divides.
absl::StatusOr<int64_t> Divide(int64_t batch, int64_t part, const char* part_flag) {
  if (batch % part == 0) return batch / part;
  const int64_t below = batch / part * part;
  const int64_t nearest = below > 0 && batch - below <= part / 2 ? below : below + part;
  return absl::InvalidArgumentError(absl::StrCat("--train-batch-size is ", batch,
                                                 ", expected a multiple of ", part_flag, " ", part,
                                                 ", nearest ", nearest));
}

// batch = micro-batch-size x M, and M = accumulation x ranks. What is not given follows from what
// is, else from the defaults. All are at least 1. kInvalidArgument when they contradict each other,
// or do not divide.
absl::StatusOr<BatchSizes> ResolveBatch(const Settings& settings, int ranks) {
  const auto batch = Given(settings, "train-batch-size");
  const auto accumulation = Given(settings, "gradient-accumulation-steps");
  const auto given_size = Given(settings, "micro-batch-size");
  auto count = Given(settings, "micro-batches");
  if (accumulation.has_value()) {
    const int64_t implied = *accumulation * ranks;
    if (count.has_value() && *count != implied) {
      return absl::InvalidArgumentError(absl::StrCat("--micro-batches is ", *count, ", expected ",
                                                     implied, ": --gradient-accumulation-steps ",
                                                     *accumulation, " x ", ranks, " ranks"));
    }
    count = implied;
  }
  BatchSizes sizes = {given_size.value_or(settings.integer("micro-batch-size")),
                      count.value_or(settings.integer("micro-batches"))};
  if (!batch.has_value()) return sizes;
  if (!count.has_value()) {
    MOE_ASSIGN_OR_RETURN(sizes.micro_batches,
                         Divide(*batch, sizes.micro_batch_size, "--micro-batch-size"));
  } else if (!given_size.has_value()) {
    MOE_ASSIGN_OR_RETURN(sizes.micro_batch_size,
                         Divide(*batch, sizes.micro_batches, "the micro-batches,"));
  } else if (sizes.micro_batch_size * sizes.micro_batches != *batch) {
    return absl::InvalidArgumentError(absl::StrCat("--train-batch-size is ", *batch, ", expected ",
                                                   sizes.micro_batch_size * sizes.micro_batches,
                                                   ": --micro-batch-size ", sizes.micro_batch_size,
                                                   " x ", sizes.micro_batches, " micro-batches"));
  }
  return sizes;
}

// Sets and checks what does not follow from one row.
absl::Status Complete(const Settings& settings, const World& world, TrainOptions& options) {
  lm::TrainConfig& train = options.train;
  MOE_RETURN_IF_ERROR(CompleteLayer(settings, train.model.moe));
  RouterConfig& router = train.model.moe.router;
  train.model.hidden_size = router.hidden_size;
  MOE_ASSIGN_OR_RETURN(train.model.eos_token_ids, NumbersOf(settings, "eos-token-id"));
  MOE_ASSIGN_OR_RETURN(train.model.pipeline_layout, NumbersOf(settings, "pipeline-layout"));
  MOE_ASSIGN_OR_RETURN(train.trainer.session.grouped_gemm, GroupedGemmOf(settings));
  train.trainer.session.tensor_leaves = settings.integer("tensor-leaves");
  MOE_ASSIGN_OR_RETURN(train.trainer.offload, OffloadOf(settings));
  MOE_ASSIGN_OR_RETURN(const BatchSizes batch, ResolveBatch(settings, world.ranks));
  train.micro_batch_size = batch.micro_batch_size;
  train.trainer.micro_batches = batch.micro_batches;
  router.micro_batch_tokens = batch.micro_batch_size * train.sequence_length;
  train.schedule.total_steps =
      settings.empty("lr-decay-steps") ? train.steps : settings.integer("lr-decay-steps");
  train.trainer.bucket_bytes = static_cast<int64_t>(settings.real("bucket-size-mb") * 0x1p20);
  train.trainer.session.device = settings.choice("device", kDeviceWords);
  train.trainer.session.threads = ThreadsOf(settings, world);
  options.ranks = world.ranks;
  train.record_routing = !options.record_routing.empty();
  MOE_RETURN_IF_ERROR(CompleteCheckpoints(settings, train.checkpoints));
  options.trace = settings.text("trace");
  if (options.trace.empty()) return absl::OkStatus();
  train.trace_first_step = settings.integer("profile-step-start");
  train.trace_last_step = settings.empty("profile-step-end")
                              ? train.trace_first_step + kDefaultTraceSteps - 1
                              : settings.integer("profile-step-end");
  return absl::OkStatus();
}

absl::Status CheckTraceSteps(const Settings& settings, const lm::TrainConfig& train) {
  if (settings.empty("trace")) return absl::OkStatus();
  const int64_t first = train.trace_first_step;
  if (first < 1 || first > train.steps) {
    return WrongValue(settings, "profile-step-start",
                      absl::StrCat("a step from 1 to --steps, ", train.steps));
  }
  if (train.trace_last_step >= first) return absl::OkStatus();
  return WrongValue(settings, "profile-step-end",
                    absl::StrCat("at least --profile-step-start, ", first));
}

absl::Status CheckSizes(const lm::TrainConfig& train) {
  const double batch = static_cast<double>(train.trainer.micro_batches) *
                       static_cast<double>(train.micro_batch_size) *
                       static_cast<double>(train.sequence_length);
  if (batch > kMostElements) {
    return WrongFlag("a step", absl::StrCat(batch, " tokens"), "at most 1e12");
  }
  const lm::TransformerConfig& model = train.model;
  const auto hidden = static_cast<double>(model.hidden_size);
  const double heads = model.num_attention_heads + 2.0 * model.key_value_heads();
  const double widest = std::max(
      {static_cast<double>(model.moe.ffn_hidden_size) * std::max(model.moe.router.num_experts, 1),
       static_cast<double>(model.moe.shared_expert_ffn_hidden_size),
       heads * static_cast<double>(model.head_dim()), 4 * hidden});
  const double parameters =
      3 * hidden * widest * model.num_layers + hidden * static_cast<double>(model.vocab_size);
  if (parameters > kMostElements) {
    return WrongFlag("the model", absl::StrCat("about ", parameters, " parameters"),
                     "at most 1e12");
  }
  return absl::OkStatus();
}

std::string TextOf(float value) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

}  // namespace

std::vector<std::pair<const char*, std::string>> SettingsOf(const lm::TransformerConfig& model) {
  const MoeLayerConfig& moe = model.moe;
  const auto on = [](bool value) {
    return std::string(value ? "true" : "false");
  };
  // These gates differ in whether they divide by the sum of the weights, which is no setting.
  const std::string& of_family = moe.router.gate;
  const char* const gate = of_family == "mixtral"                     ? "mixtral"
                           : moe.router.norm_topk_prob.value_or(true) ? "qwen3"
                           : of_family == "olmoe"                     ? "olmoe"
                                                                      : "qwen2";
  std::vector<std::pair<const char*, std::string>> texts = {
      {"vocab-size", absl::StrCat(model.vocab_size)},
      {"hidden-size", absl::StrCat(model.hidden_size)},
      {"num-layers", absl::StrCat(model.num_layers)},
      {"num-attention-heads", absl::StrCat(model.num_attention_heads)},
      {"num-query-groups", absl::StrCat(model.key_value_heads())},
      {"kv-channels", absl::StrCat(model.head_dim())},
      {"add-qkv-bias", on(model.qkv_bias)},
      {"qk-layernorm", NameOf(model.qk_norm, lm::kQkNormWords)},
      {"tie-word-embeddings", on(model.tied_embeddings)},
      {"rotary-base", TextOf(model.rotary_base)},
      {"norm-epsilon", TextOf(model.norm_epsilon)},
      {"moe-layer-freq", absl::StrCat(model.moe_layer_freq)},
      {"router", gate},
      {"num-experts", absl::StrCat(moe.router.num_experts)},
      {"moe-router-topk", absl::StrCat(moe.router.top_k)},
      {"moe-ffn-hidden-size", absl::StrCat(moe.ffn_hidden_size)},
      {"moe-shared-expert-intermediate-size", absl::StrCat(moe.shared_expert_ffn_hidden_size)},
      {"moe-shared-expert-gate", on(moe.gated_shared_expert)},
      {"activation", NameOf(moe.activation.kind, kActivationWords)}};
  // Without dense layers their width has no effect.
  if (model.moe_layer_freq > 1) {
    texts.emplace_back("dense-ffn-hidden-size", absl::StrCat(model.dense_ffn_hidden_size));
  }
  return texts;
}

namespace {

// Settings of a public model that a flag may replace.
std::vector<std::pair<const char*, std::string>> DefaultsOf(const hf::HfModel& hf) {
  const lm::TransformerConfig& model = hf.config();
  std::vector<std::pair<const char*, std::string>> texts = {
      {"max-position-embeddings", absl::StrCat(model.max_position_embeddings)}};
  if (model.bos_token_id) texts.emplace_back("bos-token-id", absl::StrCat(*model.bos_token_id));
  if (!model.eos_token_ids.empty()) {
    texts.emplace_back("eos-token-id", absl::StrJoin(model.eos_token_ids, ","));
  }
  if (const auto coefficient = hf.training().aux_loss_coeff) {
    texts.emplace_back("moe-aux-loss-coeff", TextOf(static_cast<float>(*coefficient)));
  }
  return texts;
}

// How transformers would train the model and this run does not; empty: in no other way.
std::string OtherTraining(const hf::ModelTraining& training, const Settings& settings,
                          bool upcycled) {
  std::vector<std::string> others;
  const auto with = [&](const char* key, double value) {
    if (value != 0) others.push_back(absl::StrCat("with ", key, " ", value));
  };
  with("attention_dropout", training.attention_dropout);
  with("router_jitter_noise", training.router_jitter_noise);
  if (!upcycled && !training.aux_loss_coeff.has_value() && !settings.given("moe-aux-loss-coeff") &&
      !settings.is("moe-router-load-balancing-type", "none")) {
    others.push_back(
        absl::StrCat("without a balance loss, as output_router_logits is false "
                     "(here --moe-aux-loss-coeff is ",
                     settings.text("moe-aux-loss-coeff"), ")"));
  }
  return absl::StrJoin(others, ", ");
}

bool Same(const Setting& setting, const std::string& given, const std::string& text) {
  float a = 0, b = 0;
  if (setting.kind != Kind::kReal) return given == text;
  return absl::SimpleAtof(given, &a) && absl::SimpleAtof(text, &b) && a == b;
}

// Of a model that is upcycled: what the run chooses, and its files do not say.
bool IsChosen(absl::string_view name) {
  return name == "router" || name == "moe-router-topk" || name == "moe-layer-freq" ||
         name == "moe-shared-expert-intermediate-size" || name == "moe-shared-expert-gate";
}

// Refuses what would add to the output of the copies.
absl::Status CheckUpcycling(const Settings& settings) {
  for (const char* const name : {"moe-shared-expert-intermediate-size", "num-zero-experts"}) {
    if (settings.integer(name) != 0) return WrongValue(settings, name, "0 with --upcycle");
  }
  if (!settings.on("moe-projection-biases")) return absl::OkStatus();
  return WrongValue(settings, "moe-projection-biases",
                    "false with --upcycle: the dense networks have none");
}

// Sets the model's settings to what the folder of --init-from says, as a preset, and warns of what
// this run does otherwise; nothing without the flag. kInvalidArgument, naming the setting, where
// another value was given; errors of hf::HfModel::Open, whose files say whether embeddings are
// tied.
absl::Status ApplyInitFrom(Settings& settings, std::vector<std::string>& warnings) {
  if (settings.real("upcycle-noise") != 0 && settings.empty("upcycle")) {
    return WrongValue(settings, "upcycle-noise", "--upcycle E with it");
  }
  if (settings.empty("init-from")) {
    if (settings.empty("upcycle")) return absl::OkStatus();
    return WrongValue(settings, "upcycle", "--init-from DENSE with it");
  }
  const std::string folder = settings.text("init-from");
  const hf::Upcycling upcycling = UpcyclingOf(settings);
  const auto model = hf::HfModel::Open(folder, upcycling);
  if (!model.ok()) return InputError("--init-from", model.status());
  if (upcycling.experts > 0) MOE_RETURN_IF_ERROR(CheckUpcycling(settings));
  const auto set = [&](const char* name, std::string text) {
    return settings.Set(*settings.Find(name), {std::move(text)}, Origin::kPreset,
                        absl::StrCat("--init-from ", folder));
  };
  for (auto& [name, text] : SettingsOf(model->config())) {
    if (upcycling.experts > 0 && IsChosen(name)) continue;
    if (settings.given(name) && !Same(*settings.Find(name), settings.text(name), text)) {
      return WrongValue(settings, name, absl::StrCat(text, ", as --init-from ", folder, " has it"));
    }
    MOE_RETURN_IF_ERROR(set(name, std::move(text)));
  }
  for (auto& [name, text] : DefaultsOf(*model)) {
    if (!settings.given(name)) MOE_RETURN_IF_ERROR(set(name, std::move(text)));
  }
  for (const std::string& warning : model->warnings()) {
    warnings.push_back(absl::StrCat("--init-from: ", warning));
  }
  const std::string others = OtherTraining(model->training(), settings, upcycling.experts > 0);
  if (!others.empty()) {
    warnings.push_back(absl::StrCat("--init-from ", folder, ": transformers would train ", others));
  }
  return absl::OkStatus();
}

}  // namespace

int MostExpertRanks(int ranks, const MeshShape& mesh, int experts) {
  const int of_stage = ranks / std::max(1, mesh.pipeline), share = std::max(1, mesh.expert_tensor);
  const int tensor = std::max(1, mesh.tensor), step = tensor / std::gcd(tensor, share);
  int most = step;
  for (int size = step; size <= std::min(of_stage / share, experts); size += step) {
    if (of_stage % (size * share) == 0) most = size;
  }
  return most;
}

Table TrainSettings() {
  TrainOptions defaults;
  return TrainSettings(defaults).Unbound();
}

absl::StatusOr<Settings> LoadTrainSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings) {
  Settings settings(TrainSettings());
  MOE_RETURN_IF_ERROR(LoadSettings(args, environment, settings, warnings));
  if (settings.on("help")) return settings;
  MOE_RETURN_IF_ERROR(ApplyRouterPreset(settings));
  MOE_RETURN_IF_ERROR(ApplyInitFrom(settings, warnings));
  return settings;
}

hf::Upcycling UpcyclingOf(const Settings& settings) {
  if (settings.empty("upcycle")) return {};
  return {.experts = settings.integer("upcycle"),
          .moe_layer_freq = settings.integer("moe-layer-freq"),
          .noise = settings.real("upcycle-noise"),
          .seed = settings.seed("seed")};
}

absl::StatusOr<TrainOptions> MakeTrainOptions(const Settings& settings, const World& world) {
  TrainOptions options;
  MOE_RETURN_IF_ERROR(Fill(settings, TrainSettings(options)));
  MOE_RETURN_IF_ERROR(Complete(settings, world, options));
  MOE_RETURN_IF_ERROR(CheckAllReduce(settings, world.backend));
  MOE_RETURN_IF_ERROR(InFlags(lm::ValidateTrainConfig(options.train, world.ranks), settings));
  MOE_RETURN_IF_ERROR(CheckSizes(options.train));
  MOE_RETURN_IF_ERROR(CheckTraceSteps(settings, options.train));
  MOE_ASSIGN_OR_RETURN(options.fault, FaultOf(settings, world.ranks));
  MOE_RETURN_IF_ERROR(CheckDataFiles(options.data, options.train.model.vocab_size));
  options.upcycling = UpcyclingOf(settings);
  return options;
}

}  // namespace moe::cli
