// The reference model as plain float64 loops on one rank. Routing comes from moe verify's
// reference; shares no code with the product.
#ifndef MOE_TESTS_MOE_LM_TRANSFORMER_ORACLE_H_
#define MOE_TESTS_MOE_LM_TRANSFORMER_ORACLE_H_

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "moe/lm/transformer.h"
#include "tests/moe/lm/transformer_harness.h"

namespace moe::testing {

// One micro-batch.
struct OracleBatch {
  std::vector<int32_t> tokens, targets;
  std::vector<int64_t> sequence_offsets;
};

struct OracleLoss {
  std::vector<double> rows;
  double aux_loss = 0, z_loss = 0;
  double margin = 1e300;  // distance of the nearest routing decision to a tie

  // What gradients are of.
  double total() const;
};

// Relative size of the error that storing a value makes, for finding out what rounding does to a
// result: every stored value is multiplied by 1 + unit * u, u uniform in [-1, 1].
struct OracleNoise {
  double narrow = 0;  // values of the model's storage type: activations
  double wide = 0;    // values the model keeps in float32: logits, router scores, sums
  uint64_t seed = 0;
};

class TransformerOracle {
 public:
  TransformerOracle(const lm::TransformerConfig& config,
                    const std::map<std::string, NamedTensor>& weights);

  OracleLoss Loss(const OracleBatch& batch, const OracleNoise& noise = {}) const;

  // The derivative of total() by one weight, by central differences.
  double Derivative(const OracleBatch& batch, const std::string& name, int64_t element);

  // Most that any row's loss moved in `draws` runs with noise.
  double LossDeviation(const OracleBatch& batch, OracleNoise noise, int draws) const;

 private:
  using Matrix = std::vector<std::vector<double>>;
  struct Weight {
    int64_t rows = 0, cols = 0;
    std::vector<double> values;
  };
  // One forward pass.
  class Pass;

  lm::TransformerConfig config_;
  std::map<std::string, Weight> weights_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LM_TRANSFORMER_ORACLE_H_
