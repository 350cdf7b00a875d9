// Shared by the tests of kernels/router_loss: losses, their gradients, scores.
#ifndef MOE_TESTS_KERNELS_LOSS_RESULTS_H_
#define MOE_TESTS_KERNELS_LOSS_RESULTS_H_

#include <limits>
#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe::testing {

inline constexpr double kSoFar = 100;  // losses are added to

struct Result {
  double loss = 0;
  std::vector<float> gradient;  // by rows
};

inline std::vector<float> ElementsOf(const Matrix<float>& matrix) {
  EXPECT_TRUE(matrix.edges_intact());
  const std::vector<double> values = matrix.values();
  return {values.begin(), values.end()};
}

inline DeviceArray<double> Loss(const TestDevice& device) {
  return device.Copy<double>({kSoFar});
}

// The difference to the initial value; NaN if the stream has failed.
inline double Added(const TestDevice& device, const DeviceArray<double>& loss) {
  const std::vector<double> value = device.Read(loss);
  return value.empty() ? std::numeric_limits<double>::quiet_NaN() : value[0] - kSoFar;
}

// Scores are positive; all scores of a token may have underflowed.
inline std::vector<float> PositiveScores(int64_t tokens, int64_t experts) {
  std::vector<float> score;
  for (const float x : RandomFloats(tokens * experts, 1)) {
    const auto at = static_cast<int64_t>(score.size());
    score.push_back(at / experts == 3 || at % experts == 2 ? 0.0f : x * x / 8);
  }
  return score;
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_LOSS_RESULTS_H_
