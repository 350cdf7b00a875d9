// Gradients by finite differences, for comparison with analytic ones.
#ifndef MOE_TESTS_KERNELS_GRADCHECK_H_
#define MOE_TESTS_KERNELS_GRADCHECK_H_

#include <vector>

#include <absl/functional/function_ref.h>
#include <gtest/gtest.h>

namespace moe::testing {

// d f / d x[i] for every i by the five-point central difference
//   (f(x - 2h) - 8 f(x - h) + 8 f(x + h) - f(x + 2h)) / 12h.
// Its error is h^4 / 30 times f's fifth derivative, and about eps / h times f by cancellation: with
// h = 1e-3 and float64 both are near 1e-12 for functions and derivatives around 1, so that the
// whole tolerance is left to the float32 gradient under test.
inline std::vector<double> NumericGradient(absl::FunctionRef<double(const std::vector<double>&)> f,
                                           std::vector<double> x) {
  constexpr double kStep = 1e-3;
  std::vector<double> gradient;
  gradient.reserve(x.size());
  for (double& xi : x) {
    const double center = xi;
    const auto at = [&](double steps) {
      xi = center + steps * kStep;
      return f(x);
    };
    gradient.push_back((at(-2) - 8 * at(-1) + 8 * at(1) - at(2)) / (12 * kStep));
    xi = center;
  }
  return gradient;
}

// Expects |analytic[i] - numeric[i]| <= tolerance for the gradient of f at x. `tolerance` is the
// caller's bound of the float32 rounding in the analytic gradient; 1e-9 is added for the
// differences.
inline void ExpectGradient(absl::FunctionRef<double(const std::vector<double>&)> f,
                           const std::vector<double>& x, const std::vector<double>& analytic,
                           double tolerance, const char* name) {
  const std::vector<double> numeric = NumericGradient(f, x);
  ASSERT_EQ(analytic.size(), numeric.size()) << name;
  for (size_t i = 0; i < numeric.size(); ++i) {
    EXPECT_NEAR(analytic[i], numeric[i], tolerance + 1e-9) << name << " [" << i << "]";
  }
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_GRADCHECK_H_
