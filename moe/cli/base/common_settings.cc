#include "moe/cli/base/common_settings.h"

#include <cmath>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include "gating/gate.h"
#include "kernels/base/status_macros.h"
#include "moe/lm/train_settings.h"
#include "moe/run/session.h"

namespace moe::cli {

void AddRankSettings(Table& table, int ranks) {
  table
      .Add("--ranks R", {Kind::kInteger, absl::StrCat(ranks)},
           "threads of this process; under mpirun its size, which R must equal if given")
      .Roles(kOfLayer | kAlwaysTold | kInRow | kPerRank);  // CheckWorldSize
  table
      .Add("--backend NAME", {Kind::kWord, "auto", {"auto", "local", "mpi", "nccl"}},
           "local: threads, whatever launched the process; mpi: processes; nccl: a GPU each, "
           "threads or under a launcher processes; auto: mpi under mpirun, nccl under torchrun, "
           "else local")
      .Roles(kPlacement | kInRow);
  AddDeviceSetting(table);
}

void AddDeviceSetting(Table& table) {
  table
      .Add("--device NAME", {Kind::kWord, "cpu", WordsOf(kDeviceWords)},
           "cuda needs a build with CUDA and a GPU")
      .Roles(kOfLayer | kInRow);
}

void AddShareDeviceSetting(Table& table) {
  table
      .Add("--share-device", Kind::kSwitch,
           "with --device cuda: more ranks than GPUs, which take them in turn")
      .Roles(kPlacement);
}

void AddThreadsSetting(Table& table) {
  table
      .Add("--threads N|auto", {Kind::kInteger, "auto", {"auto"}},
           "of each rank; auto = cores / ranks of this machine, at least 1")
      .Most(kMostThreads)
      .Roles(kOfLayer | kPerRank);
}

void AddBFloat16OrderSetting(std::optional<BFloat16Order>& order, Table& table) {
  table
      .Add("--bf16-order NAME", &order,
           "order in which products of bf16 add their terms on CPUs, part of what fixes the bits: "
           "dot = in pairs, tile = in blocks of 32, which is fast with AMX; auto: tile where every "
           "rank has AMX, else dot")
      .Roles(kOfLayer | kInLayerRow);
}

void AddTimeoutSetting(Table& table) {
  table
      .Add("--comm-timeout SECONDS", {Kind::kReal, "60"},
           "a rank that waits longer than this without progress gives up (exit 8); at start "
           "60 s at least")
      .Most(kMostSeconds)
      .Above(0)
      .Roles(kPlacement | kInRow);
}

absl::Duration CommTimeout(const Settings& settings) {
  return absl::Seconds(settings.real("comm-timeout"));
}

void AddFormSettings(Table& table) {
  const std::vector<std::string> forms = {"table", "csv", "json", "jsonl", "md"};
  table.Add("-o, --output FORM", {Kind::kWord, "table", forms}, "of the rows on standard output")
      .Roles(kInRow | kPerRank);
  table
      .Add("--output-stderr FORM", {Kind::kWord, "", forms},
           "-oe FORM: this form on standard error, beside the other")
      .Roles(kInRow | kPerRank);
}

absl::StatusOr<std::vector<int32_t>> NumbersOf(const Settings& settings, const char* name) {
  std::vector<int32_t> numbers;
  if (settings.empty(name)) return numbers;
  for (const absl::string_view number : absl::StrSplit(settings.text(name), ',')) {
    if (!absl::SimpleAtoi(number, &numbers.emplace_back())) {
      return WrongValue(settings, name, "whole numbers between commas: 1,2,3");
    }
  }
  return numbers;
}

absl::StatusOr<double> SizeInBytes(absl::string_view flag, const std::string& text) {
  static constexpr std::pair<const char*, double> kUnits[] = {
      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"kB", 1e3},
      {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"B", 1},        {"", 1}};
  for (const auto& [unit, factor] : kUnits) {
    absl::string_view number = text;
    if (!absl::ConsumeSuffix(&number, unit)) continue;
    double value = 0;
    if (absl::SimpleAtod(number, &value) && std::isfinite(value) && value * factor >= 1) {
      return value * factor;
    }
    break;
  }
  return WrongFlag(flag, text, "a size such as 80GiB, 512MiB or 64e9");
}

void AddQuietSetting(const std::string& text, Table& table) {
  table.Add("-q, --quiet", Kind::kSwitch, text).Roles(kOfOneRun | kInRow | kPerRank);
}

void AddConfigSetting(const std::string& text, Table& table) {
  table.Add("--config FILE.json", Kind::kText, text).FlagOnly().Roles(kOfOneRun | kPerRank);
}

void AddColorSetting(Table& table) {
  table
      .Add("--color WHEN", {Kind::kWord, "auto", {"auto", "always", "never"}},
           "of errors, verdicts and progress; auto: on a terminal, unless NO_COLOR is set")
      .Roles(kOfOneRun | kInRow | kPerRank);
}

void AddHelpSettings(Table& table) {
  AddColorSetting(table);
  table.Add("--print-config", Kind::kSwitch, "print every setting and where it came from, and stop")
      .FlagOnly()
      .Roles(kOfOneRun | kPerRank);
  table.Add("-h, --help", Kind::kSwitch, "print this and stop")
      .FlagOnly()
      .Roles(kOfOneRun | kPerRank);
}

namespace {

absl::StatusOr<TokenGroup> TokenGroupOf(const Settings& settings) {
  if (settings.is("moe-token-group", "micro-batch")) return TokenGroup{TokenGroup::kMicroBatch};
  if (settings.is("moe-token-group", "sequence")) return TokenGroup{TokenGroup::kSequence};
  const int tokens = settings.integer("moe-token-group");
  if (tokens >= 1) return TokenGroup{tokens};
  return WrongValue(settings, "moe-token-group",
                    "sequence, micro-batch or a number of tokens from 1");
}

// Gates that always have an expert bias do not read the option; asking for it is no mistake.
bool HasExpertBias(const RouterConfig& router) {
  const GateDefinition* const gate = FindGate(router.gate);
  return gate != nullptr && (gate->options & kGateExpertBias) == 0 &&
         gate->make(router)->traits().expert_bias;
}

void AddGateOptions(const SettingRows& rows, Table& t) {
  t.Add("--moe-router-score-function NAME", rows,
        "of the logits; what experts are selected on and weighed by (router topk)")
      .Roles(kGeneralGate | kOfGate);
  t.Add("--moe-router-pre-softmax", rows,
        "weights are p of the selected; without it, softmax over the selected logits (router topk)")
      .Roles(kGeneralGate | kOfGate);
  t.Add("--moe-router-num-groups N", rows,
        "groups of experts, of which a token uses some; divides the experts; 0 = none (routers "
        "topk, deepseek-v2, deepseek-v3)")
      .Roles(kGeneralGate | kOfGate);
  t.Add("--moe-router-group-topk N", rows, "groups a token uses")
      .Field("group_top_k")
      .Roles(kGeneralGate | kOfGate);
  t.Add("--moe-router-topk-scaling-factor X", rows,
        "multiplies the combine weights (routers topk, deepseek-v2, deepseek-v3, longcat)")
      .Field("scaling_factor")
      .Roles(kGeneralGate | kOfGate);
  t.Add("--moe-router-enable-expert-bias", rows,
        "selection adds a bias b without gradient: b_i += X sign(mean(c) - c_i) after every step "
        "(router topk; deepseek-v3 and longcat always have it)")
      .Field("expert_bias")
      .Roles(kGeneralGate | kOfGate);
  t.Add("--moe-router-bias-update-rate X", rows, "X of the expert bias").Roles(kOfGate);
  t.Add("--moe-input-jitter-eps X", rows,
        "in training the router sees x * U[1 - X, 1 + X] (router switch)")
      .Field("input_jitter")
      .Roles(kOfGate);
  t.Add("--moe-router-random-second", rows,
        "in training keep the second choice with probability min(1, 2 w) (router gshard)")
      .Field("random_second_expert")
      .Roles(kOfGate);
  t.Add("--moe-router-jitter-eps X", rows,
        "logits within 2 X of the chosen one, in parts of the larger, share its softmax (router "
        "sparsemixer)")
      .Field("router_jitter")
      .Roles(kOfGate);
  t.Add("--num-zero-experts N", rows, "experts beside --num-experts that return the token itself")
      .Least(0, "0 (none) or more")
      .Roles(kOfGate);
}

}  // namespace

void AddShapeSettings(MoeLayerConfig& layer, Table& t) {
  const SettingRows rows = lm::RowsOf(layer);
  t.Add("--hidden-size H", &layer.router.hidden_size, "width of the residual stream")
      .Roles(kOfLayer | kInLayerRow);
  t.Add("--num-experts E", rows,
        "experts of a layer in total, never per rank; 1 with --topk 1 is the dense model")
      .Roles(kOfLayer | kAlwaysTold | kInLayerRow);
  t.Add("--moe-ffn-hidden-size F", rows, "width of one expert")
      .Least(1)
      .Roles(kOfLayer | kInLayerRow);
  t.Add("--moe-shared-expert-intermediate-size F", rows,
        "width of an expert that every token passes; 0 = none")
      .Least(0, "0 (none) or more")
      .Field("shared_expert_ffn_hidden_size")
      .Roles(kOfLayer);
  t.Add("--moe-shared-expert-gate", rows,
        "scale the shared expert by sigmoid(w . x); preset by --router qwen2")
      .Roles(kOfLayer | kAlwaysTold);
  t.Add("--activation NAME", rows, "of the experts; clamped_swiglu is gpt-oss's, and its preset")
      .Shorthand("swiglu", "swiglu")
      .Shorthand("squared-relu", "relu2")
      .Roles(kOfLayer | kAlwaysTold);
  t.Add("--moe-projection-biases", rows,
        "both projections of an expert add a bias; preset by --router gpt-oss")
      .Shorthand("disable-bias-linear", "false")
      .Roles(kOfLayer | kAlwaysTold);
}

void AddRoutingSettings(MoeLayerConfig& layer, Table& t) {
  const SettingRows rows = lm::RowsOf(layer);
  t.Add("--router NAME", {&layer.router.gate, GateNames()},
        "gate; also presets topk (1 for switch and llama4, 2 for the others) and what belongs to "
        "the model; topk: Megatron's general gate; chosen for you when you give a flag only it has")
      .Field("gate")
      .Roles(kAlwaysTold | kOfGate | kInLayerRow);
  t.Add("--moe-router-topk, --topk K", rows, "experts per token, at most E")
      .Field("top_k")
      .Roles(kAlwaysTold | kInLayerRow);
  AddGateOptions(rows, t);
  t.Add("--moe-expert-capacity-factor, --capacity-factor X|none", rows,
        "an expert takes at most C = ceil(T K X / E) of the T tokens of a group, exactly (1.1 is "
        "11/10); none = dropless")
      .Roles(kAlwaysTold | kInLayerRow);
  t.Add("--moe-token-drop-policy NAME", rows,
        "over capacity, keep the largest weights (probs) or the first tokens (position)");
  t.Add("--moe-pad-expert-input-to-capacity", rows, "give every expert exactly C rows")
      .Field("pad_to_capacity")
      .Roles(kOfGate);
  t.Add("--moe-token-group sequence|micro-batch|N",
        {Kind::kInteger, "micro-batch", {"sequence", "micro-batch"}},
        "tokens over which capacity and balance are defined; N divides a micro-batch");
  t.Add("--moe-router-load-balancing-type NAME", rows,
        "balance loss: per token group, per sequence, against the last step's global counts, or "
        "none; sinkhorn is --router sinkhorn");
  t.Add("--moe-aux-loss-coeff X", rows,
        "of the balance loss X E / (K T^2) sum_i (sum_t p_ti) c_i, which is X at balance");
  t.Add("--moe-z-loss-coeff X", rows, "of X mean_t (logsumexp_i l_ti)^2");
}

absl::Status ApplyRouterPreset(Settings& settings) {
  const auto preset = [&](const char* name, const char* text, const std::string& where) {
    return settings.Set(*settings.Find(name), {text}, Origin::kPreset, where);
  };
  if (settings.is("moe-router-load-balancing-type", "sinkhorn")) {
    if (settings.given("router") && !settings.is("router", "sinkhorn")) {
      return WrongValue(settings, "router", "sinkhorn, as --moe-router-load-balancing-type says");
    }
    MOE_RETURN_IF_ERROR(preset("router", "sinkhorn", "--moe-router-load-balancing-type sinkhorn"));
  }
  for (const Setting& s : settings.table()) {
    const bool chosen = settings.value("router").origin != Origin::kDefault;
    if (chosen || !s.is(kGeneralGate) || !settings.given(s.name)) continue;
    MOE_RETURN_IF_ERROR(preset("router", "topk", absl::StrCat("--", s.name)));
  }
  const std::string router = settings.text("router");
  const std::string where = absl::StrCat("--router ", router);
  const bool one = router == "switch" || router == "llama4";
  MOE_RETURN_IF_ERROR(preset("moe-router-topk", one ? "1" : "2", where));
  if (router == "gpt-oss") {
    MOE_RETURN_IF_ERROR(preset("activation", "clamped_swiglu", where));
    MOE_RETURN_IF_ERROR(preset("moe-projection-biases", "true", where));
  }
  if (router == "qwen2" && !settings.is("moe-shared-expert-intermediate-size", "0")) {
    MOE_RETURN_IF_ERROR(preset("moe-shared-expert-gate", "true", where));
  }
  return absl::OkStatus();
}

absl::Status CompleteLayer(const Settings& settings, MoeLayerConfig& layer) {
  layer.router.expert_bias = layer.router.expert_bias && !HasExpertBias(layer.router);
  MOE_ASSIGN_OR_RETURN(layer.router.token_group, TokenGroupOf(settings));
  if (!layer.gated_shared_expert || layer.shared_expert_ffn_hidden_size > 0)
    return absl::OkStatus();
  return WrongFlag("--moe-shared-expert-gate", "true",
                   "--moe-shared-expert-intermediate-size with it");
}

absl::Status InFlags(const absl::Status& status, const Settings& settings) {
  absl::string_view message = status.message();
  const bool router = absl::ConsumePrefix(&message, "RouterConfig.");
  if (!router) absl::ConsumePrefix(&message, "Transformer: ");
  std::string out;
  for (size_t i = 0; i < message.size();) {
    size_t end = i;
    while (end < message.size() && (absl::ascii_islower(message[end]) || message[end] == '_')) {
      ++end;
    }
    const absl::string_view word = message.substr(i, end - i);
    std::string flag;
    if (absl::StrContains(word, "_") || (router && i == 0)) {
      const Setting* setting = settings.Find(word);
      for (const char* prefix : {"moe-", "moe-router-"}) {
        if (setting == nullptr) setting = settings.Find(absl::StrCat(prefix, word));
      }
      for (const Setting& s : settings.table()) {
        if (setting == nullptr && s.field == word) setting = &s;
      }
      if (setting != nullptr) flag = setting->name;
      if (flag.empty() && word == "micro_batch_tokens") flag = "micro-batch-size x --seq-length";
    }
    absl::StrAppend(&out, flag.empty() ? "" : "--", flag.empty() ? word : flag);
    i = end;
    if (i < message.size()) out += message[i++];
  }
  return {status.code(), out};
}

}  // namespace moe::cli
