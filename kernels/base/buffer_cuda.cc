#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>

#include <cuda_runtime_api.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Has a pool of its own, so that the settings of the program's own pools do not apply to it.
class CudaMemoryResource final : public MemoryResource {
 public:
  CudaMemoryResource(int index, cudaMemPool_t pool, cudaStream_t stream)
      : index_(index),
        name_(absl::StrCat("CudaMemory(", index, ")")),
        pool_(pool),
        stream_(stream) {}

  Device device() const override { return {DeviceKind::kCuda, index_}; }

  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    MOE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(index_), name_));
    const auto size = static_cast<size_t>(bytes);
    void* data = nullptr;
    const cudaError_t error = cudaMallocFromPoolAsync(&data, size, pool_, stream_);
    if (error == cudaErrorMemoryAllocation) return CudaOutOfMemory(bytes, name_);
    MOE_RETURN_IF_ERROR(CudaStatus(error, name_));
    MOE_RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(data, 0, size, stream_), name_));
    // Any stream may use the memory after this.
    MOE_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), name_));
    return static_cast<std::byte*>(data);
  }

  void Free(std::byte* data, int64_t) override {
    CudaStatus(cudaFreeAsync(data, stream_), name_).IgnoreError();
  }

  // Opens the pool to `device`: cudaDeviceEnablePeerAccess does not apply to pools. CUDA has no
  // access for reading alone.
  cudaError_t OpenTo(int device) {
    cudaMemAccessDesc access = {};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = device;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    return cudaMemPoolSetAccess(pool_, &access, 1);
  }

 private:
  const int index_;
  const std::string name_;
  const cudaMemPool_t pool_;
  const cudaStream_t stream_;
};

// Keeps freed memory: making and freeing pinned memory is slow and may wait for devices.
class PinnedMemoryResource final : public MemoryResource {
 public:
  Device device() const override { return {}; }

  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    const std::lock_guard<std::mutex> lock(mu_);
    std::vector<std::byte*>& idle = idle_[bytes];
    void* data = nullptr;
    if (idle.empty()) {
      const cudaError_t error =
          cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable);
      if (error == cudaErrorMemoryAllocation) {
        CudaStatus(error, "PinnedMemory").IgnoreError();
        return absl::ResourceExhaustedError(
            absl::StrCat("no ", bytes, " bytes of pinned host memory"));
      }
      MOE_RETURN_IF_ERROR(CudaStatus(error, "PinnedMemory"));
    } else {
      data = idle.back();
      idle.pop_back();
    }
    std::memset(data, 0, static_cast<size_t>(bytes));
    return static_cast<std::byte*>(data);
  }

  void Free(std::byte* data, int64_t bytes) override {
    const std::lock_guard<std::mutex> lock(mu_);
    idle_[bytes].push_back(data);
  }

 private:
  std::mutex mu_;
  std::map<int64_t, std::vector<std::byte*>> idle_;  // by size; guarded by mu_
};

absl::StatusOr<CudaMemoryResource*> MakeResource(int index) {
  const std::string name = absl::StrCat("CudaMemory(", index, ")");
  MOE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(index), name));
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = index;
  cudaMemPool_t pool = nullptr;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaMemPoolCreate(&pool, &properties), name));
  // Otherwise every synchronisation would give idle memory back to the driver, and the next step
  // would allocate it again.
  uint64_t keep = std::numeric_limits<uint64_t>::max();
  MOE_RETURN_IF_ERROR(
      CudaStatus(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), name));
  cudaStream_t stream = nullptr;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), name));
  return new CudaMemoryResource(index, pool, stream);
}

absl::StatusOr<CudaMemoryResource*> ResourceOf(int index) {
  static std::mutex* const mu = new std::mutex;
  static auto* const resources = new std::map<int, CudaMemoryResource*>;  // guarded by mu
  std::lock_guard<std::mutex> lock(*mu);
  if (const auto found = resources->find(index); found != resources->end()) return found->second;
  MOE_ASSIGN_OR_RETURN(CudaMemoryResource* const made, MakeResource(index));
  resources->emplace(index, made);
  return made;
}

// Opens the memory that cudaMalloc gave on device `to` to the current device.
cudaError_t OpenMallocOf(int to) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return error;
  (void)cudaGetLastError();  // a later launch must not report it
  return cudaSuccess;
}

}  // namespace

absl::StatusOr<MemoryResource*> CudaMemory(int index) {
  return ResourceOf(index);
}

absl::StatusOr<MemoryResource*> PinnedMemory() {
  static PinnedMemoryResource* const memory = new PinnedMemoryResource;
  return memory;
}

absl::Status EnablePeerAccess(int from, int to) {
  const std::string pair =
      absl::StrCat("CUDA device ", from, " cannot read the memory of CUDA device ", to);
  MOE_ASSIGN_OR_RETURN(CudaMemoryResource* const memory, ResourceOf(to));
  MOE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(from), pair));
  if (from == to) return absl::OkStatus();
  int can = 0;
  MOE_RETURN_IF_ERROR(CudaStatus(cudaDeviceCanAccessPeer(&can, from, to), pair));
  if (can == 0) return absl::UnimplementedError(pair);
  MOE_RETURN_IF_ERROR(CudaStatus(memory->OpenTo(from), pair));
  return CudaStatus(OpenMallocOf(to), pair);
}

}  // namespace moe
