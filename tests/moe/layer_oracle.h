// One MoE layer as a dense loop over tokens and experts in float64, on one rank. Routing comes from
// tests/gating/routing_oracle.h; shares no code with the product.
#ifndef MOE_TESTS_MOE_LAYER_ORACLE_H_
#define MOE_TESTS_MOE_LAYER_ORACLE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/moe/layer_harness.h"

namespace moe::testing {

struct OracleResult {
  std::vector<double> y, dx;
  std::map<std::string, std::vector<double>> gradients;
  int64_t dropped_slots = 0;
  double aux_loss = 0, z_loss = 0;
};

// Gradients of sum(dy * y) + aux_loss + z_loss by central differences, with a step small enough
// that no routing decision flips.
OracleResult DenseLoop(const LayerWork& work,
                       const std::map<std::string, std::vector<float>>& weights);

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LAYER_ORACLE_H_
