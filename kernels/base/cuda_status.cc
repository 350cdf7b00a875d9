#include "kernels/base/cuda_status.h"

#include <absl/strings/str_cat.h>

#include <cuda_runtime_api.h>

namespace moe {
namespace {

// The remedy for an error; empty where CUDA's own text suffices.
absl::string_view RemedyFor(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
      return "no NVIDIA driver, or one older than this build's CUDA: install a driver for CUDA "
             "13, or compute on the CPU";
    case cudaErrorNoDevice:
      return "a driver without a GPU that this process may use: look at nvidia-smi and "
             "CUDA_VISIBLE_DEVICES";
    case cudaErrorInvalidDevice:
      return "no such GPU: `moe doctor` lists those that are there";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return "this build has no code for the GPU's architecture: the kernels need compute "
             "capability 8.0 or later; for one of those configure with "
             "-DCMAKE_CUDA_ARCHITECTURES=native";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
      return "work enqueued before it failed, and this process can use the GPU no more; "
             "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer names the kernel";
    default:
      return "";
  }
}

absl::StatusCode CodeFor(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorTooManyPeers:
      return absl::StatusCode::kUnimplemented;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  const absl::string_view remedy = RemedyFor(error);
  return {CodeFor(error),
          absl::StrCat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
                       remedy.empty() ? "" : ": ", remedy)};
}

absl::Status CudaOutOfMemory(int64_t wanted_bytes, absl::string_view what) {
  (void)cudaGetLastError();
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) (void)cudaGetLastError();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": ", wanted_bytes, " bytes wanted, ", free, " free of ", total));
}

}  // namespace moe
