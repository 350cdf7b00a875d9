#include "moe/cli/layer_settings.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "gating/gate.h"
#include "kernels/base/status_macros.h"

namespace moe::cli {
namespace {

template <typename T>
std::string Text(T value) {
  return absl::StrCat(value);
}

Setting Word(const char* group, const char* name, const char* fallback, const char* help,
             std::vector<std::string> words) {
  return {group, name, "", 0, Kind::kWord, "NAME", fallback, help, std::move(words)};
}

Activation ActivationOf(const std::string& name) {
  if (name == "geglu") return Activation::kGeGlu;
  if (name == "relu") return Activation::kRelu;
  if (name == "clamped_swiglu") return Activation::kClampedSwiGlu;
  return name == "relu2" ? Activation::kRelu2 : Activation::kSwiGlu;
}

LoadBalancing LoadBalancingOf(const std::string& name) {
  if (name == "seq_aux_loss") return LoadBalancing::kSeqAuxLoss;
  if (name == "global_aux_loss") return LoadBalancing::kGlobalAuxLoss;
  return name == "aux_loss" ? LoadBalancing::kAuxLoss : LoadBalancing::kNone;
}

absl::StatusOr<TokenGroup> TokenGroupOf(const Settings& settings) {
  if (settings.is("moe-token-group", "micro-batch")) return TokenGroup{TokenGroup::kMicroBatch};
  if (settings.is("moe-token-group", "sequence")) return TokenGroup{TokenGroup::kSequence};
  const int tokens = settings.integer("moe-token-group");
  if (tokens >= 1) return TokenGroup{tokens};
  return WrongFlag("--moe-token-group", settings.text("moe-token-group"),
                   "sequence, micro-batch or a number of tokens from 1");
}

// Gates that always have an expert bias do not read the option; asking for it is no mistake.
bool HasExpertBias(const RouterConfig& router) {
  const GateDefinition* const gate = FindGate(router.gate);
  return gate != nullptr && (gate->options & kGateExpertBias) == 0 &&
         gate->make(router)->traits().expert_bias;
}

void SetGateOptions(const Settings& settings, RouterConfig& router) {
  router.score_function = settings.is("moe-router-score-function", "sigmoid")
                              ? ScoreFunction::kSigmoid
                              : ScoreFunction::kSoftmax;
  router.pre_softmax = settings.on("moe-router-pre-softmax");
  router.num_groups = settings.integer("moe-router-num-groups");
  router.group_top_k = settings.integer("moe-router-group-topk");
  router.scaling_factor = static_cast<float>(settings.real("moe-router-topk-scaling-factor"));
  router.bias_update_rate = static_cast<float>(settings.real("moe-router-bias-update-rate"));
  router.input_jitter = static_cast<float>(settings.real("moe-input-jitter-eps"));
  router.random_second_expert = settings.on("moe-router-random-second");
  router.expert_bias = settings.on("moe-router-enable-expert-bias") && !HasExpertBias(router);
}

absl::StatusOr<RouterConfig> RouterOf(const Settings& settings) {
  RouterConfig router;
  router.gate = settings.text("router");
  router.num_experts = settings.integer("num-experts");
  router.num_zero_experts = settings.integer("num-zero-experts");
  router.top_k = settings.integer("moe-router-topk");
  router.hidden_size = settings.integer("hidden-size");
  SetGateOptions(settings, router);
  if (!settings.is("moe-expert-capacity-factor", "none")) {
    router.capacity_factor = settings.real("moe-expert-capacity-factor");
  }
  router.drop_policy = settings.is("moe-token-drop-policy", "position") ? DropPolicy::kPosition
                                                                        : DropPolicy::kProbability;
  router.pad_to_capacity = settings.on("moe-pad-expert-input-to-capacity");
  MOE_ASSIGN_OR_RETURN(router.token_group, TokenGroupOf(settings));
  router.load_balancing = LoadBalancingOf(settings.text("moe-router-load-balancing-type"));
  router.aux_loss_coeff = static_cast<float>(settings.real("moe-aux-loss-coeff"));
  router.z_loss_coeff = static_cast<float>(settings.real("moe-z-loss-coeff"));
  return router;
}

void AddGateOptions(const char* group, std::vector<Setting>& table) {
  const RouterConfig d;
  table.insert(
      table.end(),
      {Word(group, "moe-router-score-function", "softmax",
            "of the logits; what experts are selected on and weighed by (router topk)",
            {"softmax", "sigmoid"}),
       {group, "moe-router-pre-softmax", "", 0, Kind::kSwitch, "", "",
        "weights are p of the selected; without it, softmax over the selected logits (router "
        "topk)"},
       {group, "moe-router-num-groups", "", 0, Kind::kInteger, "N", Text(d.num_groups),
        "groups of experts, of which a token uses some; divides the experts; 0 = none (routers "
        "topk, "
        "deepseek-v2, deepseek-v3)"},
       {group, "moe-router-group-topk", "", 0, Kind::kInteger, "N", Text(d.group_top_k),
        "groups a token uses"},
       {group, "moe-router-topk-scaling-factor", "", 0, Kind::kReal, "X", Text(d.scaling_factor),
        "multiplies the combine weights (routers topk, deepseek-v2, deepseek-v3, longcat)"},
       {group, "moe-router-enable-expert-bias", "", 0, Kind::kSwitch, "", "",
        "selection adds a bias b without gradient: b_i += X sign(mean(c) - c_i) after every step "
        "(router topk; deepseek-v3 and longcat always have it)"},
       {group, "moe-router-bias-update-rate", "", 0, Kind::kReal, "X", Text(1e-3),
        "X of the expert bias"},
       {group, "moe-input-jitter-eps", "", 0, Kind::kReal, "X", Text(d.input_jitter),
        "in training the router sees x * U[1 - X, 1 + X] (router switch)"},
       {group, "moe-router-random-second", "", 0, Kind::kSwitch, "", "",
        "in training keep the second choice with probability min(1, 2 w) (router gshard)"},
       {group, "num-zero-experts", "", 0, Kind::kInteger, "N", Text(d.num_zero_experts),
        "experts beside --num-experts that return the token itself"}});
}

}  // namespace

void AddShapeSettings(const char* group, const LayerDefaults& defaults,
                      std::vector<Setting>& table) {
  const MoeLayerConfig d;
  table.insert(table.end(),
               {{group, "hidden-size", "", 0, Kind::kInteger, "H", Text(defaults.hidden_size),
                 "width of the residual stream"},
                {group, "num-experts", "", 0, Kind::kInteger, "E", Text(defaults.num_experts),
                 "experts of a layer in total, never per rank; 1 with --topk 1 is the dense model"},
                {group, "moe-ffn-hidden-size", "", 0, Kind::kInteger, "F",
                 Text(defaults.ffn_hidden_size), "width of one expert"},
                {group, "moe-shared-expert-intermediate-size", "", 0, Kind::kInteger, "F",
                 Text(d.shared_expert_ffn_hidden_size),
                 "width of an expert that every token passes; 0 = none"},
                {group, "moe-shared-expert-gate", "", 0, Kind::kSwitch, "", "",
                 "scale the shared expert by sigmoid(w . x); preset by --router qwen2"},
                Word(group, "activation", "swiglu",
                     "of the experts; clamped_swiglu is gpt-oss's, and its preset",
                     {"swiglu", "geglu", "relu", "relu2", "clamped_swiglu"}),
                {group, "moe-projection-biases", "", 0, Kind::kSwitch, "", "",
                 "both projections of an expert add a bias; preset by --router gpt-oss"}});
}

void AddRoutingSettings(const char* group, const LayerDefaults& defaults,
                        std::vector<Setting>& table) {
  const RouterConfig d;
  table.insert(table.end(),
               {Word(group, "router", d.gate.c_str(),
                     "gate; also presets topk (1 for switch and llama4, 2 for the others) and what "
                     "belongs to "
                     "the model; topk is the general one, preset by the flags that only it reads",
                     GateNames()),
                {group, "moe-router-topk", "topk", 0, Kind::kInteger, "K", Text(d.top_k),
                 "experts per token, at most E"}});
  AddGateOptions(group, table);
  table.insert(
      table.end(),
      {{group,
        "moe-expert-capacity-factor",
        "capacity-factor",
        0,
        Kind::kReal,
        "X|none",
        "none",
        "an expert takes at most C = ceil(T K X / E) of the T tokens of a group; none = dropless",
        {"none"}},
       Word(group, "moe-token-drop-policy", "probs",
            "over capacity, keep the largest weights (probs) or the first tokens (position)",
            {"probs", "position"}),
       {group, "moe-pad-expert-input-to-capacity", "", 0, Kind::kSwitch, "", "",
        "give every expert exactly C rows"},
       {group,
        "moe-token-group",
        "",
        0,
        Kind::kInteger,
        "sequence|micro-batch|N",
        "micro-batch",
        "tokens over which capacity and balance are defined; N divides a micro-batch",
        {"sequence", "micro-batch"}},
       Word(
           group, "moe-router-load-balancing-type", "aux_loss",
           "balance loss: per token group, per sequence, against the last step's global counts, or "
           "none; sinkhorn is --router sinkhorn",
           {"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"}),
       {group, "moe-aux-loss-coeff", "", 0, Kind::kReal, "X", Text(defaults.aux_loss_coeff),
        "of the balance loss X E / (K T^2) sum_i (sum_t p_ti) c_i, which is X at balance"},
       {group, "moe-z-loss-coeff", "", 0, Kind::kReal, "X", Text(defaults.z_loss_coeff),
        "of X mean_t (logsumexp_i l_ti)^2"}});
}

absl::Status ApplyRouterPreset(Settings& settings) {
  const auto preset = [&](const char* name, const char* text, const std::string& where) {
    return settings.Set(*settings.Find(name), {text}, Origin::kPreset, where);
  };
  if (settings.is("moe-router-load-balancing-type", "sinkhorn")) {
    if (settings.given("router") && !settings.is("router", "sinkhorn")) {
      return WrongFlag("--router", settings.text("router"),
                       "sinkhorn, as --moe-router-load-balancing-type says");
    }
    MOE_RETURN_IF_ERROR(preset("router", "sinkhorn", "--moe-router-load-balancing-type sinkhorn"));
  }
  for (const char* general : {"moe-router-score-function", "moe-router-pre-softmax",
                              "moe-router-num-groups", "moe-router-group-topk",
                              "moe-router-topk-scaling-factor", "moe-router-enable-expert-bias"}) {
    if (!settings.given(general) || settings.value("router").origin != Origin::kDefault) continue;
    MOE_RETURN_IF_ERROR(preset("router", "topk", absl::StrCat("--", general)));
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

absl::StatusOr<MoeLayerConfig> LayerConfigOf(const Settings& settings) {
  for (const char* width : {"moe-shared-expert-intermediate-size", "num-zero-experts"}) {
    if (settings.integer(width) < 0) {
      return WrongFlag(absl::StrCat("--", width), settings.text(width), "0 (none) or more");
    }
  }
  MoeLayerConfig layer;
  MOE_ASSIGN_OR_RETURN(layer.router, RouterOf(settings));
  layer.ffn_hidden_size = settings.integer("moe-ffn-hidden-size");
  layer.shared_expert_ffn_hidden_size = settings.integer("moe-shared-expert-intermediate-size");
  layer.gated_shared_expert = settings.on("moe-shared-expert-gate");
  if (layer.gated_shared_expert && layer.shared_expert_ffn_hidden_size == 0) {
    return WrongFlag("--moe-shared-expert-gate", "true",
                     "--moe-shared-expert-intermediate-size with it");
  }
  layer.activation = ActivationOf(settings.text("activation"));
  layer.projection_biases = settings.on("moe-projection-biases");
  return layer;
}

DispatcherOptions DispatcherOf(const Settings& settings) {
  return {.algorithm = settings.is("dispatch", "direct")         ? DispatchAlgorithm::kDirect
                       : settings.is("dispatch", "hierarchical") ? DispatchAlgorithm::kHierarchical
                                                                 : DispatchAlgorithm::kStaged,
          .node_size = settings.integer("node-size")};
}

absl::Status WrongFlag(absl::string_view flag, absl::string_view value,
                       absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(flag, " is ", value, ", expected ", expected));
}

std::string InFlags(absl::string_view message, const Settings& settings) {
  static constexpr std::pair<absl::string_view, absl::string_view> kOthers[] = {
      {"top_k", "moe-router-topk"},
      {"group_top_k", "moe-router-group-topk"},
      {"num_groups", "moe-router-num-groups"},
      {"score_function", "moe-router-score-function"},
      {"pre_softmax", "moe-router-pre-softmax"},
      {"scaling_factor", "moe-router-topk-scaling-factor"},
      {"expert_bias", "moe-router-enable-expert-bias"},
      {"bias_update_rate", "moe-router-bias-update-rate"},
      {"input_jitter", "moe-input-jitter-eps"},
      {"random_second_expert", "moe-router-random-second"},
      {"gate", "router"},
      {"pad_to_capacity", "moe-pad-expert-input-to-capacity"},
      {"ffn_hidden_size", "moe-ffn-hidden-size"},
      {"shared_expert_ffn_hidden_size", "moe-shared-expert-intermediate-size"},
      {"micro_batch_tokens", "micro-batch-size x --seq-length"}};
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
      if (setting == nullptr) setting = settings.Find(absl::StrCat("moe-", word));
      if (setting != nullptr) flag = setting->name;
      for (const auto& [field, name] : kOthers) {
        if (flag.empty() && word == field) flag = std::string(name);
      }
    }
    if (!flag.empty()) {
      absl::StrAppend(&out, "--", flag);
    } else {
      absl::StrAppend(&out, word);
    }
    i = end;
    if (i < message.size()) out += message[i++];
  }
  return out;
}

}  // namespace moe::cli
