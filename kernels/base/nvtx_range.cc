#include "kernels/base/nvtx_range.h"

// A header-only library that comes with CUDA. It searches the environment for a tool, once.
#if defined(MOE_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define MOE_NVTX 1
#else
#define MOE_NVTX 0
#endif

namespace moe {

#if MOE_NVTX
NvtxRange::NvtxRange(const char* name) {
  nvtxRangePushA(name);
}
NvtxRange::~NvtxRange() {
  nvtxRangePop();
}
#else
NvtxRange::NvtxRange(const char* /*name*/) {}
NvtxRange::~NvtxRange() = default;
#endif

}  // namespace moe
