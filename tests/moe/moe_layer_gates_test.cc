// Every gate and kind of expert in the whole layer: against the dense float64 loop, and the same
// bits in layouts that split experts, replicate them, overlap and read peers in place.
#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gating/gate.h"
#include "tests/moe/layer_case.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using testing::ExpectHoldsInLayouts;
using testing::LayerResult;
using testing::LayerWork;
using testing::Layout;
using testing::MakeWork;
using testing::RunLayer;
using testing::SmallConfig;

// Under sanitizers the first alone, on a simulated device two; moe_layer_test runs every exchange
// and overlap there.
std::vector<Layout> Layouts() {
  std::vector<Layout> layouts = {
      {.ranks = 3, .expert_parallel = 3, .overlap = 2},
      {.ranks = 2, .expert_parallel = 2},
      {.ranks = 4, .expert_parallel = 2, .dispatch = DispatchAlgorithm::kDirect},
      {.ranks = 4,
       .expert_parallel = 4,
       .dispatch = DispatchAlgorithm::kHierarchical,
       .node_size = 2}};
  if (testing::LayerDevice() == DeviceKind::kCuda) layouts.resize(2);
  if (testing::kSanitized) layouts.resize(1);
  return layouts;
}

// On a simulated device those that differ: gating_device_test compares all there.
std::vector<std::string> Gates() {
  if (testing::LayerDevice() == DeviceKind::kCuda) return testing::GatesUnlike(GateNames());
  return testing::GatesHere(GateNames());
}

MoeLayerConfig ConfigOf(const std::string& gate) {
  MoeLayerConfig config = SmallConfig();
  config.router.gate = gate;
  const int32_t only = FindGate(gate)->only_top_k;
  config.router.top_k = only != 0 ? only : 2;
  config.router.seed = 4;
  return config;
}

// Biases that start at 0 take values, so that they matter.
LayerWork WorkOf(const MoeLayerConfig& config, std::vector<int64_t> micro_batches = {6, 5, 7}) {
  LayerWork work = MakeWork(config, std::move(micro_batches));
  work.override_parameter = [](const ParameterSpec& spec, absl::Span<float> values) {
    if (spec.initializer != Initializer::kZeros) return;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.1f * static_cast<float>(i % 5) - 0.2f;
    }
  };
  return work;
}

std::string TestName(const ::testing::TestParamInfo<std::string>& gate) {
  std::string name = gate.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<std::string> GatesWithIdentityExperts() {
  std::vector<std::string> names = Gates();
  std::erase_if(names, [](const std::string& name) {
    return (FindGate(name)->options & kGateZeroExperts) == 0;
  });
  return names;
}

class LayerGateTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Gates, LayerGateTest, ::testing::ValuesIn(Gates()), TestName);

TEST_P(LayerGateTest, MatchesTheOracleInEveryLayout) {
  MoeLayerConfig config = ConfigOf(GetParam());
  ExpectHoldsInLayouts(WorkOf(config), Layouts());
  config.router.capacity_factor = 1.0;
  config.router.load_balancing = LoadBalancing::kSeqAuxLoss;
  ExpectHoldsInLayouts(WorkOf(config), Layouts());
}

class IdentityExpertTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Gates, IdentityExpertTest, ::testing::ValuesIn(GatesWithIdentityExperts()),
                         TestName);

TEST_P(IdentityExpertTest, AreAddedAtHome) {
  MoeLayerConfig config = ConfigOf(GetParam());
  config.router.num_zero_experts = 4;
  config.shared_expert_ffn_hidden_size = GetParam() == "longcat" ? 3 : 0;
  ExpectHoldsInLayouts(WorkOf(config), Layouts());
}

TEST_P(LayerGateTest, PaddedToCapacityMatchesTheOracleInEveryLayout) {
  MoeLayerConfig config = ConfigOf(GetParam());
  config.router.capacity_factor = 0.75;
  config.router.pad_to_capacity = true;
  config.router.micro_batch_tokens = 6;
  if ((FindGate(GetParam())->options & kGateZeroExperts) != 0) config.router.num_zero_experts = 1;
  ExpectHoldsInLayouts(WorkOf(config, {6, 6, 6}), Layouts());
}

TEST(LayerGates, GroupsAndScalingOfDeepSeek) {
  for (const char* gate : {"deepseek-v2", "deepseek-v3", "topk"}) {
    SCOPED_TRACE(gate);
    MoeLayerConfig config = ConfigOf(gate);
    config.router.num_experts = 8;
    config.router.num_groups = 4;
    config.router.group_top_k = 2;
    config.router.top_k = 3;
    config.router.scaling_factor = 2.5f;
    config.shared_expert_ffn_hidden_size = 5;
    ExpectHoldsInLayouts(WorkOf(config), Layouts());
  }
}

TEST(LayerGates, JitterAndRandomSecondChoiceAreTheSameAtEveryLayout) {
  MoeLayerConfig jitter = ConfigOf("switch");
  jitter.router.input_jitter = 0.3f;
  ExpectHoldsInLayouts(WorkOf(jitter), Layouts());
  MoeLayerConfig second = ConfigOf("gshard");
  second.router.random_second_expert = true;
  ExpectHoldsInLayouts(WorkOf(second), Layouts());
  second.router.capacity_factor = 0.8;
  ExpectHoldsInLayouts(WorkOf(second), Layouts());
}

TEST(LayerGates, ExpertsOfGptOss) {
  MoeLayerConfig config = ConfigOf("gpt-oss");
  config.activation = Activation::kClampedSwiGlu;
  config.projection_biases = true;
  ExpectHoldsInLayouts(WorkOf(config), Layouts());
}

TEST(LayerGates, GatedSharedExpertOfQwen2) {
  MoeLayerConfig config = ConfigOf("qwen2");
  config.shared_expert_ffn_hidden_size = 5;
  config.gated_shared_expert = true;
  ExpectHoldsInLayouts(WorkOf(config), Layouts());
}

TEST(LayerGates, GlobalBalanceLossComparesWithTheLastStep) {
  MoeLayerConfig config = ConfigOf("mixtral");
  config.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  LayerWork work = WorkOf(config);
  const LayerResult first = RunLayer<float>(work, {}, Numerics::kLayoutInvariant);
  // Uniform shares: the loss is the coefficient in each of three micro-batches, without gradient.
  EXPECT_NEAR(first.aux_loss, 3 * 0.02, 1e-8);
  ExpectHoldsInLayouts(work, Layouts());
  work.last_step_count = {10, 0, 30, 5, 5};
  ExpectHoldsInLayouts(work, Layouts());
}

TEST(LayerGates, ExpertBiasMovesByTheSignOfTheGlobalCounts) {
  MoeLayerConfig config = ConfigOf("deepseek-v3");
  config.router.bias_update_rate = 0.25f;
  LayerWork work = MakeWork(config, {6, 5, 7});
  work.last_step_count = {10, 0, 30, 10, 0};  // mean 10
  for (const Layout& layout : Layouts()) {
    const LayerResult result = RunLayer<float>(work, layout, Numerics::kFast);
    EXPECT_EQ(result.weights.at("mlp.gate.e_score_correction_bias"),
              (std::vector<float>{0, 0.25f, -0.25f, 0, 0.25f}));
    EXPECT_FALSE(result.gradients.contains("mlp.gate.e_score_correction_bias"));
  }
  ExpectHoldsInLayouts(work, Layouts());
}

TEST(LayerGates, BFloat16HasTheSameBitsInEveryLayout) {
  for (const std::string& gate : Gates()) {
    SCOPED_TRACE(gate);
    MoeLayerConfig config = ConfigOf(gate);
    config.projection_biases = true;
    config.shared_expert_ffn_hidden_size = 5;
    config.gated_shared_expert = true;
    const LayerWork work = WorkOf(config, {6, 5, 7, 3});
    const LayerResult one = RunLayer<BFloat16>(work, {}, Numerics::kLayoutInvariant);
    for (const Layout& layout : Layouts()) {
      testing::ExpectSameBits(RunLayer<BFloat16>(work, layout, Numerics::kLayoutInvariant), one);
    }
  }
}

}  // namespace
}  // namespace moe
