#include "kernels/base/cuda_devices.h"

#include <absl/strings/str_cat.h>

#include <cuda_runtime_api.h>

#include "kernels/base/cuda_probe.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::StatusOr<CudaDevice> Describe(int index) {
  const std::string who = absl::StrCat("CUDA device ", index);
  cudaDeviceProp properties;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, index), who));
  CudaDevice device = {.name = properties.name,
                       .major = properties.major,
                       .minor = properties.minor,
                       .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
  // fails where another process owns the device exclusively
  device.usable = CudaStatus(cudaSetDevice(index), who);
  if (!device.usable.ok()) return device;
  device.usable = CudaStatus(cuda::ProbeKernelImage(), who);
  size_t free = 0, total = 0;
  device.usable.Update(CudaStatus(cudaMemGetInfo(&free, &total), who));
  device.free_bytes = static_cast<int64_t>(free);
  return device;
}

}  // namespace

absl::StatusOr<int> CudaDeviceCount() {
  int count = 0;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "CUDA"));
  if (count == 0) return CudaStatus(cudaErrorNoDevice, "CUDA");
  return count;
}

absl::StatusOr<CudaDevice> CudaDeviceAt(int index) {
  int before = 0;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&before), "CUDA"));
  MOE_ASSIGN_OR_RETURN(CudaDevice device, Describe(index));
  MOE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(before), "CUDA"));
  return device;
}

absl::StatusOr<std::vector<CudaDevice>> CudaDevices() {
  MOE_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    MOE_ASSIGN_OR_RETURN(CudaDevice device, CudaDeviceAt(i));
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace moe
