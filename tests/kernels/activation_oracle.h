// Activations in float64, straight from their definitions: what the tests of every device compare
// with.
#ifndef MOE_TESTS_KERNELS_ACTIVATION_ORACLE_H_
#define MOE_TESTS_KERNELS_ACTIVATION_ORACLE_H_

#include <algorithm>
#include <cmath>

#include "kernels/swiglu/activation.h"

namespace moe::testing {

inline constexpr Activation kActivations[] = {Activation::kSwiGlu, Activation::kGeGlu,
                                              Activation::kRelu, Activation::kRelu2,
                                              Activation::kClampedSwiGlu};

inline double ActivationReference(Activation activation, double gate, double up) {
  switch (activation) {
    case Activation::kSwiGlu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeGlu:
      return gate * 0.5 * std::erfc(-gate / std::sqrt(2.0)) * up;
    case Activation::kRelu:
      return std::max(gate, 0.0);
    case Activation::kRelu2:
      return std::pow(std::max(gate, 0.0), 2);
    case Activation::kClampedSwiGlu: {
      const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0);
      return (u + 1) * g / (1 + std::exp(-1.702 * g));
    }
  }
  return 0;
}

inline const char* NameOf(Activation activation) {
  constexpr const char* kNames[] = {"SwiGlu", "GeGlu", "Relu", "Relu2", "ClampedSwiGlu"};
  return kNames[static_cast<int>(activation)];
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_ACTIVATION_ORACLE_H_
