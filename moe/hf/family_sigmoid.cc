// Models that choose by sigmoid scores and a bias, as DeepSeek-V3 does (arXiv:2412.19437), as
// transformers computes them: topk_method, scoring_func and moe_layer_freq are ignored.
#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// What the weights' sum has added; DeepSeek-V3's gate itself has 1e-20.
void NothingAddedToSum(ConfigKeys& /*keys*/, HfConfig& config) {
  config.moe.router.norm_epsilon = 0.0f;
}

void ReadLfm2(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.norm_epsilon = 1e-6f;
  if (!keys.Bool("use_expert_bias", true)) {
    keys.Unsupported("use_expert_bias", "false", "true: an expert_bias per layer");
  }
}

constexpr FamilyKeys kDeepSeekKeys = {.width = "moe_intermediate_size",
                                      .experts = {"n_routed_experts", "num_local_experts"},
                                      .shared_experts = "n_shared_experts",
                                      .groups = "n_group",
                                      .kept_groups = "topk_group",
                                      .dense = "first_k_dense_replace",
                                      .norm = "norm_topk_prob",
                                      .scaling = "routed_scaling_factor"};
constexpr FamilyKeys kKimiKeys = {.width = "moe_intermediate_size",
                                  .experts = {"num_experts", "num_local_experts"},
                                  .top_k = {"num_experts_per_token", "num_experts_per_tok"},
                                  .shared_experts = {"num_shared_experts", "n_shared_experts"},
                                  .groups = {"num_expert_group", "n_group"},
                                  .kept_groups = "topk_group",
                                  .dense = "first_k_dense_replace",
                                  .norm = {"moe_renormalize", "norm_topk_prob"},
                                  .scaling = "routed_scaling_factor"};

constexpr TensorRule kRouter = Router("gate.weight");
constexpr TensorRule kSharedGate = SharedGate("shared_experts.gate_proj.weight");
constexpr TensorRule kSharedUp = SharedUp("shared_experts.up_proj.weight");
constexpr TensorRule kSharedDown = SharedDown("shared_experts.down_proj.weight");
constexpr TensorRule kBiasOfGate = ExpertBias("gate.e_score_correction_bias");
constexpr TensorRule kBiasOfBlock = ExpertBias("e_score_correction_bias");

constexpr TensorRule kDeepSeekTensors[] = {kRouter,   kBiasOfGate, kGateProj, kUpProj,
                                           kDownProj, kSharedGate, kSharedUp, kSharedDown};
constexpr TensorRule kExaoneTensors[] = {kRouter,   kBiasOfBlock, kGateProj, kUpProj,
                                         kDownProj, kSharedGate,  kSharedUp, kSharedDown};
constexpr TensorRule kBailingTensors[] = {kRouter,   ExpertBias("gate.expert_bias"),
                                          kGateProj, kUpProj,
                                          kDownProj, kSharedGate,
                                          kSharedUp, kSharedDown};
constexpr TensorRule kKimiTensors[] = {kRouter, kBiasOfGate, kW1,       kW3,
                                       kW2,     kSharedGate, kSharedUp, kSharedDown};
constexpr TensorRule kAfmoeTensors[] = {Router("router.gate.weight"),
                                        ExpertBias("expert_bias"),
                                        kGateProj,
                                        kUpProj,
                                        kDownProj,
                                        kSharedGate,
                                        kSharedUp,
                                        kSharedDown};
constexpr TensorRule kMiniMaxTensors[] = {kRouter, kBiasOfBlock, kW1, kW3, kW2};
constexpr TensorRule kLfm2Tensors[] = {kRouter, ExpertBias("expert_bias"), kW1, kW3, kW2};

constexpr FamilyDefaults kDeepSeekDefaults = {.layers = 61,
                                              .hidden = 7168,
                                              .width = 2048,
                                              .experts = 256,
                                              .top_k = 8,
                                              .shared_experts = 1,
                                              .groups = 8,
                                              .kept_groups = 4,
                                              .dense = 3,
                                              .scaling = 2.5};

// DeepSeek-V3's keys and tensors, for the model's defaults.
constexpr Family DeepSeek(absl::string_view model_type, SparseLayers* sparse,
                          const FamilyDefaults& defaults) {
  return {.model_type = model_type,
          .gate = "deepseek-v3",
          .keys = kDeepSeekKeys,
          .defaults = defaults,
          .sparse = sparse,
          .tensors = kDeepSeekTensors};
}

// Without first_k_dense_replace: transformers gives the first layer alone no experts.
constexpr Family Glm4MoeLite() {
  Family family = DeepSeek("glm4_moe_lite", ListedLayers,
                           {.layers = 47,
                            .hidden = 2048,
                            .width = 1536,
                            .experts = 64,
                            .top_k = 4,
                            .shared_experts = 1,
                            .dense = 1,
                            .scaling = 1.8});
  family.keys.dense = Key();
  return family;
}

constexpr Family Exaone() {
  Family family = DeepSeek("exaone_moe", ListedLayers,
                           {.layers = 32,
                            .hidden = 4096,
                            .width = 1024,
                            .experts = 64,
                            .top_k = 8,
                            .shared_experts = 1,
                            .dense = 1,
                            .scaling = 2.5});
  family.keys.experts = "num_experts";
  family.keys.shared_experts = "num_shared_experts";
  family.tensors = kExaoneTensors;
  return family;
}

constexpr Family kFamilies[] = {
    DeepSeek("deepseek_v3", LayersAfterDense, kDeepSeekDefaults),
    DeepSeek("deepseek_v32", ListedLayers, kDeepSeekDefaults),
    DeepSeek("glm4_moe", LayersAfterDense,
             {.layers = 46,
              .hidden = 4096,
              .width = 1408,
              .experts = 128,
              .top_k = 8,
              .shared_experts = 1,
              .dense = 1}),
    Glm4MoeLite(),
    DeepSeek("glm_moe_dsa", ListedLayers,
             {.layers = 78,
              .hidden = 6144,
              .width = 2048,
              .experts = 256,
              .top_k = 8,
              .shared_experts = 1,
              .dense = 3,
              .scaling = 2.5}),
    DeepSeek("dots1", LayersAfterDense,
             {.layers = 62, .hidden = 4608, .width = 1408, .norm = false}),
    DeepSeek("solar_open", EveryLayer,
             {.layers = 48,
              .hidden = 4096,
              .width = 1280,
              .experts = 128,
              .top_k = 8,
              .shared_experts = 1}),
    Exaone(),
    {.model_type = "kimi_linear",
     .block = "block_sparse_moe",
     .gate = "deepseek-v3",
     .keys = kKimiKeys,
     .defaults = {.layers = 27,
                  .hidden = 2304,
                  .width = 1024,
                  .experts = 256,
                  .top_k = 8,
                  .shared_experts = 1,
                  .dense = 1,
                  .scaling = 2.446},
     .sparse = ListedLayers,
     .tensors = kKimiTensors},
    {.model_type = "bailing_hybrid",
     .gate = "deepseek-v3",
     .keys = kKimiKeys,
     .defaults = {.layers = 42,
                  .hidden = 2560,
                  .width = 768,
                  .experts = 512,
                  .top_k = 8,
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
     .defaults = {.layers = 32,
                  .hidden = 2048,
                  .width = 1408,
                  .experts = 64,
                  .top_k = 6,
                  .shared_experts = 2,
                  .dense = 1},
     .sparse = LayersAfterDense,
     .tensors = kAfmoeTensors},
    {.model_type = "minimax_m2",
     .block = "block_sparse_moe",
     .gate = "deepseek-v3",
     .keys = {.width = "intermediate_size", .experts = {"num_local_experts", "num_experts"}},
     .defaults = {.layers = 62, .hidden = 3072, .width = 1536, .experts = 256, .top_k = 8},
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
     .defaults =
         {.layers = 32, .hidden = 2048, .width = 1792, .experts = 32, .top_k = 4, .dense = 2},
     .sparse = LayersAfterDense,
     .reads_activation = false,
     .more = ReadLfm2,
     .tensors = kLfm2Tensors},
};

}  // namespace

constinit const absl::Span<const Family> kSigmoidFamilies = kFamilies;

}  // namespace moe::hf
