// A small layer, and what must hold of it: the float64 loop in both modes, the same bits at every
// layout.
#ifndef MOE_TESTS_MOE_LAYER_CASE_H_
#define MOE_TESTS_MOE_LAYER_CASE_H_

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/moe/layer_harness.h"
#include "tests/moe/layer_oracle.h"
#include "tests/sanitizers.h"

namespace moe::testing {

inline MoeLayerConfig SmallConfig() {
  return {.router = {.gate = "mixtral",
                     .num_experts = 5,
                     .top_k = 2,
                     .hidden_size = 7,
                     .aux_loss_coeff = 0.02f,
                     .z_loss_coeff = 0.003f},
          .ffn_hidden_size = 6,
          .init_std = 0.5,
          .down_init_std = 0.5};
}

// float32 against float64: every element is a sum of fewer than `terms` products of rounded
// factors, so its error is below terms * 2^-24 times the sum of the magnitudes, which the largest
// element of the tensor times `terms` bounds generously for the random inputs used here.
inline void ExpectNear(const std::string& name, absl::Span<const float> got,
                       absl::Span<const double> expected) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  constexpr double kTerms = 64;
  double largest = 1e-3;
  for (const double v : expected) largest = std::max(largest, std::fabs(v));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], kTerms * 0x1p-24 * largest) << name << "[" << i << "]";
  }
}

inline void ExpectMatchesOracle(const OracleResult& oracle, const LayerResult& result) {
  ExpectNear("y", result.y, oracle.y);
  ExpectNear("dx", result.dx, oracle.dx);
  for (const auto& [name, gradient] : oracle.gradients) {
    ASSERT_TRUE(result.gradients.contains(name)) << name;
    ExpectNear(name, result.gradients.at(name), gradient);
  }
  ASSERT_EQ(result.gradients.size(), oracle.gradients.size());
  EXPECT_EQ(result.dropped_slots, oracle.dropped_slots);
  EXPECT_NEAR(result.aux_loss, oracle.aux_loss, 1e-6 * std::fabs(oracle.aux_loss) + 1e-12);
  EXPECT_NEAR(result.z_loss, oracle.z_loss, 1e-6 * std::fabs(oracle.z_loss) + 1e-12);
}

// In both modes every layout agrees with the oracle; in layout-invariant numerics with the bits of
// one rank. Under sanitizers without the oracle, whose differences would take most of the time.
inline void ExpectHoldsInLayouts(const LayerWork& work, const std::vector<Layout>& layouts) {
  const LayerResult one = RunLayer<float>(work, {}, Numerics::kLayoutInvariant);
  const OracleResult oracle = kSanitized ? OracleResult() : DenseLoop(work, one.weights);
  if (!kSanitized) ExpectMatchesOracle(oracle, one);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(::testing::PrintToString(layout));
    ExpectSameBits(RunLayer<float>(work, layout, Numerics::kLayoutInvariant), one);
    const LayerResult fast = RunLayer<float>(work, layout, Numerics::kFast);
    if (!kSanitized) ExpectMatchesOracle(oracle, fast);
  }
}

// Under sanitizers up to four ranks.
inline std::vector<Layout> ExpertParallel(std::initializer_list<int> sizes) {
  std::vector<Layout> layouts;
  for (const int ep : sizes) {
    if (!kSanitized || ep <= 4) layouts.push_back({.ranks = ep, .expert_parallel = ep});
  }
  return layouts;
}

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LAYER_CASE_H_
