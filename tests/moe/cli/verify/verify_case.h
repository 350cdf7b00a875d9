// What moe verify's library finds wrong with a layer in some layouts, for tests of the layer and of
// the library.
#ifndef MOE_TESTS_MOE_CLI_VERIFY_VERIFY_CASE_H_
#define MOE_TESTS_MOE_CLI_VERIFY_VERIFY_CASE_H_

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/cli/verify/verify.h"
#include "tests/moe/layer_harness.h"

namespace moe::verify {

// All tensors that failed, "ranks=2 ...: tensor at place": one rank against the float64 loop, every
// layout against that rank, in both numerics (of a model: every layout against one rank,
// layout-invariant), on what ::moe::testing::LayerDevice says.
inline std::vector<std::string> Failures(const ProblemSpec& spec,
                                         const std::vector<Layout>& layouts,
                                         Fault fault = Fault::kNone) {
  absl::StatusOr<Problem> problem =
      spec.model.has_value() ? MakeModelProblem(spec) : MakeProblem(spec);
  if (!problem.ok()) return {problem.status().ToString()};
  VerifyPlan plan = {.fault = fault, .device = ::moe::testing::LayerDevice()};
  plan.problems.push_back(*std::move(problem));
  for (const Numerics numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    if (spec.model.has_value() && numerics == Numerics::kFast) continue;
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
  const absl::Status status = Verify(plan, /*world=*/nullptr, on_report);
  if (!status.ok()) failures.push_back(status.ToString());
  return failures;
}

inline void ExpectHolds(const ProblemSpec& spec, const std::vector<Layout>& layouts) {
  EXPECT_EQ(Failures(spec, layouts), std::vector<std::string>());
}

}  // namespace moe::verify

#endif  // MOE_TESTS_MOE_CLI_VERIFY_VERIFY_CASE_H_
