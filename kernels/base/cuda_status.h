// CUDA's errors as statuses that name the remedy.
#ifndef MOE_KERNELS_BASE_CUDA_STATUS_H_
#define MOE_KERNELS_BASE_CUDA_STATUS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "kernels/base/cuda_types.h"

namespace moe {

// The status of `error`, which `what` returned ("GatherRows", "stream of CUDA device 0"), with
// CUDA's name and text.
//
//   no driver, an old one, no device, no code for its architecture,  kUnimplemented, as any backend
//   no access to a peer's memory                                     that a machine does not have
//   out of memory                                                    kResourceExhausted
//   all others                                                       kInternal
//
// Errors that leave the process without a usable device (an illegal address) are named as such.
// Clears the error in the runtime, so that a later launch does not report it as its own.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);

// The status of a failed allocation of `wanted_bytes`, with the memory that the current device has.
absl::Status CudaOutOfMemory(int64_t wanted_bytes, absl::string_view what);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CUDA_STATUS_H_
