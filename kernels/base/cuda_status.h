// CUDA's errors as statuses that say what to do.
#ifndef MOE_KERNELS_BASE_CUDA_STATUS_H_
#define MOE_KERNELS_BASE_CUDA_STATUS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "kernels/base/cuda_types.h"

namespace moe {

// `error` of `what` ("GatherRows", "stream of CUDA device 0"), with CUDA's name and text for it.
//
//   no driver, an old one, no device, no code for its architecture,  kUnimplemented, as any backend
//   no access to a peer's memory                                     that a machine does not have
//   out of memory                                                    kResourceExhausted
//   all others                                                       kInternal
//
// Errors that leave the process without a usable device (an illegal address) are named as such.
// Takes the error out of the runtime, so that a later launch does not report it as its own.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);

// The status for `wanted_bytes` that the current device could not give, with what it has.
absl::Status CudaOutOfMemory(int64_t wanted_bytes, absl::string_view what);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CUDA_STATUS_H_
