#include "kernels/base/cuda_hopper.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"
#include "tests/kernels/hopper_probe.h"

namespace moe::testing {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kRows = HopperProbe::kRows, kDepth = HopperProbe::kDepth;
constexpr int kTileBytesA = kRows * kDepth * 2;

// An operand is stored in shared memory as slabs: the swizzle's width (`span` bytes) of all rows,
// or, if rows are contiguous, of all the depth.
struct Slabs {
  Swizzle swizzle;
  bool rows_contiguous;
  int rows;

  MOE_HOST_DEVICE int span() const {
    return swizzle == Swizzle::k128  ? 128
           : swizzle == Swizzle::k64 ? 64
           : swizzle == Swizzle::k32 ? 32
                                     : 16;
  }
  MOE_HOST_DEVICE int across() const { return span() / 2; }
  MOE_HOST_DEVICE int down() const { return rows_contiguous ? kDepth : rows; }
  MOE_HOST_DEVICE int bytes() const { return down() * span(); }
  MOE_HOST_DEVICE int count() const { return (rows_contiguous ? rows : kDepth) / across(); }
  // Address of the 16 steps from `depth` on.
  MOE_HOST_DEVICE int Begin(int depth) const {
    return rows_contiguous ? depth * span() : depth / across() * bytes() + depth % across() * 2;
  }
  MOE_HOST_DEVICE uint32_t leading_bytes() const {
    const bool short_depth = swizzle == Swizzle::kNone && rows_contiguous;
    return static_cast<uint32_t>(short_depth ? 8 * span() : bytes());
  }
  MOE_HOST_DEVICE uint32_t stride_bytes() const {
    const bool short_depth = swizzle == Swizzle::kNone && rows_contiguous;
    return static_cast<uint32_t>(short_depth ? bytes() : 8 * span());
  }

  cudaError_t Encode(const void* data, TensorMap& map) const {
    const int64_t wide = rows_contiguous ? rows : kDepth;
    return EncodeTensorMap(
        {.data = data,
         .size = {wide, down(), kDepth},
         .stride_bytes = {wide * 2, wide * down() * 2},
         .box = {static_cast<uint32_t>(across()), static_cast<uint32_t>(down()), 1},
         .swizzle = swizzle},
        map);
  }
};

struct Parameters {
  TensorMap a_map, b_map;
  Slabs a, b;
  int step;
  int* wrong;
};

__device__ void CopySlabs(const TensorMap& map, const Slabs& slabs, int matrix,
                          unsigned char* shared, TransactionBarrier& barrier) {
  for (int i = 0; i < slabs.count(); ++i) {
    CopyTile(map, i * slabs.across(), 0, matrix, shared + i * slabs.bytes(), barrier);
  }
}

// A block computes one product: one thread of the first warpgroup copies, the second warpgroup
// multiplies.
template <typename T, int kColumns, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(2 * kWarpgroupThreads, 1)
    ProbeKernel(const __grid_constant__ Parameters parameters) {
  MOE_DYNAMIC_SHARED(tiles);
  MOE_SHARED_ARRAY(TransactionBarrier, arrived, 1);
  const auto& [a_map, b_map, a, b, step, wrong] = parameters;
  const int one = (static_cast<int>(blockIdx.x) * step + 21) % kDepth;
  if (threadIdx.x == 0) {
    arrived[0].Init(1);
    FenceAsyncProxy();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    GiveRegistersBack<40>();
    if (threadIdx.x != 0) return;
    arrived[0].ArriveExpecting(kTileBytesA + kColumns * kDepth * 2);
    CopySlabs(a_map, a, one, tiles, arrived[0]);
    CopySlabs(b_map, b, one, tiles + kTileBytesA, arrived[0]);
    return;
  }
  TakeRegisters<232>();
  arrived[0].Wait(0);
  float sums[kColumns / 2] = {};
  FenceSums(sums);
  MOE_UNROLL
  for (int depth = 0; depth < kDepth; depth += kProductDepth) {
    AddProduct<T, kColumns, kMajorA, kMajorB>(
        sums, OperandAt(tiles + a.Begin(depth), {a.swizzle, a.leading_bytes(), a.stride_bytes()}),
        OperandAt(tiles + kTileBytesA + b.Begin(depth),
                  {b.swizzle, b.leading_bytes(), b.stride_bytes()}),
        depth > 0);
  }
  CommitProducts();
  WaitForProducts<0>(sums);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  const int first_row = thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
  const int first_column = thread % 4 * 2;
  int count = 0;
  MOE_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = first_row + i / 2 % 2 * 8, column = first_column + i / 4 * 8 + i % 2;
    count += sums[i] == static_cast<float>((row + 1) * (column + 1)) ? 0 : 1;
  }
  if (count > 0) atomicAdd(wrong, count);
}

template <typename T, int kColumns, Major kMajorA, Major kMajorB>
cudaError_t RunProbe(const HopperProbe& probe, cudaStream_t stream) {
  Parameters parameters = {.a_map = {},
                           .b_map = {},
                           .a = {probe.swizzle, probe.a_rows_contiguous, kRows},
                           .b = {probe.swizzle, probe.b_rows_contiguous, probe.columns},
                           .step = probe.step,
                           .wrong = probe.wrong};
  cudaError_t error = parameters.a.Encode(probe.a, parameters.a_map);
  if (error == cudaSuccess) error = parameters.b.Encode(probe.b, parameters.b_map);
  if (error != cudaSuccess) return error;
  return Launch(&ProbeKernel<T, kColumns, kMajorA, kMajorB>,
                {dim3(static_cast<unsigned>(probe.blocks)), dim3(2 * kWarpgroupThreads),
                 kTileBytesA + kColumns * kDepth * 2},
                stream, parameters);
}

template <typename T, int kColumns>
cudaError_t RunMajors(const HopperProbe& probe, cudaStream_t stream) {
  constexpr Major kD = Major::kDepth, kR = Major::kRow;
  if (probe.a_rows_contiguous) {
    return probe.b_rows_contiguous ? RunProbe<T, kColumns, kR, kR>(probe, stream)
                                   : RunProbe<T, kColumns, kR, kD>(probe, stream);
  }
  return probe.b_rows_contiguous ? RunProbe<T, kColumns, kD, kR>(probe, stream)
                                 : RunProbe<T, kColumns, kD, kD>(probe, stream);
}

template <typename T>
cudaError_t RunColumns(const HopperProbe& probe, cudaStream_t stream) {
  switch (probe.columns) {
    case 16:
      return RunMajors<T, 16>(probe, stream);
    case 32:
      return RunMajors<T, 32>(probe, stream);
    case 64:
      return RunMajors<T, 64>(probe, stream);
    case 128:
      return RunMajors<T, 128>(probe, stream);
    case 192:
      return RunMajors<T, 192>(probe, stream);
    case 256:
      return RunMajors<T, 256>(probe, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t RunHopperProbe(const HopperProbe& probe, cudaStream_t stream) {
  return probe.float16 ? RunColumns<Float16>(probe, stream) : RunColumns<BFloat16>(probe, stream);
}

}  // namespace moe::testing
