// Products of two matrices' elements: how jitter scales a router's tokens, and their gradient.
#ifndef MOE_KERNELS_PRODUCT_PRODUCT_H_
#define MOE_KERNELS_PRODUCT_PRODUCT_H_

#include <type_traits>

#include <absl/status/status.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// out[t, h] (+)= a[t, h] * b[t, h]: the product is rounded to float32 before it is added, in
// float32, and the result to T once. All [T, H]; out may be a or b. Every device gives the same
// bits, a NaN's payload aside. U is T, or float.
// Errors: kInvalidArgument if shapes disagree.
template <typename T, typename U = T>
absl::Status MultiplyRows(MatrixView<const std::type_identity_t<U>> a, MatrixView<const float> b,
                          MatrixView<T> out, Write write, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_PRODUCT_PRODUCT_H_
