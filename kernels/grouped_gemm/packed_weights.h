// Weights in the order in which the CPU's matrix products read them, reused between calls.
#ifndef MOE_KERNELS_GROUPED_GEMM_PACKED_WEIGHTS_H_
#define MOE_KERNELS_GROUPED_GEMM_PACKED_WEIGHTS_H_

#include <cstdint>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/gemm_options.h"

namespace moe {

// A packed copy of one weight [O, K], for forward products. Strip s holds the rows [s * W, (s + 1)
// * W) of the weight, transposed; W is the width of this CPU's register tile (64 with AVX-512, 16
// with AVX2 or NEON). A product reads a strip from front to back, one line of W elements for each
// step k:
//
//           weight                         strip 0                 strip 1
//         k = 0  1  2 ..              o = 0  1  2 .. W-1        o = W W+1 ..
//   o = 0   [ a  b  c ..         k=0 [ a  d  g ..       ]  k=0 [             ]
//   o = 1   [ d  e  f ..    ->   k=1 [ b  e  h ..       ]  k=1 [             ]
//   o = 2   [ g  h  i ..         k=2 [ c  f  i ..       ]  ..
//   ..                           ..                        K-1 [             ]
//
// The last strip is padded with zeros. Elements keep their storage type: a packed weight is as
// large as the weight, and its products have the same bits as the weight's. A line of bfloat16 has
// W pairs, steps 2p and 2p + 1 of each column adjacent, an odd K padded with zeros:
//
//           strip 0 of bfloat16:   p=0 [ a b | d e | g h .. ]   p=1 [ c . | f . | i . .. ]
//
// In the order of tiles a strip is 32 rows of the weight, as gemm_tile_order.h describes, on any
// CPU. Each leaf of a tree begins a tile there: products need the tree that was given to Create.
//
// A layer keeps one for each expert and projection, and calls Pack after each change of its weights
// with the number of that change. Move-only. Used by one host thread at a time.
template <typename T>
class PackedWeights {
 public:
  static constexpr int64_t kNeverPacked = -1;

  // Empty: fits no product. A moved-from object is empty, too.
  PackedWeights() = default;
  PackedWeights(PackedWeights&& other) noexcept { *this = std::move(other); }
  PackedWeights& operator=(PackedWeights&& other) noexcept {
    strips_ = std::move(other.strips_);
    out_features_ = std::exchange(other.out_features_, 0);
    in_features_ = std::exchange(other.in_features_, 0);
    strip_cols_ = std::exchange(other.strip_cols_, 0);
    order_ = other.order_;
    tree_ = other.tree_;
    version_ = std::exchange(other.version_, kNeverPacked);
    return *this;
  }
  // Memory for a weight [out_features, in_features], not packed yet. `order` and `tree`: those of
  // its products; the tree only counts in the order of tiles. kInvalidArgument on negative sizes,
  // kResourceExhausted.
  static absl::StatusOr<PackedWeights> Create(int64_t out_features, int64_t in_features,
                                              BFloat16Order order = BFloat16Order::kDot,
                                              const GemmTree& tree = {});

  // Enqueues the copy of `weight` [O, K], host memory that must stay valid and unchanged, as must
  // this object, until `stream` has passed. Threaded over strips, one pass: reads and writes O * K
  // elements. Errors: kInvalidArgument if the shape differs from Create's or `version` is negative;
  // kUnimplemented on a stream that is not the CPU's.
  absl::Status Pack(MatrixView<const T> weight, int64_t version, Stream& stream);

  // The `version` of the last Pack.
  int64_t version() const { return version_; }
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }
  int64_t bytes() const { return strips_.bytes(); }
  BFloat16Order order() const { return order_; }

  // kInvalidArgument, in the name of `function`, unless this is a weight [O, K] that was packed at
  // `version` for the instructions that products use now, or for tiles and `tree`.
  absl::Status Check(absl::string_view function, int64_t out_features, int64_t in_features,
                     int64_t version, const GemmTree& tree) const;
  // The strips, one after the other: [ceil(O / W) * K, W], K padded; of tiles, a row for each step.
  MatrixView<const T> strips() const;

 private:
  bool is_tiles() const { return order_ == BFloat16Order::kTile; }
  int64_t strip_elements() const;

  Buffer strips_;
  int64_t out_features_ = 0;
  int64_t in_features_ = 0;
  int64_t strip_cols_ = 0;
  BFloat16Order order_ = BFloat16Order::kDot;  // kTile only if T is BFloat16
  GemmTree tree_;                              // of tiles
  int64_t version_ = kNeverPacked;
};

// GroupedGemm and Gemm (grouped_gemm.h) with packed weights: the same bits. CPU only. Weights are
// read in place, once for every 252 rows of their group, in tiles 512; with few rows a product runs
// at memory speed. `version` is the version at which all weights must be packed. They stay valid,
// and are not packed again, until the stream has passed.
// Errors as there; kInvalidArgument also if a weight has another version or shape, or was packed
// for other SIMD instructions, tiles were packed for another tree, or a leaf of BFloat16 begins
// within a pair; kUnimplemented on CUDA.
template <typename T>
absl::Status GroupedGemm(MatrixView<const T> x, absl::Span<const int64_t> offsets,
                         absl::Span<const PackedWeights<T>> weight, int64_t version,
                         MatrixView<T> y, Workspace& workspace, Stream& stream, GemmTree tree = {});
template <typename T, typename TOut = T>
absl::Status Gemm(MatrixView<const T> x, const PackedWeights<T>& weight, int64_t version,
                  MatrixView<TOut> y, Workspace& workspace, Stream& stream, GemmTree tree = {});

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_PACKED_WEIGHTS_H_
