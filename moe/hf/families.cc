// The table of the public models' families. By softmax over all experts: Mixtral, arXiv:2401.04088,
// Qwen2-MoE, Qwen3-MoE, arXiv:2505.09388, OLMoE, arXiv:2409.02060, DeepSeek-V2, arXiv:2405.04434,
// models with the same blocks under other names, and Phi-3.5-MoE, arXiv:2409.12136, with softmaxes
// over subsets of the experts. By sigmoid scores and a bias: DeepSeek-V3 (arXiv:2412.19437) and
// others. With experts or layouts of their own: gpt-oss (arXiv:2508.10925), with unpacked weights,
// Llama 4's text model, whose weight multiplies the expert's input, and LongCat-Flash
// (arXiv:2509.01322), with identity experts. All as transformers computes them: jitter of inputs is
// for training only, and DeepSeek-V3's topk_method, scoring_func and moe_layer_freq are ignored.
#include <algorithm>
#include <array>
#include <iterator>

#include <absl/strings/str_cat.h>

#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// transformers ignores norm_topk_prob, and uses groups with the limited method alone.
void ReadDeepSeekV2(ConfigKeys& keys, HfConfig& config) {
  const std::string method = keys.Text("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    config.moe.router.num_groups = keys.Integer32("n_group", std::nullopt, kExperts);
    config.moe.router.group_top_k = keys.Integer32("topk_group", std::nullopt, kExperts);
  } else if (method != "greedy") {
    keys.Unsupported("topk_method", method, "greedy or group_limited_greedy");
  }
  keys.RefuseIfSet("mlp_bias", "false: experts without biases");
}

// The gate requires two choices: transformers ignores num_experts_per_tok.
void ReadPhiMoe(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.router_jitter = static_cast<float>(keys.Real("router_jitter_noise", 0.01));
}

// Experts are selected by p + b and weighed by p / max(sum p, moe_norm_min). The maximum is not
// implemented: with 1e-12 it equals the sum, except where a bias selects experts of probability 0.
void ReadErnie(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.expert_bias = true;
  const double least = keys.Real("moe_norm_min", 1e-12);
  if (least > 1e-12) keys.Unsupported("moe_norm_min", absl::StrCat(least), "at most 1e-12");
  keys.RefuseIfSet("use_bias", "false: experts without biases");
}

// No epsilon is added to the sum of weights; DeepSeek-V3's own gate adds 1e-20.
void NothingAddedToSum(ConfigKeys& /*keys*/, HfConfig& config) {
  config.moe.router.norm_epsilon = 0.0f;
}

void ReadLfm2(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.norm_epsilon = 1e-6f;
  if (!keys.Bool("use_expert_bias", true)) {
    keys.Unsupported("use_expert_bias", "false", "true: an expert_bias per layer");
  }
}

// transformers ignores hidden_act.
void ReadGptOss(ConfigKeys& keys, HfConfig& config) {
  const double limit = keys.Real("swiglu_limit", 7.0);
  if (!(limit > 0)) keys.Unsupported("swiglu_limit", absl::StrCat(limit), "a number above 0");
  config.moe.activation = {Activation::kClampedSwiGlu,
                           static_cast<float>(keys.Real("swiglu_alpha", 1.702)),
                           static_cast<float>(limit)};
  config.moe.projection_biases = true;
}

void ReadLongCat(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.num_zero_experts = keys.Integer32("zero_expert_num", 256, {0, kExperts.most});
}

constexpr Key PerLayer(const char* field, const char* other) {
  Key key(field, other);
  key.per_layer = true;
  return key;
}

constexpr FamilyKeys kMixtralKeys = {.width = "intermediate_size",
                                     .experts = {"num_local_experts", "num_experts"}};
constexpr FamilyKeys kQwen2Keys = {.width = "moe_intermediate_size",
                                   .experts = "num_experts",
                                   .shared_width = "shared_expert_intermediate_size",
                                   .norm = "norm_topk_prob"};
constexpr FamilyKeys kQwen3Keys = {.width = "moe_intermediate_size",
                                   .experts = {"num_experts", "num_local_experts"},
                                   .norm = "norm_topk_prob"};
constexpr FamilyKeys kOlmoeKeys = {.width = "intermediate_size",
                                   .experts = {"num_experts", "num_local_experts"},
                                   .norm = "norm_topk_prob"};
constexpr FamilyKeys kDeepSeekKeys = {.width = "moe_intermediate_size",
                                      .experts = {"n_routed_experts", "num_local_experts"},
                                      .shared_experts = "n_shared_experts",
                                      .groups = "n_group",
                                      .kept_groups = "topk_group",
                                      .dense = "first_k_dense_replace",
                                      .norm = "norm_topk_prob",
                                      .scaling = "routed_scaling_factor"};
// Fields under the usual names, or the names of the published files, which take precedence.
constexpr FamilyKeys kKimiKeys = {.width = "moe_intermediate_size",
                                  .experts = {"num_local_experts", "num_experts"},
                                  .top_k = {"num_experts_per_tok", "num_experts_per_token"},
                                  .shared_experts = {"n_shared_experts", "num_shared_experts"},
                                  .groups = {"n_group", "num_expert_group"},
                                  .kept_groups = "topk_group",
                                  .dense = "first_k_dense_replace",
                                  .norm = {"norm_topk_prob", "moe_renormalize"},
                                  .scaling = "routed_scaling_factor"};

// Names of the tensors of experts, one each, and of a shared expert.
constexpr std::array<TensorRule, 3> ExpertTensors(absl::string_view gate, absl::string_view up,
                                                  absl::string_view down) {
  constexpr ExpertAxis kAxis = ExpertAxis::kNumbered;
  return {{{gate, ParameterKind::kExpertGateUp, kAxis, TensorRows::kGate},
           {up, ParameterKind::kExpertGateUp, kAxis, TensorRows::kUp},
           {down, ParameterKind::kExpertDown, kAxis}}};
}
constexpr std::array<TensorRule, 3> SharedTensors(absl::string_view gate, absl::string_view up,
                                                  absl::string_view down) {
  return {{{gate, ParameterKind::kSharedGateUp, ExpertAxis::kNone, TensorRows::kGate},
           {up, ParameterKind::kSharedGateUp, ExpertAxis::kNone, TensorRows::kUp},
           {down, ParameterKind::kSharedDown}}};
}
// `fused_name`: as in TensorRule.
constexpr TensorRule Router(absl::string_view name, absl::string_view fused_name = {}) {
  return {.name = name, .parameter = ParameterKind::kRouterWeight, .fused_name = fused_name};
}
constexpr TensorRule ExpertBias(absl::string_view name, absl::string_view fused_name = {}) {
  return {.name = name, .parameter = ParameterKind::kExpertBias, .fused_name = fused_name};
}

// The first rules, then those of the lists.
template <size_t N, size_t... Ns>
constexpr auto Join(const TensorRule (&first)[N], const std::array<TensorRule, Ns>&... lists) {
  std::array<TensorRule, N + (Ns + ... + 0)> all;
  auto at = std::copy(std::begin(first), std::end(first), all.begin());
  ((at = std::copy(lists.begin(), lists.end(), at)), ...);
  return all;
}

constexpr auto kGateUpDown = ExpertTensors(
    "experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight");
constexpr auto kW1W3W2 =
    ExpertTensors("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight");
constexpr auto kSharedExpert =
    SharedTensors("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight",
                  "shared_expert.down_proj.weight");
constexpr auto kSharedExperts =
    SharedTensors("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight",
                  "shared_experts.down_proj.weight");
constexpr auto kSharedMlp = SharedTensors(
    "shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight", "shared_mlp.down_proj.weight");

constexpr TensorRule kRouter = Router("gate.weight");
constexpr TensorRule kBiasOfGate = ExpertBias("gate.e_score_correction_bias");

constexpr auto kMixtralTensors = Join({kRouter}, kW1W3W2);
constexpr auto kPhiMoeTensors = Join({Router("gate.weight", "router.weight")}, kW1W3W2);
constexpr TensorRule kGraniteTensors[] = {
    Router("router.layer.weight", "router.weight"),
    {.name = "input_linear.weight",
     .parameter = ParameterKind::kExpertGateUp,
     .experts = ExpertAxis::kStacked,
     .fused_name = "experts.gate_up_proj"},
    {.name = "output_linear.weight",
     .parameter = ParameterKind::kExpertDown,
     .experts = ExpertAxis::kStacked,
     .fused_name = "experts.down_proj"},
};
constexpr auto kHunYuanTensors = Join({Router("gate.wg.weight")}, kGateUpDown, kSharedMlp);
constexpr std::array kSharedGate = {
    TensorRule{"shared_expert_gate.weight", ParameterKind::kSharedOutputGate}};
constexpr auto kQwen2Tensors = Join({kRouter}, kGateUpDown, kSharedExpert, kSharedGate);
constexpr auto kOlmoeTensors = Join({kRouter}, kGateUpDown);
constexpr auto kJambaTensors = Join({Router("router.weight")}, kGateUpDown);
constexpr auto kDeepSeekV2Tensors = Join({kRouter}, kGateUpDown, kSharedExperts);
constexpr auto kErnieTensors = Join({kRouter,
                                     {.name = "moe_statics.e_score_correction_bias",
                                      .parameter = ParameterKind::kExpertBias,
                                      .row_vector = true,
                                      .fused_name = "gate.moe_statics.e_score_correction_bias"}},
                                    kGateUpDown, kSharedExperts);
constexpr auto kDeepSeekTensors = Join({kRouter, kBiasOfGate}, kGateUpDown, kSharedExperts);
constexpr auto kExaoneTensors =
    Join({kRouter, ExpertBias("e_score_correction_bias", kBiasOfGate.name)}, kGateUpDown,
         kSharedExperts);
constexpr auto kBailingTensors =
    Join({kRouter, ExpertBias("gate.expert_bias", kBiasOfGate.name)}, kGateUpDown, kSharedExperts);
constexpr auto kKimiTensors = Join({kRouter, kBiasOfGate}, kW1W3W2, kSharedExperts);
constexpr auto kAfmoeTensors =
    Join({Router("router.gate.weight"), ExpertBias("expert_bias")}, kGateUpDown, kSharedExperts);
constexpr auto kMiniMaxTensors = Join({kRouter, ExpertBias("e_score_correction_bias")}, kW1W3W2);
constexpr auto kLfm2Tensors = Join({kRouter, ExpertBias("expert_bias")}, kW1W3W2);
constexpr TensorRule kGptOssTensors[] = {
    Router("router.weight"),
    {"router.bias", ParameterKind::kRouterBias},
    {"experts.gate_up_proj", ParameterKind::kExpertGateUp, ExpertAxis::kStacked,
     TensorRows::kInterleaved, /*transposed=*/true},
    {"experts.gate_up_proj_bias", ParameterKind::kExpertGateUpBias, ExpertAxis::kStacked,
     TensorRows::kInterleaved},
    {"experts.down_proj", ParameterKind::kExpertDown, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    {"experts.down_proj_bias", ParameterKind::kExpertDownBias, ExpertAxis::kStacked},
};
constexpr auto kLlama4Tensors =
    Join({Router("router.weight"),
          {"experts.gate_up_proj", ParameterKind::kExpertGateUp, ExpertAxis::kStacked,
           TensorRows::kAll, /*transposed=*/true},
          {"experts.down_proj", ParameterKind::kExpertDown, ExpertAxis::kStacked, TensorRows::kAll,
           /*transposed=*/true}},
         kSharedExpert);
constexpr auto kLongCatTensors =
    Join({Router("router.classifier.weight"), ExpertBias("router.e_score_correction_bias")},
         kGateUpDown);

constexpr FamilyDefaults kMixtralDefaults = {.sizes = {32, 4096, 14336, 8, 2}};
constexpr FamilyDefaults kDeepSeekDefaults = {.sizes = {61, 7168, 2048, 256, 8},
                                              .shared_experts = 1,
                                              .groups = 8,
                                              .kept_groups = 4,
                                              .dense = 3,
                                              .scaling = 2.5};

// DeepSeek-V3's keys and tensors, with the model's own defaults.
constexpr Family DeepSeek(absl::string_view model_type, SparseLayers* sparse,
                          const FamilyDefaults& defaults) {
  return {.model_type = model_type,
          .gate = "deepseek-v3",
          .keys = kDeepSeekKeys,
          .defaults = defaults,
          .sparse = sparse,
          .tensors = kDeepSeekTensors};
}

// Has no first_k_dense_replace: in transformers the first layer alone has no experts.
constexpr Family Glm4MoeLite() {
  Family family =
      DeepSeek("glm4_moe_lite", ListedLayers,
               {.sizes = {47, 2048, 1536, 64, 4}, .shared_experts = 1, .dense = 1, .scaling = 1.8});
  family.keys.dense = Key();
  return family;
}

constexpr Family Exaone() {
  Family family =
      DeepSeek("exaone_moe", ListedLayers,
               {.sizes = {32, 4096, 1024, 64, 8}, .shared_experts = 1, .dense = 1, .scaling = 2.5});
  family.keys.experts = "num_experts";
  family.keys.shared_experts = "num_shared_experts";
  family.tensors = kExaoneTensors;
  return family;
}

constexpr Family kFamilies[] = {
    // By softmax.
    {.model_type = "mixtral",
     .block = "block_sparse_moe",
     .fused_block = "mlp",
     .gate = "mixtral",
     .keys = kMixtralKeys,
     .defaults = kMixtralDefaults,
     .tensors = kMixtralTensors},
    {.model_type = "minimax",
     .block = "block_sparse_moe",
     .fused_block = "mlp",
     .gate = "mixtral",
     .keys = kMixtralKeys,
     .defaults = kMixtralDefaults,
     .tensors = kMixtralTensors},
    {.model_type = "granitemoe",
     .block = "block_sparse_moe",
     .gate = "mixtral",
     .keys = {.width = "intermediate_size", .experts = "num_local_experts"},
     .defaults = {.sizes = {32, 4096, 11008, 8, 2}},
     .tensors = kGraniteTensors},
    {.model_type = "phimoe",
     .block = "block_sparse_moe",
     .fused_block = "mlp",
     .gate = "sparsemixer",
     .keys = {.width = "intermediate_size", .experts = "num_local_experts"},
     .defaults = {.sizes = {32, 4096, 6400, 16, 2}},
     .more = ReadPhiMoe,
     .tensors = kPhiMoeTensors},
    {.model_type = "hunyuan_v1_moe",
     .gate = "mixtral",
     .keys = {.width = "intermediate_size",
              .experts = {"num_experts", "num_local_experts"},
              .top_k = PerLayer("moe_topk", "num_experts_per_tok"),
              .shared_width = "intermediate_size"},
     .defaults = {.sizes = {32, 4096, 11008, 1, 1}, .shared_width = 11008},
     .tensors = kHunYuanTensors},
    {.model_type = "qwen2_moe",
     .gate = "qwen2",
     .keys = kQwen2Keys,
     .defaults = {.sizes = {24, 2048, 1408, 60, 4}, .shared_width = 5632, .norm = false},
     .sparse = EverySparseStep,
     .gated_shared_expert = true,
     .tensors = kQwen2Tensors},
    {.model_type = "qwen3_moe",
     .gate = "qwen3",
     .keys = kQwen3Keys,
     .defaults = {.sizes = {24, 2048, 768, 128, 8}, .norm = false},
     .sparse = EverySparseStep,
     .tensors = kOlmoeTensors},
    {.model_type = "qwen3_next",
     .gate = "qwen3",
     .keys = kQwen2Keys,
     .defaults = {.sizes = {48, 2048, 512, 512, 10}, .shared_width = 512},
     .sparse = EverySparseStep,
     .gated_shared_expert = true,
     .tensors = kQwen2Tensors},
    {.model_type = "qwen3_5_moe_text",
     .nested_in = "qwen3_5_moe",
     .gate = "qwen3",
     .keys = {.width = "moe_intermediate_size",
              .experts = "num_experts",
              .shared_width = "shared_expert_intermediate_size"},
     .defaults = {.sizes = {40, 2048, 512, 256, 8}, .shared_width = 512},
     .gated_shared_expert = true,
     .tensors = kQwen2Tensors},
    {.model_type = "olmoe",
     .gate = "olmoe",
     .keys = kOlmoeKeys,
     .defaults = {.sizes = {16, 2048, 2048, 64, 8}, .norm = false},
     .tensors = kOlmoeTensors},
    {.model_type = "flex_olmo",
     .gate = "olmoe",
     .keys = kOlmoeKeys,
     .defaults = {.sizes = {32, 4096, 11008, 7, 5}, .norm = false},
     .tensors = kOlmoeTensors},
    {.model_type = "jamba",
     .block = "feed_forward",
     .gate = "olmoe",
     .keys = {.width = "intermediate_size", .experts = {"num_experts", "num_local_experts"}},
     .defaults = {.sizes = {32, 4096, 14336, 16, 2}},
     .sparse = JambaLayers,
     .tensors = kJambaTensors},
    {.model_type = "deepseek_v2",
     .gate = "deepseek-v2",
     .keys = {.width = "moe_intermediate_size",
              .experts = {"n_routed_experts", "num_experts"},
              .shared_experts = "n_shared_experts",
              .dense = "first_k_dense_replace",
              .scaling = "routed_scaling_factor"},
     .defaults = {.sizes = {32, 4096, 1407, 64}, .shared_experts = 2},
     .sparse = LayersAfterDense,
     .more = ReadDeepSeekV2,
     .tensors = kDeepSeekV2Tensors},
    {.model_type = "ernie4_5_moe",
     .gate = "topk",
     .keys = {.width = "moe_intermediate_size",
              .experts = {"moe_num_experts", "num_experts"},
              .top_k = {"moe_k", "num_experts_per_tok"},
              .shared_experts = "moe_num_shared_experts"},
     .defaults = {.sizes = {28, 2560, 1536, 64, 6}, .shared_experts = 2},
     .sparse = ErnieLayers,
     .more = ReadErnie,
     .tensors = kErnieTensors},
    // By sigmoid and a bias.
    DeepSeek("deepseek_v3", LayersAfterDense, kDeepSeekDefaults),
    DeepSeek("deepseek_v32", ListedLayers, kDeepSeekDefaults),
    DeepSeek("glm4_moe", LayersAfterDense,
             {.sizes = {46, 4096, 1408, 128, 8}, .shared_experts = 1, .dense = 1}),
    Glm4MoeLite(),
    DeepSeek("glm_moe_dsa", ListedLayers,
             {.sizes = {78, 6144, 2048, 256, 8}, .shared_experts = 1, .dense = 3, .scaling = 2.5}),
    DeepSeek("dots1", LayersAfterDense, {.sizes = {62, 4608, 1408}, .norm = false}),
    DeepSeek("solar_open", EveryLayer, {.sizes = {48, 4096, 1280, 128, 8}, .shared_experts = 1}),
    Exaone(),
    {.model_type = "kimi_linear",
     .block = "block_sparse_moe",
     .fused_block = "mlp",
     .gate = "deepseek-v3",
     .keys = kKimiKeys,
     .defaults =
         {.sizes = {27, 2304, 1024, 256, 8}, .shared_experts = 1, .dense = 1, .scaling = 2.446},
     .sparse = ListedLayers,
     .tensors = kKimiTensors},
    {.model_type = "bailing_hybrid",
     .gate = "deepseek-v3",
     .keys = kKimiKeys,
     .defaults = {.sizes = {42, 2560, 768, 512, 8},
                  .shared_experts = 1,
                  .groups = 8,
                  .kept_groups = 4,
                  .dense = 2,
                  .scaling = 2.5},
     .sparse = ListedLayers,
     .tensors = kBailingTensors},
    {.model_type = "afmoe",
     .gate = "deepseek-v3",
     .keys = {.width = "moe_intermediate_size",
              .experts = "num_experts",
              .shared_experts = "num_shared_experts",
              .dense = "num_dense_layers",
              .scaling = "route_scale"},
     .defaults = {.sizes = {32, 2048, 1408, 64, 6}, .shared_experts = 2, .dense = 1},
     .sparse = LayersAfterDense,
     .tensors = kAfmoeTensors},
    {.model_type = "minimax_m2",
     .block = "block_sparse_moe",
     .fused_block = "mlp",
     .gate = "deepseek-v3",
     .keys = {.width = "intermediate_size", .experts = {"num_local_experts", "num_experts"}},
     .defaults = {.sizes = {62, 3072, 1536, 256, 8}},
     .more = NothingAddedToSum,
     .tensors = kMiniMaxTensors},
    {.model_type = "lfm2_moe",
     .block = "feed_forward",
     .gate = "deepseek-v3",
     .keys = {.width = "moe_intermediate_size",
              .experts = "num_experts",
              .dense = "num_dense_layers",
              .norm = "norm_topk_prob",
              .scaling = "routed_scaling_factor"},
     .defaults = {.sizes = {32, 2048, 1792, 32, 4}, .dense = 2},
     .sparse = LayersAfterDense,
     .reads_activation = false,
     .more = ReadLfm2,
     .tensors = kLfm2Tensors},
    // With experts or layouts of their own.
    {.model_type = "gpt_oss",
     .gate = "gpt-oss",
     .keys = {.width = "intermediate_size", .experts = {"num_local_experts", "num_experts"}},
     .defaults = {.sizes = {36, 2880, 2880, 128, 4}},
     .reads_activation = false,
     .more = ReadGptOss,
     .tensors = kGptOssTensors},
    // intermediate_size is the experts' width; dense layers have intermediate_size_mlp.
    {.model_type = "llama4_text",
     .nested_in = "llama4",
     .block = "feed_forward",
     .gate = "llama4",
     .keys = {.width = "intermediate_size",
              .experts = "num_local_experts",
              .shared_width = "intermediate_size"},
     .defaults = {.sizes = {48, 5120, 8192, 16, 1}, .shared_width = 8192},
     .sparse = Llama4Layers,
     .tensors = kLlama4Tensors},
    {.model_type = "longcat_flash",
     .gate = "longcat",
     .keys = {.layers = "num_layers",
              .width = {"expert_ffn_hidden_size", "moe_intermediate_size"},
              .experts = {"n_routed_experts", "num_local_experts"},
              .top_k = {"moe_topk", "num_experts_per_tok"},
              .scaling = "routed_scaling_factor"},
     .defaults = {.sizes = {28, 6144, 2048, 512, 12}, .scaling = 6.0},
     .more = ReadLongCat,
     .tensors = kLongCatTensors},
};

}  // namespace

absl::Span<const Family> Families() {
  return kFamilies;
}

}  // namespace moe::hf
