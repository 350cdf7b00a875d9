// Gated and plain activations of the expert feed-forward network.
#ifndef MOE_KERNELS_SWIGLU_SWIGLU_H_
#define MOE_KERNELS_SWIGLU_SWIGLU_H_

#include <cstdint>

#include <absl/status/status.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

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

// out[n, f] = act(gate[n, f], up[n, f]), computed in float32, rounded to T once. All [N, F].
// Same bits for an element in body or tail and on any number of threads.
template <typename T>
absl::Status ActivationForward(Activation activation, MatrixView<const T> gate,
                               MatrixView<const T> up, MatrixView<T> out, Stream& stream);

// d_gate and d_up from d_out and the saved inputs. Outputs may be the inputs' own memory.
template <typename T>
absl::Status ActivationBackward(Activation activation, MatrixView<const T> gate,
                                MatrixView<const T> up, MatrixView<const T> d_out,
                                MatrixView<T> d_gate, MatrixView<T> d_up, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_SWIGLU_SWIGLU_H_
