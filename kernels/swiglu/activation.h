// Which activations there are, and their constants. No Abseil here: .cu files include this header.
#ifndef MOE_KERNELS_SWIGLU_ACTIVATION_H_
#define MOE_KERNELS_SWIGLU_ACTIVATION_H_

#include <cstdint>

namespace moe {

enum class Activation : uint8_t {
  kSwiGlu,  // silu(gate) * up            Shazeer, "GLU Variants" (2020), arXiv:2002.05202
  kGeGlu,   // gelu(gate) * up, gelu exact (erf)
  kRelu,    // max(gate, 0)               `up` is not used and may be empty
  kRelu2,   // max(gate, 0)^2             So et al., "Primer" (2021), arXiv:2109.08668
  // With g = min(gate, kClampLimit), u = clamp(up, -kClampLimit, kClampLimit):
  //   (u + 1) g sigmoid(kClampAlpha g)   gpt-oss: OpenAI, "gpt-oss model card" (2025),
  //                                      arXiv:2508.10925
  // A gradient passes where the input lies inside its clamp, ends included, and is 0 elsewhere.
  kClampedSwiGlu,
};

// Constants of kClampedSwiGlu, as gpt-oss has them. g sigmoid(1.702 g) is Hendrycks and Gimpel's
// approximation of gelu (2016), arXiv:1606.08415.
inline constexpr float kClampAlpha = 1.702f;
inline constexpr float kClampLimit = 7.0f;

// Whether the activation reads a second projection.
constexpr bool IsGated(Activation a) {
  return a == Activation::kSwiGlu || a == Activation::kGeGlu || a == Activation::kClampedSwiGlu;
}

}  // namespace moe

#endif  // MOE_KERNELS_SWIGLU_ACTIVATION_H_
