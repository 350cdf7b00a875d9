// Every gate and kind of expert in the whole layer passes moe verify, and every planted fault is
// found.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/gate.h"
#include "tests/moe/cli/verify/verify_case.h"
#include "tests/sanitizers.h"

namespace moe::verify {
namespace {

bool OnDevice() {
  return ::moe::testing::LayerDevice() == DeviceKind::kCuda;
}

// Nine micro-batches of unequal length, one of them empty: eight ranks all work, most of their
// second rounds are empty. On a simulated device three.
ProblemSpec SpecOf(const std::string& gate) {
  ProblemSpec spec;
  RouterConfig& router = spec.layer.router;
  router.gate = gate;
  router.num_experts = 6;
  router.top_k = gate == "switch" || gate == "llama4" ? 1 : 2;
  router.hidden_size = 28;
  router.aux_loss_coeff = 0.1f;
  router.z_loss_coeff = 0.01f;
  router.seed = 3;
  spec.layer.ffn_hidden_size = 20;
  spec.micro_batch_tokens = UnevenMicroBatches(OnDevice() ? 3 : 9, 7, gate);
  return spec;
}

// Under sanitizers and on a simulated device one, that splits experts, replicates them and
// overlaps; moe_layer_test and peer_dispatch_test have the others.
std::vector<Layout> SomeLayouts() {
  const Layout several = {.ranks = 4, .expert_parallel = 2, .overlap = 4};
  if (::moe::testing::kSanitized || OnDevice()) return {several};
  return {several,
          {.ranks = 2, .expert_parallel = 2, .dispatch = DispatchAlgorithm::kDirect},
          {.ranks = 3},
          {.ranks = 8,
           .expert_parallel = 4,
           .dispatch = DispatchAlgorithm::kHierarchical,
           .overlap = 4}};
}

std::vector<std::string> Gates() {
  if (OnDevice()) return ::moe::testing::GatesUnlike(GateNames());
  return ::moe::testing::GatesHere(GateNames());
}

bool HasIdentityExperts(const std::string& gate) {
  return (FindGate(gate)->options & kGateZeroExperts) != 0;
}

// Gates that run the code of others pass once, without capacity.
bool RunsCodeOfAnother(const std::string& gate) {
  return ::moe::testing::GatesUnlike({gate}).empty();
}

class EveryGate : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryGate, PassesWithoutCapacity) {
  ExpectHolds(SpecOf(GetParam()), SomeLayouts());
}

TEST_P(EveryGate, PassesWithCapacityInBothPolicies) {
  if (RunsCodeOfAnother(GetParam())) GTEST_SKIP();
  ProblemSpec spec = SpecOf(GetParam());
  spec.layer.router.capacity_factor = 1.0;
  spec.layer.router.load_balancing = LoadBalancing::kSeqAuxLoss;
  ExpectHolds(spec, {{.ranks = 3, .expert_parallel = 3, .overlap = 2}});
  spec.layer.router.drop_policy = DropPolicy::kPosition;
  ExpectHolds(spec, {{.ranks = 2}});
}

TEST_P(EveryGate, PassesPaddedToCapacity) {
  if (RunsCodeOfAnother(GetParam())) GTEST_SKIP();
  ProblemSpec spec = SpecOf(GetParam());
  spec.micro_batch_tokens = {6, 6, 6};
  spec.layer.router.capacity_factor = 0.75;
  spec.layer.router.pad_to_capacity = true;
  spec.layer.router.micro_batch_tokens = 6;
  if (HasIdentityExperts(GetParam())) spec.layer.router.num_zero_experts = 1;
  ExpectHolds(spec, SomeLayouts());
}

TEST_P(EveryGate, PassesInBFloat16) {
  if (RunsCodeOfAnother(GetParam())) GTEST_SKIP();
  ProblemSpec spec = SpecOf(GetParam());
  spec.dtype = DType::kBFloat16;
  spec.layer.projection_biases = true;
  spec.layer.shared_expert_ffn_hidden_size = 5;
  spec.layer.gated_shared_expert = true;
  ExpectHolds(spec, SomeLayouts());
}

INSTANTIATE_TEST_SUITE_P(Gates, EveryGate, ::testing::ValuesIn(Gates()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(VerifyTest, PassesWithIdentityExperts) {
  for (const std::string& gate : Gates()) {
    if (!HasIdentityExperts(gate) || RunsCodeOfAnother(gate)) continue;
    SCOPED_TRACE(gate);
    ProblemSpec spec = SpecOf(gate);
    spec.layer.router.num_zero_experts = 4;
    ExpectHolds(spec, SomeLayouts());
  }
}

TEST(VerifyTest, PassesWithGroupsAndScaling) {
  for (const char* gate : {"deepseek-v2", "deepseek-v3", "topk"}) {
    SCOPED_TRACE(gate);
    ProblemSpec spec = SpecOf(gate);
    spec.layer.router.num_groups = 3;
    spec.layer.router.group_top_k = 2;
    spec.layer.router.top_k = 3;
    spec.layer.router.scaling_factor = 2.5f;
    spec.layer.router.token_group.tokens = 3;
    spec.micro_batch_tokens = {6, 6, 6, 6};
    spec.layer.shared_expert_ffn_hidden_size = 12;
    spec.layer.gated_shared_expert = true;
    ExpectHolds(spec, SomeLayouts());
  }
}

TEST(VerifyTest, PassesWithEveryOption) {
  ProblemSpec spec = SpecOf("gpt-oss");
  spec.layer.activation = Activation::kClampedSwiGlu;
  spec.layer.projection_biases = true;
  spec.layer.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  spec.layer.router.token_group.tokens = TokenGroup::kSequence;
  ExpectHolds(spec, SomeLayouts());

  spec = SpecOf("longcat");
  spec.layer.router.num_zero_experts = 2;
  spec.layer.shared_expert_ffn_hidden_size = 3;
  spec.layer.activation = Activation::kGeGlu;
  ExpectHolds(spec, SomeLayouts());

  spec = SpecOf("gshard");
  spec.layer.router.random_second_expert = true;
  ExpectHolds(spec, SomeLayouts());
  spec.layer.router.capacity_factor = 1.0;
  spec.layer.activation = Activation::kRelu2;
  ExpectHolds(spec, SomeLayouts());

  spec = SpecOf("sparsemixer");
  spec.layer.activation = Activation::kGeGluTanh;
  spec.layer.router.router_jitter = 0.2f;
  spec.layer.router.capacity_factor = 1.0;
  ExpectHolds(spec, SomeLayouts());

  spec = SpecOf("switch");
  spec.layer.router.input_jitter = 0.1f;
  spec.layer.activation = Activation::kRelu;
  ExpectHolds(spec, SomeLayouts());
}

// Every planted fault is found, in the tensor that it is in. On a device by cli_verify_device.
TEST(VerifyTest, FindsEveryPlantedFault) {
  if (OnDevice()) GTEST_SKIP() << "planted in what every device runs";
  const std::map<std::string, std::string> shown_in = {
      {"gradient-scale-by-ep", "experts.down_proj.weight"},
      {"rank-local-balance", "gate.weight"},
      {"shuffled-float-sum", "experts.gate_up_proj.weight"},
      {"unstable-tie", "expert_count"},
      {"stale-count", "gate.e_score_correction_bias"},
      {"biased-weights", ": y "},
      {"group-mask-zero", "expert_count"}};
  for (const FaultInfo& fault : Faults()) {
    if (fault.of_model) continue;
    ProblemSpec spec = SpecOf(fault.router);
    if (fault.fault == Fault::kGroupMaskZero) {
      spec.layer.router.num_groups = 3;
      spec.layer.router.group_top_k = 2;
      spec.layer.router.top_k = 3;
    }
    EXPECT_THAT(Failures(spec, SomeLayouts(), fault.fault),
                ::testing::Contains(::testing::HasSubstr(shown_in.at(fault.name))))
        << fault.name;
  }
}

// Four layers, cut by each axis of a model.
ProblemSpec ModelSpec() {
  ProblemSpec spec = SpecOf("deepseek-v3");
  spec.layer.shared_expert_ffn_hidden_size = 32;
  spec.micro_batch_tokens.assign(3, 8);
  lm::TrainConfig& model = spec.model.emplace();
  model.model.num_layers = 4;
  model.model.kv_channels = 4;
  model.sequence_length = 8;
  model.micro_batch_size = 1;
  model.steps = 2;
  model.trainer.session.tensor_leaves = 4;
  return spec;
}

TEST(ModelTest, HasTheBitsOfOneRankHoweverItIsCut) {
  if (OnDevice()) GTEST_SKIP() << "no trees on devices";
  const Layout hybrid = {.ranks = 4,
                         .expert_parallel = 2,
                         .overlap = 2,
                         .tensor = 2,
                         .pipeline = 2,
                         .schedule = ScheduleKind::kZeroBubbleH1,
                         .zero = ZeroStage::kGradients};
  std::vector<Layout> layouts = {hybrid};
  if (!::moe::testing::kSanitized) {
    layouts.push_back({.ranks = 2,
                       .pipeline = 2,
                       .chunks = 2,
                       .schedule = ScheduleKind::kInterleaved,
                       .recompute = Recompute::kLayer});
    layouts.push_back({.ranks = 2,
                       .zero = ZeroStage::kWeights,
                       .offload = "optimizer:file=" + ::testing::TempDir()});
  }
  ExpectHolds(ModelSpec(), layouts);
}

TEST(ModelTest, FindsEveryPlantedFault) {
  if (OnDevice()) GTEST_SKIP() << "no trees on devices";
  const Layout layout = {.ranks = 2, .expert_parallel = 2, .tensor = 2};
  const std::map<std::string, std::string> shown_in = {
      {"tree-order", "weights_xxh3 0 ulp"}, {"lost-micro-batch", ": loss 0 ulp at step 1"}};
  for (const FaultInfo& fault : Faults()) {
    if (!fault.of_model) continue;
    EXPECT_THAT(Failures(ModelSpec(), {layout}, fault.fault),
                ::testing::Contains(::testing::HasSubstr(shown_in.at(fault.name))))
        << fault.name;
  }
}

}  // namespace
}  // namespace moe::verify
