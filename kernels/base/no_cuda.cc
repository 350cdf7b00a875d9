// Replaces the files with CUDA in base/ in a build without it.
#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/stream_stamps.h"
#include "kernels/base/stream_timer.h"

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
absl::StatusOr<int> CudaDeviceCount() {
  return NoCuda();
}
absl::StatusOr<CudaDevice> CudaDeviceAt(int) {
  return NoCuda();
}
absl::Status EnablePeerAccess(int, int) {
  return NoCuda();
}
absl::StatusOr<std::unique_ptr<Stream>> MakeCudaStream(int, ThreadPool*, void*, CudaPriority) {
  return NoCuda();
}
absl::StatusOr<Device> DeviceOfCudaStream(void*) {
  return NoCuda();
}
absl::StatusOr<std::unique_ptr<StreamTimer>> MakeCudaStreamTimer(Stream&) {
  return NoCuda();
}
absl::StatusOr<std::unique_ptr<StreamStamps>> MakeStreamStamps(Stream&) {
  return NoCuda();
}
absl::StatusOr<MemoryResource*> CudaMemory(int) {
  return NoCuda();
}
absl::StatusOr<MemoryResource*> PinnedMemory() {
  return NoCuda();
}

}  // namespace moe
