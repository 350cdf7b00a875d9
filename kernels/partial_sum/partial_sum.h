// One step of a ring all-reduce: what a rank has received is added to its own.
#ifndef MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_H_
#define MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_H_

#include <type_traits>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"

namespace moe {

// acc[i] = partial[i] + acc[i]; integers wrap around. partial, acc [n], memory of the stream's
// device, apart. Every device gives the same bits, a NaN's payload aside. T: float, int64_t.
// Errors: kInvalidArgument if lengths differ.
template <typename T>
absl::Status AddPartial(absl::Span<const std::type_identity_t<T>> partial, absl::Span<T> acc,
                        Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_H_
