// Copies of arrays between the host and a stream's device.
#ifndef MOE_KERNELS_BASE_DEVICE_ARRAYS_H_
#define MOE_KERNELS_BASE_DEVICE_ARRAYS_H_

#include <cstddef>
#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

// The elements of a dense matrix.
template <typename T>
absl::Span<T> AllOf(MatrixView<T> dense) {
  return {dense.data(), static_cast<size_t>(dense.rows() * dense.cols())};
}

// A copy in `workspace`, memory of the stream's device, of a host array that may change once the
// call returns. Enqueues.
template <typename T>
absl::StatusOr<absl::Span<const T>> UploadArray(absl::Span<const T> array, Workspace& workspace,
                                                Stream& stream) {
  const auto size = static_cast<int64_t>(array.size());
  MOE_ASSIGN_OR_RETURN(const absl::Span<T> copy, workspace.Array<T>(size));
  MOE_RETURN_IF_ERROR(
      stream.Upload(array.data(), copy.data(), size * static_cast<int64_t>(sizeof(T))));
  return copy;
}

// A copy in `host` of an array of the stream's device, complete once the stream has passed.
// Enqueues.
template <typename T>
absl::StatusOr<absl::Span<T>> DownloadArray(absl::Span<const T> array, Workspace& host,
                                            Stream& stream) {
  const auto size = static_cast<int64_t>(array.size());
  MOE_ASSIGN_OR_RETURN(const absl::Span<T> copy, host.Array<T>(size));
  MOE_RETURN_IF_ERROR(
      stream.CopyBytes(array.data(), copy.data(), size * static_cast<int64_t>(sizeof(T))));
  return copy;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_DEVICE_ARRAYS_H_
