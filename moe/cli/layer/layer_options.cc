#include "moe/cli/layer/layer_options.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/choices.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/trace_file.h"
#include "moe/lm/train_config.h"

namespace moe::cli {
namespace {

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

Tokens are cut into 16 blocks (of at most 64 tokens, then more blocks); a rank takes a range of
blocks. The cut depends on T alone, so with --numerics layout-invariant results have the same bits
for any --ranks and --ep. Weight gradients are then exact sums: 2^-40 of the largest |dy| is their
unit, and more than 2^23 / blocks of it is refused (exit 6); --numerics fast has neither bound.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -), then defaults.

Exit codes: 0 ok, 2 usage or a path that is not there, 3 malformed input, 4 a write failed, 5 out
of memory, 6 router logits, biases or gradients not finite, 7 a rank failed, 8 timeout,
9 rendezvous, 10 no such backend.
)";

Table LayerSettings(LayerOptions& options) {
  Table t;
  t.Group("Files");
  t.Add("--hf-config FILE", &options.config, "the model's config.json");
  t.Add("--weights PATH", &options.weights,
        "a .safetensors file, the index of several, or their folder");
  t.Add("--layer N", &options.layer,
        "of the model, from 0; default: the first with experts in the file");
  t.Add("--input FILE", &options.input, "the tokens: tensor x");
  t.Add("--output FILE", &options.output, "y, the routing and, if asked, dx");
  t.Add("--grad-output FILE", &options.grad_output,
        "gradient by the output: tensor dy; with --grads");
  t.Add("--grads FILE", &options.grads, "gradients by the weights; with --grad-output");
  AddTraceSetting("the layer", t);
  t.Group("Ranks and numbers");
  AddRankSettings(t);
  AddShareDeviceSetting(t);
  t.Add("--expert-model-parallel-size, --ep N", Kind::kInteger,
        "EP: ranks that share one set of experts; divides R; default: R");
  AddThreadsSetting(t);
  t.Add("--dtype NAME", {&options.run.dtype, kComputeTypes},
        "of activations and weights in the layer; files stay F32");
  t.Add("--numerics NAME", {&options.run.numerics, kNumericsModes},
        "layout-invariant: the same bits for any number of ranks and split");
  AddTimeoutSetting(options.comm_timeout, t);
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

}  // namespace

absl::StatusOr<Settings> LoadLayerSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings) {
  LayerOptions defaults;
  Settings settings(LayerSettings(defaults));
  MOE_RETURN_IF_ERROR(LoadSettings(args, environment, settings, warnings));
  return settings;
}

CommandHelp LayerHelp() {
  LayerOptions defaults;
  return {.head = kHead, .settings = LayerSettings(defaults).rows(), .tail = kTail};
}

absl::StatusOr<LayerOptions> MakeLayerOptions(const Settings& settings, const World& world) {
  MOE_RETURN_IF_ERROR(CheckFiles(settings));
  LayerOptions options;
  MOE_RETURN_IF_ERROR(Fill(settings, LayerSettings(options)));
  options.trace = settings.text("trace");
  hf::BlockRunOptions& run = options.run;
  constexpr char kEp[] = "expert-model-parallel-size";
  run.expert_parallel_size = settings.empty(kEp) ? world.ranks : settings.integer(kEp);
  MOE_RETURN_IF_ERROR(lm::CheckExpertParallelSize(run.expert_parallel_size, world.ranks));
  run.threads = ThreadsOf(settings, world);
  if (run.threads < 1) return WrongValue(settings, "threads", "at least 1");
  return options;
}

}  // namespace moe::cli
