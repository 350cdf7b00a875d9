// Names pieces of work in the time lines of NVIDIA's tools.
#ifndef MOE_KERNELS_BASE_NVTX_RANGE_H_
#define MOE_KERNELS_BASE_NVTX_RANGE_H_

namespace moe {

// An NVTX range over what this thread does and enqueues while the object lives, which Nsight
// Systems shows over the kernels. Ranges nest. Without such a tool, and in builds without CUDA, it
// costs next to nothing.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name);  // copied
  ~NvtxRange();
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_NVTX_RANGE_H_
