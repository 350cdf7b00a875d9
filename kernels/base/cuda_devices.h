// The CUDA devices of this machine, for programs that choose or report them. No CUDA headers here.
#ifndef MOE_KERNELS_BASE_CUDA_DEVICES_H_
#define MOE_KERNELS_BASE_CUDA_DEVICES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/stream.h"

namespace moe {

struct CudaDevice {
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  int64_t memory_bytes = 0, free_bytes = 0;
  // Not OK if this build has no code for the device; the message names the remedy.
  absl::Status usable;
};

// All devices, by ordinal. kUnimplemented, with the remedy: this build has no CUDA, or there is no
// driver or no device.
absl::StatusOr<std::vector<CudaDevice>> CudaDevices();

// The number of devices, and one of them: no other device is touched. Errors as above.
absl::StatusOr<int> CudaDeviceCount();
absl::StatusOr<CudaDevice> CudaDeviceAt(int index);

// Lets kernels and copies of CUDA device `from` read and write the memory of device `to` from now
// on: all memory of CudaMemory(to), past and future, and that of cudaMalloc. May be called
// repeatedly and from any thread. Blocks the host while the driver maps the memory, waits for no
// stream, leaves `from` current. kUnimplemented, naming both devices, where the hardware does not
// support it; else errors as CudaMemory.
absl::Status EnablePeerAccess(int from, int to);

// The device of `cuda_stream`, a cudaStream_t. kInvalidArgument for null and for CUDA's default
// streams, which belong to whatever device is current; kUnimplemented without CUDA.
absl::StatusOr<Device> DeviceOfCudaStream(void* cuda_stream);

// Internal: callers use MakeStream and MakeTransferStream. `priority`: of a stream that is made.
enum class CudaPriority : uint8_t { kLeast, kGreatest };
absl::StatusOr<std::unique_ptr<Stream>> MakeCudaStream(int index, ThreadPool* threads,
                                                       void* cuda_stream, CudaPriority priority);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CUDA_DEVICES_H_
