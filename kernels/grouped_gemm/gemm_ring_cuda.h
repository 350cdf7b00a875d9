// What the kernels of grouped products for Hopper GPUs share: a block's warpgroups, and the ring of
// stages in shared memory through which one thread passes tiles to those that multiply.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_RING_CUDA_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_RING_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_hopper.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/tensor_view.h"

namespace moe::gemm {

// The first of a block's three warpgroups copies; each of the others multiplies 64 of the 128 rows
// of an operand by all columns of the other.
constexpr int kConsumers = 2;
constexpr int kRingRows = kConsumers * cuda::kProductRows;
constexpr int kRingThreads = (1 + kConsumers) * cuda::kWarpgroupThreads;
constexpr int kConsumerWarps = kConsumers * cuda::kWarpgroupThreads / cuda::kWarpLanes;
// Registers of a thread that copies and of one that multiplies.
constexpr int kCopyRegisters = 40, kProductRegisters = 232;

// A stage is made of boxes of 64 x 64 elements, whichever of their dimensions is the depth.
constexpr int kRingDepth = 64;  // of a stage
constexpr int kBoxSize = 64;
constexpr int kBoxBytes = kBoxSize * cuda::kTileRowBytes;
static_assert(kBoxSize * 2 == cuda::kTileRowBytes && kBoxSize == kRingDepth &&
              kBoxSize == cuda::kProductRows);

// Position of a role in the ring.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++index < kStages) return;
    index = 0;
    parity ^= 1;
  }
};

struct Ring {
  unsigned char* tiles;
  cuda::TransactionBarrier* full;   // bytes have arrived
  cuda::TransactionBarrier* empty;  // products have ended
};

// Called by one thread, before a fence and a barrier of the block, or of the cluster whose blocks
// copy to each other's stages.
template <int kStages>
__device__ void InitRing(const Ring& ring, unsigned cluster_blocks = 1) {
  for (int s = 0; s < kStages; ++s) {
    ring.full[s].Init(1);
    ring.empty[s].Init(kConsumerWarps * cluster_blocks);
  }
}

inline bool IsHopper() {
  return cuda::DeviceAttribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         cuda::DeviceAttribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

// Blocks of a kernel each of whose blocks fills a multiprocessor: one for every multiprocessor of
// the current device but `spare`, and for at least half of all.
inline int RingBlocks(int spare) {
  const int all = cuda::DeviceAttribute(cudaDevAttrMultiProcessorCount);
  return all - cuda::Min(spare, all / 2);
}

// The map of a matrix, copied in boxes of `box_cols` by `box_rows` elements. T has 16 bits.
template <typename T>
cudaError_t EncodeMatrix(MatrixView<const T> m, uint32_t box_cols, uint32_t box_rows,
                         cuda::TensorMap& map) {
  return cuda::EncodeTensorMap({.data = m.data(),
                                .size = {m.cols(), m.rows(), 1},
                                .stride_bytes = {m.stride() * 2, m.stride() * 2},
                                .box = {box_cols, box_rows, 1}},
                               map);
}

// Whether every row begins at a multiple of 16 bytes, as bulk copies need. T has 16 bits.
template <typename T>
bool TakesBulkCopies(MatrixView<const T> m) {
  static_assert(sizeof(T) == 2);
  return reinterpret_cast<uintptr_t>(m.data()) % 16 == 0 && m.stride() % 8 == 0;
}

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_RING_CUDA_H_
