// What a build without CUDA says in place of stream_cuda.cc, buffer_cuda.cc and cuda_devices.cc.
#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"

namespace moe {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError(
      "this build has no CUDA: configure with -DMOE_ENABLE_CUDA=ON, or compute on the CPU");
}

}  // namespace

absl::StatusOr<std::vector<CudaDevice>> CudaDevices() {
  return NoCuda();
}
absl::StatusOr<std::unique_ptr<Stream>> MakeCudaStream(int, ThreadPool*) {
  return NoCuda();
}
absl::StatusOr<MemoryResource*> CudaMemory(int) {
  return NoCuda();
}

}  // namespace moe
