#include "kernels/base/cuda_staging.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kSmallestBlock = int64_t{1} << 20;

}  // namespace

CudaStaging::~CudaStaging() {
  for (Block& block : blocks_) {
    if (block.data != nullptr) CudaStatus(cudaFreeHost(block.data), name_).IgnoreError();
    if (block.passed != nullptr) CudaStatus(cudaEventDestroy(block.passed), name_).IgnoreError();
  }
}

absl::StatusOr<std::byte*> CudaStaging::Take(int64_t bytes) {
  const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (blocks_[current_].used + size > blocks_[current_].bytes) {
    MOE_RETURN_IF_ERROR(Leave(blocks_[current_]));
    current_ = 1 - current_;
    MOE_RETURN_IF_ERROR(Enter(blocks_[current_], size));
  }
  Block& block = blocks_[current_];
  std::byte* const data = block.data + block.used;
  block.used += size;
  return data;
}

absl::Status CudaStaging::Leave(Block& block) {
  if (block.used == 0) return absl::OkStatus();
  if (block.passed == nullptr) {
    MOE_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&block.passed, cudaEventDisableTiming), name_));
  }
  MOE_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(block.passed, stream_), name_));
  block.left = true;
  return absl::OkStatus();
}

// Waits for the block's last copies and makes room for `bytes`.
absl::Status CudaStaging::Enter(Block& block, int64_t bytes) {
  if (block.left) MOE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(block.passed), name_));
  block.left = false;
  block.used = 0;
  if (bytes <= block.bytes) return absl::OkStatus();
  if (block.data != nullptr) MOE_RETURN_IF_ERROR(CudaStatus(cudaFreeHost(block.data), name_));
  block.data = nullptr;
  block.bytes = 0;
  const int64_t wanted = std::max(2 * bytes, kSmallestBlock);
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(wanted), cudaHostAllocDefault);
  if (error == cudaErrorMemoryAllocation) {
    CudaStatus(error, name_).IgnoreError();
    return absl::ResourceExhaustedError(
        absl::StrCat(name_, ": no ", wanted, " bytes of pinned host memory"));
  }
  MOE_RETURN_IF_ERROR(CudaStatus(error, name_));
  block.data = static_cast<std::byte*>(data);
  block.bytes = wanted;
  return absl::OkStatus();
}

}  // namespace moe
