// Gated and plain activations of the expert feed-forward network.
#ifndef MOE_KERNELS_ACTIVATION_ACTIVATION_H_
#define MOE_KERNELS_ACTIVATION_ACTIVATION_H_

#include <absl/status/status.h>

#include "kernels/activation/activation_kind.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// out[n, f] = act(gate[n, f], up[n, f]), computed in float32, rounded to T once. All [N, F].
// Same bits for an element in body or tail and on any number of threads.
template <typename T>
absl::Status ActivationForward(ActivationFunction activation, MatrixView<const T> gate,
                               MatrixView<const T> up, MatrixView<T> out, Stream& stream);

// d_gate and d_up from d_out and the saved inputs. Outputs may share the inputs' memory.
template <typename T>
absl::Status ActivationBackward(ActivationFunction activation, MatrixView<const T> gate,
                                MatrixView<const T> up, MatrixView<const T> d_out,
                                MatrixView<T> d_gate, MatrixView<T> d_up, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ACTIVATION_ACTIVATION_H_
