// From an operation's checks (Abseil) to its device. Internal to the .cc files of kernels/.
#ifndef MOE_KERNELS_BASE_RUN_OP_H_
#define MOE_KERNELS_BASE_RUN_OP_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/cuda_types.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/stream.h"

namespace moe {

// launcher(cudaStream_t) of `stream`, a stream of a CUDA device, with the stream's errors in front
// and the launcher's as a status of `function`. `launcher` is a lambda over `auto stream`: without
// CUDA in the build it is never instantiated, and the result is kUnimplemented.
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

// `op`, the arguments of an operation as a plain struct, on the stream's device: Run(op, threads),
// the CPU's path, as a task of the stream, or Run(op, cudaStream_t), which launches kernels. Both
// are found in the struct's namespace.
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

// kInvalidArgument, naming value and limit, for what a CUDA kernel is not compiled for.
inline absl::Status CheckCudaLimit(absl::string_view function, absl::string_view what,
                                   int64_t value, int64_t most) {
  if (value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": ", what, " is ", value, ", expected at most ", most, " on CUDA"));
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_RUN_OP_H_
