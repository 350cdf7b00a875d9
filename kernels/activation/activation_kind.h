// Which activations there are, with their constants. No Abseil here: .cu files include this header.
#ifndef MOE_KERNELS_ACTIVATION_ACTIVATION_KIND_H_
#define MOE_KERNELS_ACTIVATION_ACTIVATION_KIND_H_

#include <cstdint>

#include "kernels/base/choice.h"

namespace moe {

enum class Activation : uint8_t {
  kSwiGlu,  // silu(gate) * up            Shazeer, "GLU Variants" (2020), arXiv:2002.05202
  kGeGlu,   // gelu(gate) * up, gelu exact (erf)
  kRelu,    // max(gate, 0)               `up` is not used and may be empty
  kRelu2,   // max(gate, 0)^2             So et al., "Primer" (2021), arXiv:2109.08668
  // With g = min(gate, limit), u = clamp(up, -limit, limit):
  //   (u + 1) g sigmoid(alpha g)   gpt-oss: OpenAI, "gpt-oss model card" (2025), arXiv:2508.10925
  // A gradient passes where the input is inside its clamp, ends included, and is 0 elsewhere.
  kClampedSwiGlu,
  // gelu(gate) * up with gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, an
  // approximation: Hendrycks and Gimpel (2016), arXiv:1606.08415
  kGeGluTanh,
};
inline constexpr Choice<Activation> kActivationWords[] = {
    {"swiglu", Activation::kSwiGlu},        {"geglu", Activation::kGeGlu},
    {"geglu_tanh", Activation::kGeGluTanh}, {"relu", Activation::kRelu},
    {"relu2", Activation::kRelu2},          {"clamped_swiglu", Activation::kClampedSwiGlu}};

// An activation with its constants; made of an Activation, it has gpt-oss's.
struct ActivationFunction {
  // NOLINTNEXTLINE(google-explicit-constructor): most have no constants
  constexpr ActivationFunction(Activation which) : kind(which) {}
  constexpr ActivationFunction(Activation which, float clamp_alpha, float clamp_limit)
      : kind(which), alpha(clamp_alpha), limit(clamp_limit) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr operator Activation() const { return kind; }

  Activation kind;
  // Constants of kClampedSwiGlu. g sigmoid(1.702 g) is another approximation of gelu by the same
  // authors.
  float alpha = 1.702f;
  float limit = 7.0f;  // above 0
};

// Whether the activation reads a second projection.
constexpr bool IsGated(Activation a) {
  return a == Activation::kSwiGlu || a == Activation::kGeGlu || a == Activation::kGeGluTanh ||
         a == Activation::kClampedSwiGlu;
}

}  // namespace moe

#endif  // MOE_KERNELS_ACTIVATION_ACTIVATION_KIND_H_
