#include "moe/cli/layer_options.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/command.h"
#include "moe/cli/common_settings.h"
#include "moe/cli/config_file.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/trace_file.h"

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

using Table = std::vector<Setting>;

void AddFiles(Table& table) {
  const char* const kGroup = "Files";
  table.insert(
      table.end(),
      {{kGroup, "hf-config", "", 0, Kind::kText, "FILE", "", "the model's config.json"},
       {kGroup, "weights", "", 0, Kind::kText, "PATH", "",
        "a .safetensors file, the index of several, or their folder"},
       {kGroup, "layer", "", 0, Kind::kInteger, "N", "",
        "of the model, from 0; default: the first with experts in the file"},
       {kGroup, "input", "", 0, Kind::kText, "FILE", "", "the tokens: tensor x"},
       {kGroup, "output", "", 0, Kind::kText, "FILE", "", "y, the routing and, if asked, dx"},
       {kGroup, "grad-output", "", 0, Kind::kText, "FILE", "",
        "gradient by the output: tensor dy; with --grads"},
       {kGroup, "grads", "", 0, Kind::kText, "FILE", "",
        "gradients by the weights; with --grad-output"}});
  AddTraceSetting(kGroup, "the layer", table);
}

void AddRanks(Table& table) {
  const char* const kGroup = "Ranks and numbers";
  AddRankSettings(kGroup, table);
  AddShareDeviceSetting(kGroup, table);
  table.push_back({kGroup, "expert-model-parallel-size", "ep", 0, Kind::kInteger, "N", "",
                   "EP: ranks that share one set of experts; divides R; default: R"});
  AddThreadsSetting(kGroup, table);
  table.insert(table.end(), {{kGroup,
                              "dtype",
                              "",
                              0,
                              Kind::kWord,
                              "NAME",
                              "f32",
                              "of activations and weights in the layer; files stay F32",
                              {"f32", "bf16", "f16"}},
                             {kGroup,
                              "numerics",
                              "",
                              0,
                              Kind::kWord,
                              "NAME",
                              "layout-invariant",
                              "layout-invariant: the same bits for any number of ranks and split",
                              {"fast", "layout-invariant"}}});
  AddTimeoutSetting(kGroup, table);
}

void AddOutput(Table& table) {
  const char* const kGroup = "Output and settings";
  table.push_back({kGroup, "quiet", "", 'q', Kind::kSwitch, "", "", "only errors and the result"});
  AddConfigSetting(kGroup, "settings by name", table);
  AddHelpSettings(kGroup, table);
}

Table LayerSettings() {
  Table table;
  AddFiles(table);
  AddRanks(table);
  AddOutput(table);
  return table;
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

absl::StatusOr<int> ExpertParallelSize(const Settings& settings, int ranks) {
  constexpr char kName[] = "expert-model-parallel-size";
  if (settings.empty(kName)) return ranks;
  const int size = settings.integer(kName);
  if (size >= 1 && ranks % size == 0) return size;
  std::vector<int> divisors;
  for (int d = 1; d <= ranks; ++d) {
    if (ranks % d == 0) divisors.push_back(d);
  }
  return WrongFlag(
      "--ep", settings.text(kName),
      absl::StrCat("a divisor of the ", ranks, " ranks: ", absl::StrJoin(divisors, ", ")));
}

}  // namespace

absl::StatusOr<Settings> LoadLayerSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings) {
  Settings settings(LayerSettings());
  MOE_RETURN_IF_ERROR(LoadSettings(args, environment, settings, warnings));
  return settings;
}

CommandHelp LayerHelp() {
  return {.head = kHead, .settings = LayerSettings(), .tail = kTail};
}

absl::StatusOr<LayerOptions> MakeLayerOptions(const Settings& settings, const World& world) {
  MOE_RETURN_IF_ERROR(CheckFiles(settings));
  LayerOptions options = {.config = settings.text("hf-config"),
                          .weights = settings.text("weights"),
                          .input = settings.text("input"),
                          .output = settings.text("output"),
                          .grad_output = settings.text("grad-output"),
                          .grads = settings.text("grads"),
                          .trace = settings.text("trace"),
                          .comm_timeout = absl::Seconds(settings.real("comm-timeout"))};
  if (!settings.empty("layer")) options.layer = settings.integer("layer");
  hf::BlockRunOptions& run = options.run;
  MOE_ASSIGN_OR_RETURN(run.expert_parallel_size, ExpertParallelSize(settings, world.ranks));
  run.dtype = ComputeTypeOf(settings);
  run.numerics = settings.is("numerics", "fast") ? Numerics::kFast : Numerics::kLayoutInvariant;
  run.threads = settings.is("threads", "auto")
                    ? std::max(1, world.cores / std::max(1, world.local_ranks))
                    : settings.integer("threads");
  if (run.threads < 1) return WrongFlag("--threads", settings.text("threads"), "at least 1");
  if (options.comm_timeout <= absl::ZeroDuration()) {
    return WrongFlag("--comm-timeout", settings.text("comm-timeout"), "more than 0");
  }
  return options;
}

}  // namespace moe::cli
