// Pinned host memory through which a CUDA stream takes arrays that the host may change at once.
// Internal to stream_cuda.cc.
#ifndef MOE_KERNELS_BASE_CUDA_STAGING_H_
#define MOE_KERNELS_BASE_CUDA_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include <absl/status/statusor.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_types.h"

namespace moe {

// Two blocks, filled in turn: the host waits only when it comes back to a block whose copies the
// stream has not passed. Blocks grow to twice the largest part taken and are kept. For one stream,
// used by one host thread at a time with the stream's device current.
class CudaStaging {
 public:
  CudaStaging(cudaStream_t stream, std::string name) : stream_(stream), name_(std::move(name)) {}
  // The stream has passed all copies.
  ~CudaStaging();
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  // `bytes` bytes, 64-byte aligned, to fill and to copy from in the stream before the next call.
  absl::StatusOr<std::byte*> Take(int64_t bytes);

 private:
  struct Block {
    Buffer memory;
    int64_t used = 0;
    cudaEvent_t passed = nullptr;  // recorded when the block was left
    bool left = false;
  };
  absl::Status Leave(Block& block);
  absl::Status Enter(Block& block, int64_t bytes);

  const cudaStream_t stream_;
  const std::string name_;
  Block blocks_[2];
  int current_ = 0;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CUDA_STAGING_H_
