// Included first by every .cu file. nvcc compiles the file for a GPU; the host compiler compiles
// the same source against the simulator of tests/cusim, which provides CUDA's names. docs/cuda.md.
// No Abseil here: nvcc is three times slower with it.
#ifndef MOE_KERNELS_BASE_CUDA_KERNEL_H_
#define MOE_KERNELS_BASE_CUDA_KERNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "kernels/base/tensor_view.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include <cusim/device.h>
#endif

namespace moe::cuda {

constexpr int kWarpLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;  // masks of warp functions

// std::min is a host function to nvcc.
template <typename T>
MOE_HOST_DEVICE constexpr T Min(T a, T b) {
  return b < a ? b : a;
}

// The last i in [0, count) with start(i) <= at, for starts that do not descend; 0 if none is.
template <typename Index, typename Start>
__device__ inline Index LastStartedBy(int64_t at, Index count, Start start) {
  Index low = 0, high = count;  // start(high) > at, or high is the end
  while (high - low > 1) {
    const Index middle = low + (high - low) / 2;
    (start(middle) <= at ? low : high) = middle;
  }
  return low;
}

// An attribute of the current device; 0 without a device, which the launch reports.
inline int DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic
  // Neighbouring blocks that run at the same time, on one GPC of a Hopper GPU; divides grid.x.
  unsigned cluster_blocks = 1;
};

#if defined(__CUDACC__)
// Calls use(config) for a launch of `kernel` in this shape.
template <typename Kernel, typename Use>
cudaError_t WithConfig(Kernel* kernel, const LaunchShape& shape, cudaStream_t stream, Use use) {
  constexpr size_t kGivenUnasked = 48 << 10;
  if (shape.shared_bytes > kGivenUnasked) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = shape.cluster_blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shape.cluster_blocks > 1 ? 1 : 0;
  return use(config);
}
#endif

// Enqueues kernel(arguments...) on `stream`; returns the launch error alone. The only place that
// launches: <<<>>> appears nowhere else. A shape without blocks or threads is the caller's error:
// launchers return early for inputs of size zero.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                   const Arguments&... arguments) {
#if defined(__CUDACC__)
  // <<<>>> has no result, and the last error of this thread may come from another call.
  return WithConfig(kernel, shape, stream, [&](const cudaLaunchConfig_t& config) {
    return cudaLaunchKernelEx(&config, kernel, arguments...);
  });
#else
  // As on a GPU, a launch takes copies of the arguments, and the kernel runs when its turn comes.
  return cusim::LaunchGrid(
      {shape.grid, shape.block, shape.shared_bytes,
       [kernel, copies = std::tuple<Parameters...>(arguments...)] { std::apply(kernel, copies); },
       shape.cluster_blocks},
      stream);
#endif
}

// Clusters of the shape that the current device runs at once; 0 if it has none.
template <typename Kernel>
int ActiveClusters([[maybe_unused]] Kernel* kernel, const LaunchShape& shape) {
#if defined(__CUDACC__)
  int clusters = 0;
  const cudaError_t error =
      WithConfig(kernel, shape, nullptr, [&](const cudaLaunchConfig_t& config) {
        return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
      });
  return error == cudaSuccess ? clusters : 0;
#else
  return DeviceAttribute(cudaDevAttrMultiProcessorCount) / static_cast<int>(shape.cluster_blocks);
#endif
}

// Blocks of a grid-stride loop over `items`, `per_block` at a time. The bound makes a thread's work
// outweigh the cost of starting its block; it is far above what any GPU runs at once.
inline unsigned GridBlocks(int64_t items, int64_t per_block) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  return static_cast<unsigned>(std::min((items + per_block - 1) / per_block, kMaxBlocks));
}

}  // namespace moe::cuda

// MOE_UNROLL: for a loop whose body indexes registers, or whose loads should all be in flight at
// once. MOE_NO_UNROLL: for one that is rarely entered while many other values are kept in
// registers.
#if defined(__CUDACC__)
#define MOE_UNROLL _Pragma("unroll")
#define MOE_NO_UNROLL _Pragma("unroll 1")
#else
#define MOE_UNROLL
#define MOE_NO_UNROLL
#endif

// Declares `name`, an array of `count` (a constant) elements in the shared memory of the block.
#if defined(__CUDACC__)
#define MOE_SHARED_ARRAY(type, name, count) __shared__ type name[count]
#else
#define MOE_SHARED_ARRAY(type, name, count) \
  static const char name##_site = 0;        \
  auto& name = *static_cast<type(*)[count]>(cusim::StaticShared(&name##_site, sizeof(type[count])))
#endif

// Declares `name`, the dynamic shared memory of the block, as bytes aligned to 1,024.
#if defined(__CUDACC__)
#define MOE_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#else
#define MOE_DYNAMIC_SHARED(name) \
  auto* const name = static_cast<unsigned char*>(cusim::DynamicShared())
#endif

#endif  // MOE_KERNELS_BASE_CUDA_KERNEL_H_
