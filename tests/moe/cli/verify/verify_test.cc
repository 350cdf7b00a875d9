// moe verify's library: the product passes for every gate, and every planted fault is found.
#include "moe/cli/verify/verify.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gating/gate.h"
#include "tests/sanitizers.h"

namespace moe::verify {
namespace {

// Nine micro-batches of unequal length, one of them empty: eight ranks all work, most of their
// second rounds are empty.
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
  spec.micro_batch_tokens = UnevenMicroBatches(9, 7, gate);
  return spec;
}

absl::StatusOr<std::vector<LayerResult>> NoMpi(int /*ranks*/, const std::vector<Case>& /*cases*/) {
  return absl::UnimplementedError("no MPI in this test");
}

// All tensors that failed, "ranks=2 ...: tensor at place".
std::vector<std::string> Failures(const ProblemSpec& spec, const std::vector<Layout>& layouts,
                                  Fault fault = Fault::kNone) {
  absl::StatusOr<Problem> problem = MakeProblem(spec);
  if (!problem.ok()) return {problem.status().ToString()};
  VerifyPlan plan = {.fault = fault};
  plan.problems.push_back(*std::move(problem));
  for (const Numerics numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    for (const Layout& layout : layouts) plan.cases.push_back({0, numerics, layout});
  }
  std::vector<std::string> failures;
  const auto on_report = [&](const CaseReport& report) {
    if (report.torn_replicas > 0) failures.push_back("replicas differ");
    for (const TensorReport& t : report.tensors) {
      if (t.ok()) continue;
      failures.push_back(Describe(report.what.layout) + ": " + t.tensor + " " + NameOf(t.measure) +
                         " at " + Describe(t.first) + ", got " + std::to_string(t.got) +
                         ", expected " + std::to_string(t.expected) + " +- " +
                         std::to_string(t.allowed));
    }
  };
  const absl::Status status = Verify(plan, NoMpi, on_report);
  if (!status.ok()) failures.push_back(status.ToString());
  return failures;
}

std::vector<Layout> SomeLayouts() {
  const Layout several = {.ranks = 4, .expert_parallel = 2, .overlap = 4};
  if (::moe::testing::kSanitized) return {several};
  return {{.ranks = 2, .expert_parallel = 2, .dispatch = DispatchAlgorithm::kDirect},
          {.ranks = 3},
          several,
          {.ranks = 8,
           .expert_parallel = 4,
           .dispatch = DispatchAlgorithm::kHierarchical,
           .overlap = 4}};
}

class EveryGate : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryGate, PassesWithoutCapacity) {
  EXPECT_EQ(Failures(SpecOf(GetParam()), SomeLayouts()), std::vector<std::string>());
}

TEST_P(EveryGate, PassesWithCapacityInBothPolicies) {
  ProblemSpec spec = SpecOf(GetParam());
  spec.layer.router.capacity_factor = 1.0;
  EXPECT_EQ(Failures(spec, {{.ranks = 3, .expert_parallel = 3}}), std::vector<std::string>());
  spec.layer.router.drop_policy = DropPolicy::kPosition;
  EXPECT_EQ(Failures(spec, {{.ranks = 2}}), std::vector<std::string>());
}

TEST_P(EveryGate, PassesInBFloat16) {
  ProblemSpec spec = SpecOf(GetParam());
  spec.dtype = DType::kBFloat16;
  EXPECT_EQ(Failures(spec, {{.ranks = 4, .expert_parallel = 4}}), std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Gates, EveryGate,
                         ::testing::ValuesIn(::moe::testing::GatesHere(
                             {"switch", "gshard", "topk", "mixtral", "qwen2", "qwen3", "olmoe",
                              "deepseek-v2", "deepseek-v3", "gpt-oss", "llama4", "longcat",
                              "expert-choice", "noisy-topk", "sinkhorn", "sparsemixer"})),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(VerifyTest, PassesWithEveryOption) {
  ProblemSpec spec = SpecOf("deepseek-v3");
  spec.layer.router.num_groups = 3;
  spec.layer.router.group_top_k = 2;
  spec.layer.router.top_k = 3;
  spec.layer.router.scaling_factor = 2.5f;
  spec.layer.router.load_balancing = LoadBalancing::kSeqAuxLoss;
  spec.layer.shared_expert_ffn_hidden_size = 12;
  spec.layer.gated_shared_expert = true;
  EXPECT_EQ(Failures(spec, SomeLayouts()), std::vector<std::string>());

  spec = SpecOf("gpt-oss");
  spec.layer.activation = Activation::kClampedSwiGlu;
  spec.layer.projection_biases = true;
  spec.layer.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  spec.layer.router.token_group.tokens = TokenGroup::kSequence;
  EXPECT_EQ(Failures(spec, SomeLayouts()), std::vector<std::string>());

  spec = SpecOf("longcat");
  spec.layer.router.num_zero_experts = 2;
  spec.layer.activation = Activation::kGeGlu;
  EXPECT_EQ(Failures(spec, SomeLayouts()), std::vector<std::string>());

  spec = SpecOf("gshard");
  spec.layer.router.random_second_expert = true;
  spec.layer.router.capacity_factor = 1.0;
  spec.layer.activation = Activation::kRelu2;
  EXPECT_EQ(Failures(spec, SomeLayouts()), std::vector<std::string>());

  spec = SpecOf("sparsemixer");
  spec.layer.router.router_jitter = 0.2f;
  spec.layer.router.capacity_factor = 1.0;
  EXPECT_EQ(Failures(spec, SomeLayouts()), std::vector<std::string>());

  spec = SpecOf("switch");
  spec.layer.router.input_jitter = 0.1f;
  spec.layer.activation = Activation::kRelu;
  EXPECT_EQ(Failures(spec, SomeLayouts()), std::vector<std::string>());
}

class EveryFault : public ::testing::TestWithParam<int> {};

TEST_P(EveryFault, IsFound) {
  const FaultInfo& fault = Faults()[static_cast<size_t>(GetParam())];
  ProblemSpec spec = SpecOf(fault.router);
  if (fault.fault == Fault::kGroupMaskZero) {
    spec.layer.router.num_groups = 3;
    spec.layer.router.group_top_k = 2;
    spec.layer.router.top_k = 3;
  }
  EXPECT_NE(Failures(spec, SomeLayouts(), fault.fault), std::vector<std::string>()) << fault.name;
}

INSTANTIATE_TEST_SUITE_P(Faults, EveryFault, ::testing::Range(0, 7));

}  // namespace
}  // namespace moe::verify
