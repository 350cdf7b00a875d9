// Assignment of tiles to blocks, shared by the CUDA kernels of grouped products. The grid depends
// on shapes that the host knows; the groups' rows are read on the device.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_TILES_CUDA_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILES_CUDA_H_

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {

// The rows of groups, read by the kernel.
struct GroupRows {
  const int64_t* offsets;  // [groups + 1], or nullptr: one group
  int64_t rows;            // N

  // Rows stay inside [0, N] whatever the offsets are.
  __device__ int64_t Begin(int g) const {
    const int64_t offset = offsets == nullptr ? g * rows : offsets[g];
    return offset < 0 ? 0 : offset > rows ? rows : offset;
  }
  template <typename T>
  __device__ MatrixView<T> Of(int g, MatrixView<T> all) const {
    const int64_t begin = Begin(g), end = Begin(g + 1);
    return RowRange(all, begin, end < begin ? begin : end);
  }
};

// c (+)= a * b of one group; the block owns the tile that begins at (row, col).
template <typename T, typename TOut>
struct Tile {
  MatrixView<const T> a, b;
  MatrixView<TOut> c;
  int64_t row, col;
  Write write = Write::kOverwrite;
  int64_t first = 0;  // row 0 of c, among the rows of all groups
};

MOE_HOST_DEVICE inline int64_t TilesOf(int64_t n, int tile) {
  return (n + tile - 1) / tile;
}

// The product of CudaGroupedGemm: groups own rows of a and c.
template <typename In, typename Out, Layout kWeightLayout>
struct RowGroups {
  using T = In;
  using TOut = Out;
  static constexpr Layout kALayout = Layout::kPlain, kBLayout = kWeightLayout;
  static constexpr bool kIsLeaf = false;

  MatrixView<const T> a;
  MatrixSlab<const T> b;
  MatrixView<TOut> c;
  GroupRows groups;

  // Group g has the row tiles [Start(g), Start(g + 1)): at least as many as its rows need, since
  // floor(begin / tile) grows by floor(rows / tile) at least, and g by 1. Surplus tiles are empty.
  __device__ int64_t Start(int g, int tile_rows) const {
    return (groups.Begin(g) - groups.Begin(0)) / tile_rows + g;
  }
  int64_t TileCount(int tile_rows, int tile_cols) const {
    return (groups.rows / tile_rows + b.count) * TilesOf(c.cols(), tile_cols);
  }
  // False if the block's tile is empty. Neighbouring blocks share rows of a, which outnumber those
  // of b.
  __device__ bool Find(int tile_rows, int tile_cols, Tile<T, TOut>& tile) const {
    const auto col_tiles = static_cast<unsigned>(TilesOf(c.cols(), tile_cols));
    const int64_t row_tile = blockIdx.x / col_tiles;
    const int g = cuda::LastStartedBy(row_tile, static_cast<int>(b.count),
                                      [&](int group) { return Start(group, tile_rows); });
    tile.a = groups.Of(g, a);
    tile.b = b[g];
    tile.c = groups.Of(g, c);
    tile.row = (row_tile - Start(g, tile_rows)) * tile_rows;
    tile.col = int64_t{blockIdx.x % col_tiles} * tile_cols;
    tile.first = groups.Begin(g);
    return tile.row < tile.c.rows();
  }
};
template <typename T, typename TOut>
struct ForwardGroups : RowGroups<T, TOut, Layout::kTransposed> {};
template <typename T, typename TOut>
struct InputGradientGroups : RowGroups<T, TOut, Layout::kPlain> {};

// The same of the terms of a leaf.
template <typename Groups>
struct LeafOf : Groups {
  static constexpr bool kIsLeaf = true;
  TreeLeaf leaf;
};

// The whole reduced index, in one part.
struct WholeDepth {
  static constexpr bool kHasParts = false;
  int64_t depth;
  __device__ constexpr int count() const { return 1; }
  __device__ int64_t End(int) const { return depth; }
  __device__ int64_t terms() const { return depth; }
};

// The parts of a leaf. `leaf` is an argument of the kernel.
struct LeafParts {
  static constexpr bool kHasParts = true;
  const TreeLeaf* leaf;

  __device__ int count() const { return leaf->parts; }
  __device__ int64_t Begin(int part) const {
    return part == 0 ? leaf->begin[0] : part == 1 ? leaf->begin[1] : leaf->begin[2];
  }
  __device__ int64_t Terms(int part) const {
    return part == 0   ? leaf->first[1]
           : part == 1 ? leaf->first[2] - leaf->first[1]
                       : leaf->first[3] - leaf->first[2];
  }
  __device__ int64_t End(int part) const { return Begin(part) + Terms(part); }
  __device__ int64_t terms() const { return leaf->first[GemmTree::kMaxParts]; }
  // Where term k of the leaf is in the reduced index.
  __device__ int64_t At(int64_t k) const {
    if (k < leaf->first[1]) return leaf->begin[0] + k;
    if (k < leaf->first[2]) return leaf->begin[1] + k - leaf->first[1];
    return leaf->begin[2] + k - leaf->first[2];
  }
  // Whether all parts begin at multiples of `terms`.
  __device__ bool AlignedTo(int terms) const {
    return (leaf->begin[0] | leaf->begin[1] | leaf->begin[2]) % terms == 0;
  }
};

// f(node) for the left siblings of a leaf in turn, the rows of the tile's group alone.
template <typename T, typename TOut, typename Function>
__device__ void ForLefts(const TreeLeaf& leaf, const Tile<T, TOut>& tile, Function f) {
  const int64_t rows = tile.c.rows(), cols = tile.c.cols();
  MOE_UNROLL
  for (int i = 0; i < TreeLeaf::kMaxLefts; ++i) {
    if (i < leaf.lefts) f(MatrixView<const float>(leaf.left[i] + tile.first * cols, rows, cols));
  }
}

// The segments of one weight's rows, relative to its first row.
struct Segments {
  static constexpr bool kHasParts = false;
  const int64_t* rows;  // for all weights: first row of each segment, then the end
  int64_t each;

  __device__ int count() const { return static_cast<int>(each); }
  __device__ int64_t End(int s) const { return rows[s + 1] - rows[0]; }
  // Calls f(begin, end) for segments that have rows.
  template <typename Function>
  __device__ void ForEach(Function f) const {
    int64_t begin = 0;
    MOE_NO_UNROLL
    for (int s = 0; s < count(); ++s) {
      const int64_t end = End(s);
      if (begin < end) f(begin, end);
      begin = end;
    }
  }
};

// The products of CudaWeightGradients. Neighbouring blocks share rows of dy and x.
template <typename In, typename Sum>
struct WeightGradients : CudaWeightGradients<In, Sum> {
  using T = In;
  using TOut = Sum;
  static constexpr Layout kALayout = Layout::kTransposed, kBLayout = Layout::kPlain;
  static constexpr bool kIsLeaf = false;

  int64_t TileCount(int tile_rows, int tile_cols) const {
    return this->count * TilesOf(this->dy.cols(), tile_rows) * TilesOf(this->x.cols(), tile_cols);
  }
  // Finds the block's tile and returns the sum that it belongs to; nullptr if nothing is added.
  __device__ const GradientSum<Sum>* Find(int tile_rows, int tile_cols, Tile<T, Sum>& tile) const {
    const auto row_tiles = static_cast<unsigned>(TilesOf(this->dy.cols(), tile_rows));
    const auto col_tiles = static_cast<unsigned>(TilesOf(this->x.cols(), tile_cols));
    const GradientSum<Sum>& grad = this->sums[blockIdx.x / col_tiles / row_tiles];
    const int64_t begin = this->segments[grad.first_segment];
    const int64_t end = this->segments[grad.first_segment + this->each];
    if (begin == end && grad.write == Write::kAdd) return nullptr;
    tile = {RowRange(this->dy, begin, end),
            RowRange(this->x, begin, end),
            {grad.sum, this->dy.cols(), this->x.cols()},
            int64_t{blockIdx.x / col_tiles % row_tiles} * tile_rows,
            int64_t{blockIdx.x % col_tiles} * tile_cols,
            grad.write};
    return &grad;
  }
  __device__ Segments Of(const GradientSum<Sum>& grad) const {
    return {this->segments + grad.first_segment, this->each};
  }
};

// launch(product) with ForwardGroups, InputGradientGroups, LeafOf these, or WeightGradients.
// Launches nothing for an output of size zero or without groups.
template <typename T, typename TOut, typename Function>
cudaError_t LaunchGroups(const CudaGroupedGemm<T, TOut>& gemm, Function launch) {
  const auto& [in, offsets, weight, weight_layout, out, taken, spare, leaf] = gemm;
  if (out.rows() == 0 || out.cols() == 0 || weight.count == 0) return cudaSuccess;
  const GroupRows rows = {offsets, out.rows()};
  const auto launch_of = [&, &tree_leaf = leaf](const auto& groups) {
    using Groups = std::decay_t<decltype(groups)>;
    return tree_leaf.parts == 0 ? launch(groups) : launch(LeafOf<Groups>{groups, tree_leaf});
  };
  if (weight_layout == Layout::kPlain) {
    return launch_of(InputGradientGroups<T, TOut>{{in, weight, out, rows}});
  }
  return launch_of(ForwardGroups<T, TOut>{{in, weight, out, rows}});
}
template <typename T, typename TSum, typename Function>
cudaError_t LaunchGroups(const CudaWeightGradients<T, TSum>& gradients, Function launch) {
  if (gradients.dy.cols() == 0 || gradients.x.cols() == 0 || gradients.count == 0) {
    return cudaSuccess;
  }
  return launch(WeightGradients<T, TSum>{gradients});
}

// One block a tile; refuses products with more tiles than a grid has blocks.
template <typename Groups>
cudaError_t LaunchTiles(void (*kernel)(Groups), const Groups& groups, int tile_rows, int tile_cols,
                        int threads, cudaStream_t stream, size_t shared_bytes = 0) {
  const int64_t tiles = groups.TileCount(tile_rows, tile_cols);
  if (tiles > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  return cuda::Launch(kernel, {dim3(static_cast<unsigned>(tiles)), dim3(threads), shared_bytes},
                      stream, groups);
}

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_TILES_CUDA_H_
