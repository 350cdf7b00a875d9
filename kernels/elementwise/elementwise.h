// Operations on corresponding elements of their arguments, in memory of the stream's device. Every
// device gives the same bits, NaN payloads aside. All enqueue and return. Errors: kInvalidArgument
// if lengths or shapes disagree.
#ifndef MOE_KERNELS_ELEMENTWISE_ELEMENTWISE_H_
#define MOE_KERNELS_ELEMENTWISE_ELEMENTWISE_H_

#include <type_traits>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/elementwise/cast_slice.h"

namespace moe {

// out[i] = in[i], rounded to nearest even. In and out [n].
// Instantiated for float -> 16-bit types, those -> float, float -> float.
template <typename From, typename To>
absl::Status Cast(absl::Span<const From> in, absl::Span<To> out, Stream& stream);
// Casts many arrays: on CUDA in one launch, for which `workspace`, device memory, lends the table
// of slices until the stream has passed. Slices come in ascending order, with or without elements
// between them. They are host memory, which is read before the call returns, or by a CPU stream
// when the task runs. Instantiated for BFloat16 and Float16.
template <typename To>
absl::Status CastSlices(absl::Span<const CastSlice<To>> slices, Workspace& workspace,
                        Stream& stream);

// out[i] (+)= in[i] * factor: the counterpart of ExactToFloat for sums in float32. The product is
// rounded to float32 before it is added, which rounds again. in, out [n]; out may be `in`.
absl::Status Scale(absl::Span<const float> in, float factor, absl::Span<float> out, Write write,
                   Stream& stream);

// One step of a ring all-reduce: acc[i] = partial[i] + acc[i]; integers wrap around. partial, acc
// [n], with any alignment. Instantiated for float and int64_t.
template <typename T>
absl::Status AddPartial(absl::Span<const std::type_identity_t<T>> partial, absl::Span<T> acc,
                        Stream& stream);

// out = a + b in float32, rounded to T once. All [T, H]; out may be a or b. U is T, or float.
template <typename T, typename U = T>
absl::Status AddRows(MatrixView<const T> a, MatrixView<const std::type_identity_t<U>> b,
                     MatrixView<T> out, Stream& stream);

// out[t, h] (+)= a[t, h] * b[t, h]: the product is rounded to float32 before it is added, in
// float32, and the result to T once. All [T, H]; out may be a or b. U is T, or float. Used to scale
// a router's tokens by jitter, and for the gradient of that.
template <typename T, typename U = T>
absl::Status MultiplyRows(MatrixView<const std::type_identity_t<U>> a, MatrixView<const float> b,
                          MatrixView<T> out, Write write, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ELEMENTWISE_ELEMENTWISE_H_
