// moe layer: one MoE layer of a public model, from files to files.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/layer/model_layer.h"
#include "moe/io/safetensors.h"
#include "moe/lm/train_config.h"
#include "moe/run/context.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "layer";

struct LayerOptions {
  std::string config, weights, input, output;
  std::string grad_output, grads;  // both empty: forward alone
  std::string trace;               // empty: no timeline
  std::optional<int64_t> layer;
  ModelLayerOptions run;

  bool backward() const { return !grads.empty(); }
};

constexpr char kHead[] =
    R"(usage: moe layer --hf-config config.json --weights PATH --input x.safetensors
                 --output y.safetensors [--grad-output dy.safetensors --grads g.safetensors] [flags]

One mixture-of-experts layer of a public model, from its own files, over expert-parallel ranks:

  y_t = sum_j w_tj Expert_{e_tj}(x_t)  (+ the shared expert's output; Llama-4: Expert(w x_t))

and, given dy, the gradients of sum_t <dy_t, y_t>: dx and one for every weight.

  moe layer --hf-config config.json --weights model.safetensors.index.json --layer 3 \
    --input x.safetensors --output y.safetensors --ranks 4 --ep 4
  mpirun -n 4 moe layer --hf-config config.json --weights model.safetensors \
    --input x.safetensors --output y.safetensors \
    --grad-output dy.safetensors --grads g.safetensors
)";

constexpr char kTail[] =
    R"(
Models: mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, gpt_oss (unpacked),
llama4_text, and llama4 by its text_config. Tensors have transformers' names; docs/layer.md.

Files, all safetensors (T tokens, H hidden_size, E experts, K experts per token)
  input        x [T, H]                     F32, F16, BF16 or F64, as are the weights
  grad-output  dy [T, H]
  output       y [T, H], dx [T, H], expert_weights [T, K], router_logits [T, E]    F32
               expert_ids [T, K]            I64, in order of choice
  grads        one tensor per weight, its name and shape, F32; sums over tokens, no mean
With --dtype bf16 both have the metadata bf16_order, dot or tile.

Tokens are cut into 16 blocks (of at most 64 tokens, then more blocks); a rank takes a range of
blocks. The cut depends on T alone, so with --numerics layout-invariant results have the same bits
for any --ranks and --ep. Weight gradients are then exact sums, of unit 2^-50 or of one that fits
the gradients.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -), then defaults.

Exit codes: 0 ok, 2 usage or a path that is not there, 3 malformed input, 4 a write failed, 5 out
of memory, 6 router logits, biases or gradients not finite, 7 a rank failed, 8 timeout,
9 rendezvous, 10 no such backend.
)";

Table LayerSettings(LayerOptions& options) {
  Table t;
  t.Group("Files");
  t.Add("--hf-config FILE", &options.config, "the model's config.json").Roles(kByContent);
  t.Add("--weights PATH", &options.weights,
        "a .safetensors file, the index of several, or their folder")
      .Roles(kByContent);
  t.Add("--layer N", &options.layer,
        "of the model, from 0; default: the first with experts in the file");
  t.Add("--input FILE", &options.input, "the tokens: tensor x").Roles(kByContent);
  t.Add("--output FILE", &options.output, "y, the routing and, if asked, dx").Roles(kPerRank);
  t.Add("--grad-output FILE", &options.grad_output,
        "gradient by the output: tensor dy; with --grads")
      .Roles(kByContent);
  t.Add("--grads FILE", &options.grads, "gradients by the weights; with --grad-output")
      .Roles(kPerRank);
  AddTraceSetting("the layer", t);
  t.Group("Ranks and numbers");
  AddRankSettings(t);
  AddShareDeviceSetting(t);
  t.Add("--expert-model-parallel-size, --ep N", Kind::kInteger,
        "EP: ranks that share one set of experts; divides R; default: R");
  AddThreadsSetting(t);
  t.Add("--dtype NAME", {&options.run.trainer.dtype, kStorageTypeWords},
        "of activations and weights in the layer; files stay F32");
  t.Add("--numerics NAME", {&options.run.trainer.session.numerics, kNumericsWords},
        "layout-invariant: the same bits for any number of ranks and split");
  AddBFloat16OrderSetting(options.run.trainer.session.bfloat16_order, t);
  AddTimeoutSetting(t);
  t.Group("Output and settings");
  AddQuietSetting("only errors and the result", t);
  AddConfigSetting("settings by name", t);
  AddHelpSettings(t);
  return t;
}

absl::Status CheckFiles(const Settings& settings) {
  for (const char* name : {"hf-config", "weights", "input", "output"}) {
    if (!settings.empty(name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, " is missing, expected ",
                     absl::string_view(name) == "hf-config" ? "the model's config.json"
                     : absl::string_view(name) == "output"  ? "a file to write"
                                                            : "a safetensors file"));
  }
  const std::pair<const char*, const char*> both[] = {{"grads", "grad-output"},
                                                      {"grad-output", "grads"}};
  for (const auto& [given, missing] : both) {
    if (!settings.empty(given) && settings.empty(missing)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--", missing, " is missing, expected a file beside --", given, ": backward needs both"));
    }
  }
  return absl::OkStatus();
}

// Checks everything that can be wrong without opening a file: kInvalidArgument with flag, value and
// what was expected.
absl::StatusOr<LayerOptions> MakeLayerOptions(const Settings& settings, const World& world) {
  MOE_RETURN_IF_ERROR(CheckFiles(settings));
  LayerOptions options;
  MOE_RETURN_IF_ERROR(Fill(settings, LayerSettings(options)));
  options.trace = settings.text("trace");
  SessionOptions& session = options.run.trainer.session;
  constexpr char kEp[] = "expert-model-parallel-size";
  session.mesh.expert = settings.empty(kEp) ? world.ranks : settings.integer(kEp);
  MOE_RETURN_IF_ERROR(lm::CheckExpertParallelSize(session.mesh.expert, world.ranks));
  session.threads = ThreadsOf(settings, world);
  if (session.threads < 1) return WrongValue(settings, "threads", "at least 1");
  return options;
}

// Replaces the layer in an error of Find by the flag that selected it.
absl::Status WeightsError(const absl::Status& status) {
  if (!absl::IsOutOfRange(status)) return InputError("--weights", status);
  return absl::InvalidArgumentError(absl::StrCat("--layer: ", status.message()));
}

class LayerRun {
 public:
  LayerRun(const Settings& settings, const Launch& launch) : settings_(settings), launch_(launch) {}

  absl::Status Run() {
    MOE_RETURN_IF_ERROR(Prepare());
    PrintStart();
    ModelLayerResult result;
    const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const bool first = world->rank() == 0;
      MOE_ASSIGN_OR_RETURN(ModelLayerResult mine,
                           RunModelLayer(*weights_, input_, options_.run, std::move(world)));
      if (first) result = std::move(mine);
      return absl::OkStatus();
    };
    const auto inputs = [this] {
      return Inputs();
    };
    MOE_RETURN_IF_ERROR(RunAgreedRanks(
        {.launch = launch_, .settings = settings_, .command = kCommand, .inputs = inputs}, body));
    if (!speaks()) return absl::OkStatus();
    if (const std::string warning = TraceWarning(result.trace_left_out); !warning.empty()) {
      PrintWarnings(kCommand, {warning});
    }
    MOE_RETURN_IF_ERROR(WriteOutput(result));
    if (options_.backward()) MOE_RETURN_IF_ERROR(WriteGradients(result));
    return Print(Summary(result));
  }

 private:
  // Refuses everything that can be refused before a rank starts.
  absl::Status Prepare() {
    MOE_ASSIGN_OR_RETURN(options_, MakeLayerOptions(settings_, launch_.world));
    options_.run.trainer.session.device = launch_.device.kind;
    MOE_RETURN_IF_ERROR(CheckBFloat16Order(options_.run.trainer));
    auto config = hf::ReadHfConfig(options_.config);
    MOE_RETURN_IF_ERROR(InputError("--hf-config", config.status()));
    auto checkpoint = Checkpoint::Open(options_.weights);
    MOE_RETURN_IF_ERROR(InputError("--weights", checkpoint.status()));
    MOE_RETURN_IF_ERROR(CheckOutputs(*checkpoint));
    auto weights = hf::LayerWeights::Find(*config, *std::move(checkpoint), options_.layer);
    MOE_RETURN_IF_ERROR(WeightsError(weights.status()));
    weights_ = std::make_unique<hf::LayerWeights>(*std::move(weights));
    MOE_RETURN_IF_ERROR(OpenTokens(*config));
    if (!options_.trace.empty()) {
      trace_ = std::make_unique<TraceFile>(options_.trace, CommTimeout(settings_));
      options_.run.trace = trace_.get();
    }
    if (!speaks()) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(CheckTraceWritable(settings_));
    MOE_RETURN_IF_ERROR(CheckWritable("--output", options_.output));
    return options_.backward() ? CheckWritable("--grads", options_.grads) : absl::OkStatus();
  }

  // Checks that no file is both written and read.
  absl::Status CheckOutputs(const Checkpoint& checkpoint) const {
    std::vector<FlagPath> inputs;
    for (const char* name : {"config", "hf-config", "input", "grad-output"}) {
      inputs.push_back({absl::StrCat("--", name), settings_.text(name)});
    }
    for (const std::string& file : checkpoint.Files()) inputs.push_back({"--weights", file});
    return CheckOutputPaths(
        inputs,
        {{"--output", options_.output}, {"--grads", options_.grads}, {"--trace", options_.trace}});
  }

  absl::Status OpenTokens(const hf::HfConfig& config) {
    const auto open = [&](const char* flag, const std::string& path, const char* tensor,
                          std::optional<int64_t> tokens, std::unique_ptr<SafetensorsFile>& file,
                          CheckpointTensor& rows) -> absl::Status {
      auto opened = SafetensorsFile::Open(path);
      MOE_RETURN_IF_ERROR(InputError(flag, opened.status()));
      file = std::make_unique<SafetensorsFile>(*std::move(opened));
      auto found = FindTokens(*file, tensor, tokens, config.moe.router.hidden_size);
      MOE_RETURN_IF_ERROR(InputError(flag, found.status()));
      rows = *found;
      return absl::OkStatus();
    };
    MOE_RETURN_IF_ERROR(open("--input", options_.input, "x", std::nullopt, x_file_, input_.x));
    if (!options_.backward()) return absl::OkStatus();
    return open("--grad-output", options_.grad_output, "dy", input_.x.tensor->shape[0], dy_file_,
                input_.dy);
  }

  absl::StatusOr<ReadInputs> Inputs() const {
    ReadInputs inputs;
    MOE_RETURN_IF_ERROR(inputs.AddFile("file", "hf-config", options_.config));
    std::vector<CheckpointTensor> tensors;
    for (const hf::LayerTensor& tensor : weights_->tensors()) tensors.push_back(tensor.found);
    MOE_RETURN_IF_ERROR(inputs.AddTensors("weights", "weights", tensors));
    MOE_RETURN_IF_ERROR(inputs.AddTensors("x", "input", {input_.x}));
    if (options_.backward()) {
      MOE_RETURN_IF_ERROR(inputs.AddTensors("dy", "grad-output", {input_.dy}));
    }
    return inputs;
  }

  // Reports which layer was selected, unless the user chose it.
  void PrintStart() const {
    if (settings_.on("quiet") || !speaks() || options_.layer.has_value()) return;
    const auto layers = weights_->available_layers();
    const std::string which =
        layers.size() == 1
            ? "the only one with experts"
            : absl::StrCat("the first of ", layers.size(), " with experts; --layer takes another");
    Say(stderr, "moe layer: {}: layer {}, {}\n", weights_->path(), weights_->layer(), which);
  }

  // Of both files: what their numbers depend on and no tensor shows.
  static SafetensorsMetadata MetadataOf(const ModelLayerResult& result) {
    if (!result.bfloat16_order.has_value()) return {};
    return {{"bf16_order", NameOf(*result.bfloat16_order, kBFloat16OrderWords)}};
  }

  absl::Status WriteOutput(const ModelLayerResult& result) const {
    const int64_t tokens = result.tokens;
    std::vector<SafetensorsSource> tensors;
    const auto add = [&](const char* name, const std::vector<float>& values, int64_t width) {
      tensors.push_back({.name = name,
                         .type = SafetensorsType::kF32,
                         .shape = {tokens, width},
                         .bytes = BytesOf<float>(values)});
    };
    add("y", result.y, moe().router.hidden_size);
    if (options_.backward()) add("dx", result.dx, moe().router.hidden_size);
    tensors.push_back({.name = "expert_ids",
                       .type = SafetensorsType::kI64,
                       .shape = {tokens, moe().router.top_k},
                       .bytes = BytesOf<int64_t>(result.expert_ids)});
    add("expert_weights", result.expert_weights, moe().router.top_k);
    add("router_logits", result.router_logits, moe().router.num_outputs());
    return WriteError("--output", options_.output,
                      WriteSafetensors(options_.output, tensors, MetadataOf(result)));
  }

  absl::Status WriteGradients(const ModelLayerResult& result) const {
    std::vector<SafetensorsSource> tensors;
    for (const auto& [of, values] : result.gradients) {
      tensors.push_back({.name = of->found.tensor->name,
                         .type = SafetensorsType::kF32,
                         .shape = of->found.tensor->shape,
                         .bytes = BytesOf<float>(values)});
    }
    return WriteError("--grads", options_.grads,
                      WriteSafetensors(options_.grads, tensors, MetadataOf(result)));
  }

  std::string Summary(const ModelLayerResult& result) const {
    std::string text = fmt::format(
        "{} layer {} | {} tokens | H {} F {} E {} K {} | {}, ep {} | {} | forward {:.1f} ms",
        std::string(weights_->config().model_type()), weights_->layer(), result.tokens,
        moe().router.hidden_size, moe().ffn_hidden_size, moe().router.num_experts,
        moe().router.top_k, Counted(launch_.world.ranks, "rank"),
        options_.run.trainer.session.mesh.expert, settings_.text("dtype"),
        result.forward_seconds * 1e3);
    if (options_.backward()) {
      text += fmt::format(" | backward {:.1f} ms", result.backward_seconds * 1e3);
    }
    text += " | wrote " + options_.output;
    if (options_.backward()) text += ", " + options_.grads;
    if (!options_.trace.empty()) text += ", " + options_.trace;
    return text + "\n";
  }

  bool speaks() const { return launch_.rank() == 0; }
  const MoeLayerConfig& moe() const { return weights_->config().moe; }

  const Settings& settings_;
  const Launch& launch_;
  LayerOptions options_;
  std::unique_ptr<hf::LayerWeights> weights_;
  std::unique_ptr<SafetensorsFile> x_file_, dy_file_;
  ModelLayerInput input_;
  std::unique_ptr<TraceFile> trace_;
};

}  // namespace

ExitCode LayerCommand(const Invocation& invocation) {
  return RunWithRanks(invocation, kCommand, LayerHelp(), ComputesOn::kAnyDevice,
                      [](const Settings& settings, const Launch& launch) {
                        return LayerRun(settings, launch).Run();
                      });
}

CommandHelp LayerHelp() {
  LayerOptions defaults;
  return {.head = kHead, .settings = LayerSettings(defaults).rows(), .tail = kTail};
}

}  // namespace moe::cli
