// The argument checks that operations share.
#ifndef MOE_KERNELS_BASE_SHAPE_CHECK_H_
#define MOE_KERNELS_BASE_SHAPE_CHECK_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// kInvalidArgument unless `m` is [rows, cols] with stride >= cols.
template <typename T>
absl::Status CheckShape(absl::string_view function, absl::string_view name, const MatrixView<T>& m,
                        int64_t rows, int64_t cols) {
  if (m.rows() == rows && m.cols() == cols && m.stride() >= cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(function, ": ", name, " is [", m.rows(), ", ",
                                                 m.cols(), "] with stride ", m.stride(),
                                                 ", expected [", rows, ", ", cols, "]"));
}

// kInvalidArgument unless a span has `expected` elements.
inline absl::Status CheckLength(absl::string_view function, absl::string_view name, size_t length,
                                int64_t expected) {
  if (static_cast<int64_t>(length) == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": ", name, " is [", length, "], expected [", expected, "]"));
}

// kUnimplemented on devices that the operation has no kernel for in this build.
inline absl::Status CheckCpu(absl::string_view function, const Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(function, ": no kernel for this device in this build"));
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_SHAPE_CHECK_H_
