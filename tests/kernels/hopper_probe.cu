#include <cuda/atomic>

#include "kernels/base/cuda_hopper.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"
#include "tests/kernels/hopper_probe.h"

namespace moe::testing {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kRows = HopperProbe::kRows, kDepth = HopperProbe::kDepth;
static_assert(kRows == kDepth && kDepth * 2 == kTileRowBytes);
constexpr int kTileBytesA = kRows * kTileRowBytes;

// Bytes of b's tiles: whole ones of 64 columns if columns are contiguous.
template <int kColumns, Major kMajorB>
constexpr int kTileBytesB =
    (kMajorB == Major::kDepth ? kColumns : (kColumns + 63) / 64 * kDepth) * kTileRowBytes;

// The map of matrices [down, across] of all depths; a box is 64 columns of one of them.
cudaError_t Encode(const void* data, int down, int across, TensorMap& map) {
  return EncodeTensorMap({.data = data,
                          .size = {across, down, kDepth},
                          .stride_bytes = {int64_t{2} * across, int64_t{2} * across * down},
                          .box = {kDepth, static_cast<uint32_t>(down), 1}},
                         map);
}

struct Parameters {
  TensorMap a_map, b_map;
  int step;
  int* wrong;
};

// A block computes one product: one thread of the first warpgroup copies, the second warpgroup
// multiplies.
template <typename T, int kColumns, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(2 * kWarpgroupThreads, 1)
    ProbeKernel(const __grid_constant__ Parameters parameters) {
  MOE_DYNAMIC_SHARED(tiles);
  MOE_SHARED_ARRAY(TransactionBarrier, arrived, 1);
  constexpr int kBytesB = kTileBytesB<kColumns, kMajorB>;
  const auto& [a_map, b_map, step, wrong] = parameters;
  const int one = (static_cast<int>(blockIdx.x) * step + 21) % kDepth;
  if (threadIdx.x == 0) {
    arrived[0].Init(1);
    FenceAsyncProxy();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    GiveRegistersBack<40>();
    if (threadIdx.x != 0) return;
    arrived[0].ArriveExpecting(kTileBytesA + kBytesB);
    CopyTile(a_map, 0, 0, one, tiles, arrived[0]);
    const int box_bytes = kMajorB == Major::kDepth ? kBytesB : kDepth * kTileRowBytes;
    for (int i = 0; i * box_bytes < kBytesB; ++i) {
      CopyTile(b_map, i * kDepth, 0, one, tiles + kTileBytesA + i * box_bytes, arrived[0]);
    }
    return;
  }
  TakeRegisters<232>();
  arrived[0].Wait(0);
  float sums[kColumns / 2] = {};
  FenceSums(sums);
  MOE_UNROLL
  for (int depth = 0; depth < kDepth; depth += kProductDepth) {
    const int a_at = kMajorA == Major::kDepth ? depth * 2 : depth * kTileRowBytes;
    const int b_at = kMajorB == Major::kDepth ? depth * 2 : depth * kTileRowBytes;
    AddProduct<T, kColumns, kMajorA, kMajorB>(
        sums, OperandAt(tiles + a_at, kTileBytesA),
        OperandAt(tiles + kTileBytesA + b_at, kDepth * kTileRowBytes), depth > 0);
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
cudaError_t RunProduct(const HopperProbe& probe, cudaStream_t stream) {
  Parameters parameters = {.a_map = {}, .b_map = {}, .step = probe.step, .wrong = probe.wrong};
  cudaError_t error = Encode(probe.a, kRows, kDepth, parameters.a_map);
  if (error == cudaSuccess) {
    error = kMajorB == Major::kDepth ? Encode(probe.b, kColumns, kDepth, parameters.b_map)
                                     : Encode(probe.b, kDepth, kColumns, parameters.b_map);
  }
  if (error != cudaSuccess) return error;
  return Launch(&ProbeKernel<T, kColumns, kMajorA, kMajorB>,
                {dim3(static_cast<unsigned>(probe.blocks)), dim3(2 * kWarpgroupThreads),
                 kTileBytesA + kTileBytesB<kColumns, kMajorB>},
                stream, parameters);
}

template <typename T, int kColumns>
cudaError_t RunMajors(const HopperProbe& probe, cudaStream_t stream) {
  constexpr auto kDepthMajor = Major::kDepth, kRowMajor = Major::kRow;
  if (probe.a_rows_contiguous) {
    return probe.b_columns_contiguous
               ? RunProduct<T, kColumns, kRowMajor, kRowMajor>(probe, stream)
               : RunProduct<T, kColumns, kRowMajor, kDepthMajor>(probe, stream);
  }
  return probe.b_columns_contiguous
             ? RunProduct<T, kColumns, kDepthMajor, kRowMajor>(probe, stream)
             : RunProduct<T, kColumns, kDepthMajor, kDepthMajor>(probe, stream);
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

__global__ void OccupantKernel(Occupant occupant) {
  using Atomic = ::cuda::atomic_ref<int, ::cuda::thread_scope_system>;
  Atomic(*occupant.begun).fetch_add(1, ::cuda::memory_order_relaxed);
  int64_t polls = 0;
  while (Atomic(*occupant.stop).load(::cuda::memory_order_relaxed) == 0 &&
         polls < occupant.most_polls) {
    ++polls;
  }
  Atomic(*occupant.ended).fetch_add(1, ::cuda::memory_order_relaxed);
}

}  // namespace

cudaError_t RunHopperProbe(const HopperProbe& probe, cudaStream_t stream) {
  return probe.float16 ? RunColumns<Float16>(probe, stream) : RunColumns<BFloat16>(probe, stream);
}

cudaError_t RunOccupant(const Occupant& occupant, cudaStream_t stream) {
  constexpr size_t kMoreThanHalf = 120 << 10;  // of a multiprocessor's shared memory
  return Launch(&OccupantKernel,
                {dim3(static_cast<unsigned>(occupant.blocks)), dim3(1), kMoreThanHalf}, stream,
                occupant);
}

}  // namespace moe::testing
