#include "kernels/base/cuda_staging.h"

#include <algorithm>

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
    if (block.passed != nullptr) CudaStatus(cudaEventDestroy(block.passed), name_).IgnoreError();
  }
}

absl::StatusOr<std::byte*> CudaStaging::Take(int64_t bytes) {
  const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (blocks_[current_].used + size > blocks_[current_].memory.bytes()) {
    MOE_RETURN_IF_ERROR(Leave(blocks_[current_]));
    current_ = 1 - current_;
    MOE_RETURN_IF_ERROR(Enter(blocks_[current_], size));
  }
  Block& block = blocks_[current_];
  std::byte* const data = block.memory.data() + block.used;
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
  if (bytes <= block.memory.bytes()) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(MemoryResource* const pinned, PinnedMemory());
  MOE_ASSIGN_OR_RETURN(block.memory,
                       Buffer::Allocate(std::max(2 * bytes, kSmallestBlock), *pinned, name_));
  return absl::OkStatus();
}

}  // namespace moe
