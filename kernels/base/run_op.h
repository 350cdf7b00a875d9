// Checks that operations share, and the call of an operation on its device. Internal to .cc files.
#ifndef MOE_KERNELS_BASE_RUN_OP_H_
#define MOE_KERNELS_BASE_RUN_OP_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/cuda_types.h"
#include "kernels/base/group_offsets.h"
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

// kInvalidArgument unless offsets [groups + 1] cut rows [0, rows) into groups, which may be empty.
// `members` names the array with one element a group ("weights").
inline absl::Status CheckGroups(absl::string_view function, absl::string_view members,
                                absl::Span<const int64_t> offsets, size_t groups, int64_t rows) {
  if (offsets.size() != groups + 1) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": ", offsets.size(), " offsets for ",
                                                   groups, " ", members, ", expected ",
                                                   groups + 1));
  }
  if (offsets.front() != 0 || offsets.back() != rows) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": offsets run from ", offsets.front(),
                                                   " to ", offsets.back(), ", expected 0 to ", rows,
                                                   " rows"));
  }
  for (size_t g = 0; g < groups; ++g) {
    if (offsets[g] <= offsets[g + 1]) continue;
    return absl::InvalidArgumentError(absl::StrCat(function, ": offsets[", g, "] = ", offsets[g],
                                                   " is above offsets[", g + 1,
                                                   "] = ", offsets[g + 1], ", expected ascending"));
  }
  return absl::OkStatus();
}

// The same; of offsets that only a device knows, the number alone is checked.
inline absl::Status CheckGroups(absl::string_view function, absl::string_view members,
                                const GroupOffsets& offsets, size_t groups, int64_t rows) {
  if (!offsets.known_to_host() && offsets.size() == groups + 1) return absl::OkStatus();
  return CheckGroups(function, members, offsets.host(), groups, rows);
}

// kUnimplemented on devices for which this build has no kernel of the operation.
inline absl::Status CheckCpu(absl::string_view function, const Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(function, ": no kernel for this device in this build: compute on the CPU"));
}

// Calls launcher(cudaStream_t) on `stream`, a stream of a CUDA device. Earlier errors of the stream
// come first; the launcher's error becomes a status of `function`. `launcher` is a lambda over
// `auto stream`: in a build without CUDA it is never instantiated, and the result is
// kUnimplemented.
template <typename Launcher>
absl::Status LaunchOn(absl::string_view function, Stream& stream, Launcher launcher) {
#if defined(MOE_CUDA)
  return stream.Launch([&](void* native) {
    return CudaStatus(launcher(static_cast<cudaStream_t>(native)), function);
  });
#else
  (void)launcher;
  return CheckCpu(function, stream);
#endif
}

// Runs `op`, the arguments of an operation as a plain struct, on the stream's device: Run(op,
// threads), the CPU's path, as a task of the stream, or Run(op, cudaStream_t), which launches
// kernels. Both are found in the struct's namespace.
template <typename Op>
absl::Status RunOp(absl::string_view function, const Op& op, Stream& stream) {
  if (IsCuda(stream)) {
    return LaunchOn(function, stream, [&](auto cuda) { return Run(op, cuda); });
  }
  return stream.Enqueue([op, &threads = stream.threads()] {
    Run(op, threads);
    return absl::OkStatus();
  });
}

// kInvalidArgument, naming value and limit, for values that no CUDA kernel is compiled for.
inline absl::Status CheckCudaLimit(absl::string_view function, absl::string_view what,
                                   int64_t value, int64_t most) {
  if (value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": ", what, " is ", value, ", expected at most ", most, " on CUDA"));
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_RUN_OP_H_
