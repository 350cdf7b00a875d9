#include <cstdint>
#include <limits>

#include <cuda/atomic>

#include "kernels/base/cuda_hopper.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/grouped_gemm/gemm_ring_cuda.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A tile is 128 columns of the output by up to 256 rows of one group. The product's M is the
// weights' columns, 64 for each of two warpgroups; its N is the group's rows, rounded up to one of
// kWidthCount widths, so that few rows cost few products. 128 sums a thread.
constexpr int kTileCols = kRingRows, kStages = 4;
constexpr int kWidthCount = 6;
constexpr int kMostRows = 256;
MOE_HOST_DEVICE constexpr int WidthAt(int i) {
  return i < 4 ? 16 << i : 64 * (i - 1);  // 16, 32, 64, 128, 192, 256
}
static_assert(WidthAt(3) == 128 && WidthAt(kWidthCount - 1) == kMostRows);
// Rows are copied in boxes of one of two sizes, each with a map; only two, since the host encodes
// all maps at every launch.
constexpr int kBoxCount = 2;
MOE_HOST_DEVICE constexpr int BoxRows(int box) {
  return box == 0 ? 16 : 64;
}

constexpr int kWeightBytes = kConsumers * kBoxBytes;
constexpr int kStageBytes = kWeightBytes + kMostRows * kTileRowBytes;

template <typename T>
struct Arguments {
  TensorMap weight;
  TensorMap rows[kBoxCount];
  MatrixView<T> out;
  GroupRows groups;
  int group_count;
  int depth;
  unsigned* taken;
  unsigned cluster_blocks;
};

// The tiles of all groups, by number; the groups' rows are read on the way. The blocks of a cluster
// share a number and have neighbouring columns of the same rows, some beyond the last; neighbouring
// clusters share weights.
class Tiles {
 public:
  template <typename T>
  __device__ explicit Tiles(const Arguments<T>& arguments)
      : groups_(arguments.groups),
        group_count_(arguments.group_count),
        cols_(kTileCols * static_cast<int>(arguments.cluster_blocks)),
        col_tiles_(static_cast<unsigned>(TilesOf(arguments.out.cols(), cols_))) {}

  // Goes on to tile `index`; numbers ascend. False beyond the last tile. In 32 bits, because a
  // 64-bit division is a function call.
  __device__ bool Seek(unsigned index) {
    for (; group < group_count_; ++group) {
      const int64_t begin = groups_.Begin(group), end = groups_.Begin(group + 1);
      const auto row_tiles =
          end > begin ? static_cast<unsigned>(TilesOf(end - begin, kMostRows)) : 0;
      const unsigned in_group = index - first_;
      if (in_group < row_tiles * col_tiles_) {
        row = begin + int64_t{in_group % row_tiles} * kMostRows;
        rows = static_cast<int>(Min<int64_t>(end - row, kMostRows));
        col = static_cast<int>(in_group / row_tiles) * cols_ +
              static_cast<int>(ClusterRank()) * kTileCols;
        width = 0;
        while (WidthAt(width) < rows) ++width;
        return true;
      }
      first_ += row_tiles * col_tiles_;
    }
    return false;
  }

  int group = 0;
  int64_t row = 0;  // among the rows of all groups
  int rows = 0;
  int col = 0;
  int width = 0;  // WidthAt(width) >= rows

 private:
  const GroupRows& groups_;
  const int group_count_;
  const int cols_;  // of a cluster's tile
  const unsigned col_tiles_;
  unsigned first_ = 0;  // number of the first tile of `group`
};

// A cluster takes the next tile as it becomes free. Tiles take unequal time; with a fixed share
// clusters would drift apart by several groups, whose operands no longer fit the cache together.
// The first block of a cluster takes tiles, and passes their numbers on through device memory.
class TakenTiles {
 public:
  template <typename T>
  __device__ explicit TakenTiles(const Arguments<T>& arguments)
      : taken_(arguments.taken),
        blocks_(arguments.cluster_blocks),
        index_(blockIdx.x / blocks_),
        passed_(arguments.taken + 1 + index_ * kPassedTiles) {}

  __device__ unsigned index() const { return index_; }
  // Before the copies of a tile: the first block takes the next one.
  __device__ void Take() {
    if (ClusterRank() != 0) return;
    next_ = gridDim.x / blocks_ + Atomic(*taken_).fetch_add(1, ::cuda::memory_order_relaxed);
    if (blocks_ > 1) Atomic(passed_[slot_]).store(next_, ::cuda::memory_order_relaxed);
  }
  // After them.
  __device__ void Advance() {
    index_ = ClusterRank() == 0 ? next_ : AwaitAbove(index_, passed_[slot_]);
    slot_ = (slot_ + 1) % kPassedTiles;
  }

 private:
  using Atomic = ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>;

  unsigned* const taken_;
  const unsigned blocks_;
  unsigned index_;
  unsigned* const passed_;  // [kPassedTiles], in turn; numbers ascend, from 0
  unsigned next_ = 0;
  int slot_ = 0;
};

// One thread copies the stages of its tiles as they become free in all blocks of the cluster: the
// block's weights, and for all blocks every so many-th box of the rows. `tile_of` [kStages] says
// whose stage it is; a stage without bytes follows the last tile.
template <typename T, Major kWeightMajor>
__device__ void Produce(const Arguments<T>& arguments, const Ring& ring, unsigned* tile_of) {
  const unsigned blocks = arguments.cluster_blocks;
  Stage<kStages> stage;
  TakenTiles taken(arguments);
  Tiles tile(arguments);
  while (tile.Seek(taken.index())) {
    taken.Take();
    const int width = WidthAt(tile.width), box = width < BoxRows(1) ? 0 : 1;
    const int first_row = static_cast<int>(ClusterRank()) * BoxRows(box);
    const int row_step = static_cast<int>(blocks) * BoxRows(box);
    const auto bytes = static_cast<uint32_t>(kWeightBytes + width * kTileRowBytes);
    for (int depth = 0; depth < arguments.depth; depth += kRingDepth) {
      ring.empty[stage.index].Wait(stage.parity ^ 1);
      TransactionBarrier& full = ring.full[stage.index];
      unsigned char* const to = ring.tiles + stage.index * kStageBytes;
      tile_of[stage.index] = taken.index();
      full.ArriveExpecting(bytes);
      MOE_UNROLL
      for (int half = 0; half < kConsumers; ++half) {
        const int col = tile.col + half * kProductRows;
        if constexpr (kWeightMajor == Major::kDepth) {
          CopyTile(arguments.weight, depth, col, tile.group, to + half * kBoxBytes, full);
        } else {
          CopyTile(arguments.weight, col, depth, tile.group, to + half * kBoxBytes, full);
        }
      }
      for (int row = first_row; row < width; row += row_step) {
        CopyTileToCluster(arguments.rows[box], depth, static_cast<int>(tile.row) + row, 0,
                          to + kWeightBytes + row * kTileRowBytes, full, blocks);
      }
      stage.Advance();
    }
    taken.Advance();
  }
  ring.empty[stage.index].Wait(stage.parity ^ 1);
  tile_of[stage.index] = taken.index();
  ring.full[stage.index].Arrive();
}

// Stores a warp's 16 columns of `tile`, 8 rows at a time; a lane 4 neighbouring elements, so that
// whole sectors of 32 bytes are written. kWhole: all columns are there, rows aligned to 4 elements.
template <bool kWhole, typename T, int kWidth>
__device__ __forceinline__ void StoreRows(const float (&sums)[kWidth / 2], const Tiles& tile,
                                          int first_col, MatrixView<T> out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const bool odd = lane % 2 != 0;
  const int64_t col = first_col + lane % 2 * 8 + lane % 4 / 2 * 4;
  const int rows = tile.rows - lane / 4;  // left for this lane
  T* to = out.data() + (tile.row + lane / 4) * out.stride() + col;
  MOE_UNROLL
  for (int i = 0; i < kWidth / 8; ++i) {
    // Before: column g and rows 2t, 2t + 1 of 8 x 8 elements; after: row g and columns 2t, 2t + 1,
    // of which neighbouring lanes exchange one pair.
    const uint32_t left = Transposed(RoundedPair<T>(sums[4 * i], sums[4 * i + 1]));
    const uint32_t right = Transposed(RoundedPair<T>(sums[4 * i + 2], sums[4 * i + 3]));
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? left : right, 1);
    const Elements<uint32_t, 2> words = {{odd ? other : left, odd ? right : other}};
    const auto elements = __builtin_bit_cast(Elements<T, 4>, words);
    if (8 * i < rows) {
      if constexpr (kWhole) {
        Store(elements, to);
      } else {
        for (int j = 0; j < 4; ++j) {
          if (col + j < out.cols()) to[j] = elements.at[j];
        }
      }
    }
    to += 8 * out.stride();
  }
}
template <typename T, int kWidth>
__device__ __forceinline__ void StoreSums(const float (&sums)[kWidth / 2], const Tiles& tile,
                                          int first_col, MatrixView<T> out) {
  if (RowsAlignedTo(out, 4 * sizeof(T)) && first_col + 16 <= out.cols()) {
    StoreRows<true, T, kWidth>(sums, tile, first_col, out);
  } else {
    StoreRows<false, T, kWidth>(sums, tile, first_col, out);
  }
}

// One warpgroup multiplies a tile: its 64 columns by kWidth rows, in ascending depth. Inlined,
// because sums of pending products cannot pass through a call.
template <typename T, int kWidth, Major kWeightMajor>
__device__ __forceinline__ void Multiply(const Arguments<T>& arguments, const Ring& ring,
                                         const Tiles& tile, Stage<kStages>& stage) {
  const int half = static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1;
  // One lane of a warp for each block that copies to this one.
  const unsigned lane = threadIdx.x % kWarpLanes;
  const bool releases = lane < arguments.cluster_blocks;
  constexpr int kWeightStep = kWeightMajor == Major::kDepth ? 2 : kTileRowBytes;
  // else registers for all widths would stay allocated from tile to tile
  float sums[kWidth / 2] = {};
  int before = 0;
  MOE_NO_UNROLL
  for (int depth = 0; depth < arguments.depth; depth += kRingDepth) {
    ring.full[stage.index].Wait(stage.parity);
    const unsigned char* const tiles = ring.tiles + stage.index * kStageBytes;
    FenceSums(sums);
    MOE_UNROLL
    for (int k = 0; k < kRingDepth; k += kProductDepth) {
      AddProduct<T, kWidth, kWeightMajor>(
          sums, OperandAt(tiles + half * kBoxBytes + k * kWeightStep, kBoxBytes),
          OperandAt(tiles + kWeightBytes + k * 2, kBoxBytes), true);
    }
    CommitProducts();
    WaitForProducts<1>(sums);  // those of the previous stage
    if (depth > 0 && releases) ring.empty[before].ArriveIn(lane);
    before = stage.index;
    stage.Advance();
  }
  WaitForProducts<0>(sums);
  if (releases) ring.empty[before].ArriveIn(lane);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes % 4;
  StoreSums<T, kWidth>(sums, tile, tile.col + half * kProductRows + warp * 16, arguments.out);
}

template <typename T, Major kWeightMajor, int kIndex = 0>
__device__ __forceinline__ void MultiplyInWidth(const Arguments<T>& arguments, const Ring& ring,
                                                const Tiles& tile, Stage<kStages>& stage) {
  if constexpr (kIndex + 1 < kWidthCount) {
    if (tile.width != kIndex) {
      MultiplyInWidth<T, kWeightMajor, kIndex + 1>(arguments, ring, tile, stage);
      return;
    }
  }
  Multiply<T, WidthAt(kIndex), kWeightMajor>(arguments, ring, tile, stage);
}

// At most as many blocks as multiprocessors, by themselves or in clusters. The first of a block's
// three warpgroups copies, the others multiply.
template <typename T, Major kWeightMajor>
__global__ void __launch_bounds__(kRingThreads, 1)
    WgmmaKernel(const __grid_constant__ Arguments<T> arguments) {
  MOE_DYNAMIC_SHARED(tiles);
  MOE_SHARED_ARRAY(TransactionBarrier, full, kStages);
  MOE_SHARED_ARRAY(TransactionBarrier, empty, kStages);
  MOE_SHARED_ARRAY(unsigned, tile_of, kStages);
  const Ring ring = {tiles, full, empty};
  if (threadIdx.x == 0) {
    InitRing<kStages>(ring, arguments.cluster_blocks);
    FenceBarriersOfCluster();
  }
  ClusterBarrier();
  if (threadIdx.x < kWarpgroupThreads) {
    GiveRegistersBack<kCopyRegisters>();
    if (threadIdx.x == 0) Produce<T, kWeightMajor>(arguments, ring, tile_of);
  } else {
    TakeRegisters<kProductRegisters>();
    Stage<kStages> stage;
    Tiles tile(arguments);
    while (true) {
      ring.full[stage.index].Wait(stage.parity);
      if (!tile.Seek(tile_of[stage.index])) break;
      MultiplyInWidth<T, kWeightMajor>(arguments, ring, tile, stage);
    }
  }
  ClusterBarrier();  // the other block may still release stages of this one
}

template <typename T>
cudaError_t EncodeMaps(const CudaGroupedGemm<T>& gemm, Arguments<T>& arguments) {
  const auto& [first, count, distance] = gemm.weight;
  cudaError_t error = EncodeTensorMap(
      {.data = first.data(),
       .size = {first.cols(), first.rows(), count},
       .stride_bytes = {first.stride() * 2, (count > 1 ? distance : first.stride()) * 2},
       .box = {kRingDepth, kProductRows, 1}},
      arguments.weight);
  for (int i = 0; i < kBoxCount && error == cudaSuccess; ++i) {
    error = EncodeMatrix(gemm.in, kRingDepth, static_cast<uint32_t>(BoxRows(i)), arguments.rows[i]);
  }
  return error;
}

// In clusters of two blocks, which read rows once for both, where a tile beyond the last column
// costs little and nearly all multiprocessors run clusters. All run at once: a cluster that waited
// for another one would have no tile left but its first.
template <typename T, Major kWeightMajor>
cudaError_t LaunchInPairs(Arguments<T> arguments, int spare, cudaStream_t stream) {
  constexpr auto kKernel = &WgmmaKernel<T, kWeightMajor>;
  constexpr int kLeastOddTiles = 9, kMostIdle = 8;
  const int most = RingBlocks(spare);
  LaunchShape shape = {dim3(static_cast<unsigned>(most)), dim3(kRingThreads),
                       size_t{kStages} * kStageBytes};
  const int64_t col_tiles = TilesOf(arguments.out.cols(), kTileCols);
  if (col_tiles % 2 == 0 || col_tiles >= kLeastOddTiles) {
    LaunchShape pairs = shape;
    pairs.cluster_blocks = 2;
    pairs.grid.x = static_cast<unsigned>(RingBlocks(0) / 2 * 2);
    thread_local int of_device = -1, blocks = 0;
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && device != of_device) {
      blocks = 2 * ActiveClusters(kKernel, pairs);
      of_device = device;
    }
    const int in_pairs = Min(blocks, most / 2 * 2);
    if (in_pairs > 0 && blocks >= RingBlocks(0) - kMostIdle && blocks / 2 <= kMostClusters) {
      pairs.grid.x = static_cast<unsigned>(in_pairs);
      shape = pairs;
    }
  }
  arguments.cluster_blocks = shape.cluster_blocks;
  const size_t words = shape.cluster_blocks == 1 ? 1 : kTakenWords;
  const cudaError_t error = cudaMemsetAsync(arguments.taken, 0, words * sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  return Launch(kKernel, shape, stream, arguments);
}

}  // namespace

template <typename T>
bool TakesWgmma(const CudaGroupedGemm<T>& gemm) {
  const auto& [first, count, distance] = gemm.weight;
  const bool is_tensor = count <= 1 || (distance % 8 == 0 && distance >= first.stride());
  return TakesBulkCopies(gemm.in) && TakesBulkCopies(first) && is_tensor && gemm.in.cols() > 0 &&
         IsHopper();
}

template <typename T>
cudaError_t RunWgmma(const CudaGroupedGemm<T>& gemm, cudaStream_t stream) {
  const MatrixView<T>& out = gemm.out;
  if (out.rows() == 0 || out.cols() == 0 || gemm.weight.count == 0) return cudaSuccess;
  // Copies use 32-bit coordinates, up to one tile beyond the last element.
  constexpr int64_t kMostSize = std::numeric_limits<int32_t>::max() - kMostRows;
  for (const int64_t size : {out.rows(), out.cols(), gemm.in.cols(), gemm.weight.count}) {
    if (size > kMostSize) return cudaErrorInvalidValue;
  }
  Arguments<T> arguments = {.weight = {},
                            .rows = {},
                            .out = out,
                            .groups = {gemm.offsets, out.rows()},
                            .group_count = static_cast<int>(gemm.weight.count),
                            .depth = static_cast<int>(gemm.in.cols()),
                            .taken = gemm.taken,
                            .cluster_blocks = 1};
  const cudaError_t error = EncodeMaps(gemm, arguments);
  if (error != cudaSuccess) return error;
  return gemm.weight_layout == Layout::kPlain
             ? LaunchInPairs<T, Major::kRow>(arguments, gemm.spare, stream)
             : LaunchInPairs<T, Major::kDepth>(arguments, gemm.spare, stream);
}

#define MOE_INSTANTIATE(T)                             \
  template bool TakesWgmma(const CudaGroupedGemm<T>&); \
  template cudaError_t RunWgmma(const CudaGroupedGemm<T>&, cudaStream_t);
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe::gemm
