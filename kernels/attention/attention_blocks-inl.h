// The three products of attention, on blocks of kBlockRows queries. Compiled once per SIMD target.
//
// Every element is one chain of fused multiply-adds in ascending order of its sum's index, from 0:
// its bits depend neither on the block it falls into nor on the width of a vector.
#if defined(MOE_KERNELS_ATTENTION_ATTENTION_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_ATTENTION_ATTENTION_BLOCKS_INL_H_
#undef MOE_KERNELS_ATTENTION_ATTENTION_BLOCKS_INL_H_
#else
#define MOE_KERNELS_ATTENTION_ATTENTION_BLOCKS_INL_H_
#endif

#include "kernels/base/simd-inl.h"
#include "kernels/base/tensor_view.h"
#if HWY_TARGET != HWY_SCALAR  // has no vectors to transpose
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
constexpr int64_t kTranspose = 1;
HWY_INLINE void TransposeSquare(const float* from, int64_t, float* to, int64_t) {
  *to = *from;
}
#else
using ::moe::gemm::HWY_NAMESPACE::kTranspose;
using ::moe::gemm::HWY_NAMESPACE::TransposeSquare;
#endif

// Queries a block, and keys a panel in vectors: 8 x 2 accumulators where there are 32 registers,
// 4 x 2 where there are 16.
constexpr int64_t kBlockRows = kLanes == 1 ? 2 : HWY_TARGET == HWY_AVX2 ? 4 : 8;
constexpr int64_t kPanelVectors = 2;
constexpr int64_t kPanelKeys = kPanelVectors * kLanes;

// rows [n, D] -> float32 [n, stride], columns beyond D zero.
template <typename T>
HWY_INLINE void PackRows(MatrixView<const T> rows, int64_t stride, float* packed) {
  const int64_t depth = rows.cols();
  for (int64_t j = 0; j < rows.rows(); ++j) {
    const T* const in = rows.row(j);
    float* const out = packed + j * stride;
    int64_t d = 0;
    for (; d + kLanes <= depth; d += kLanes) StoreLanes(LoadLanes(in + d), out + d);
    if (d < depth) {
      StoreLanes(LoadFirst(in + d, depth - d), out + d);
      d += kLanes;
    }
    for (; d < stride; d += kLanes) StoreLanes(hn::Zero(FloatTag()), out + d);
  }
}

// rows [n, D] -> panels of kPanelKeys rows, each transposed to [D, kPanelKeys]; rows beyond n zero.
// `block` is scratch for kTranspose rows of `stride`: those are converted as they lie in memory and
// transposed in registers.
template <typename T>
HWY_INLINE void PackPanels(MatrixView<const T> rows, int64_t stride, float* block, float* panels) {
  const int64_t depth = rows.cols();
  const int64_t whole = depth / kTranspose * kTranspose;
  for (int64_t first = 0; first < rows.rows(); first += kPanelKeys) {
    float* const panel = panels + first * depth;
    for (int64_t j = 0; j < kPanelKeys; j += kTranspose) {
      const int64_t begin = std::min(first + j, rows.rows());
      const int64_t count = std::min(kTranspose, rows.rows() - begin);
      PackRows(RowRange(rows, begin, begin + count), stride, block);
      std::fill(block + count * stride, block + kTranspose * stride, 0.0f);
      for (int64_t d = 0; d < whole; d += kTranspose) {
        TransposeSquare(block + d, stride, panel + d * kPanelKeys + j, kPanelKeys);
      }
      for (int64_t d = whole; d < depth; ++d) {
        for (int64_t i = 0; i < kTranspose; ++i) {
          panel[d * kPanelKeys + j + i] = block[i * stride + d];
        }
      }
    }
  }
}

// products[r, j] = sum_d block[r, d] * key[j, d] for the panels that hold keys [0, keys).
HWY_INLINE void MultiplyPanels(const float* block, int64_t block_stride, const float* panels,
                               int64_t depth, int64_t keys, float* products, int64_t stride) {
  for (int64_t j = 0; j < keys; j += kPanelKeys) {
    const float* const panel = panels + j * depth;
    FloatLanes sum[kBlockRows][kPanelVectors];
    MOE_UNROLL for (auto& row : sum) {
      MOE_UNROLL for (auto& v : row) v = hn::Zero(FloatTag());
    }
    for (int64_t d = 0; d < depth; ++d) {
      FloatLanes key[kPanelVectors];
      MOE_UNROLL for (int64_t v = 0; v < kPanelVectors; ++v) {
        key[v] = LoadLanes(panel + d * kPanelKeys + v * kLanes);
      }
      MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
        const auto x = hn::Set(FloatTag(), block[r * block_stride + d]);
        MOE_UNROLL for (int64_t v = 0; v < kPanelVectors; ++v) {
          sum[r][v] = hn::MulAdd(x, key[v], sum[r][v]);
        }
      }
    }
    MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
      MOE_UNROLL for (int64_t v = 0; v < kPanelVectors; ++v) {
        StoreLanes(sum[r][v], products + r * stride + j + v * kLanes);
      }
    }
  }
}

// out[r, c] = sum over j <= first + r of weight[r, j] * rows[j, c], for kVectors vectors of
// columns.
template <int64_t kVectors>
HWY_INLINE void WeightedRows(const float* weight, int64_t weight_stride, const float* rows,
                             int64_t row_stride, int64_t first, float* out) {
  FloatLanes sum[kBlockRows][kVectors];
  MOE_UNROLL for (auto& row : sum) {
    MOE_UNROLL for (auto& v : row) v = hn::Zero(FloatTag());
  }
  // Keys that every query of the block sees.
  for (int64_t j = 0; j <= first; ++j) {
    FloatLanes x[kVectors];
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      x[v] = LoadLanes(rows + j * row_stride + v * kLanes);
    }
    MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::MulAdd(w, x[v], sum[r][v]);
      }
    }
  }
  // The triangle on the diagonal: key first + i is seen by queries i and later.
  MOE_UNROLL for (int64_t i = 1; i < kBlockRows; ++i) {
    FloatLanes x[kVectors];
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      x[v] = LoadLanes(rows + (first + i) * row_stride + v * kLanes);
    }
    MOE_UNROLL for (int64_t r = i; r < kBlockRows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + first + i]);
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::MulAdd(w, x[v], sum[r][v]);
      }
    }
  }
  MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      StoreLanes(sum[r][v], out + r * row_stride + v * kLanes);
    }
  }
}

// sums[j, c] += sum over r with first + r >= j of weight[r, j] * block[r, c], r ascending, for
// kVectors vectors of columns and keys [0, first + rows).
template <int64_t kVectors>
HWY_INLINE void AddWeightedBlock(const float* weight, int64_t weight_stride, const float* block,
                                 int64_t stride, int64_t first, int64_t rows, float* sums) {
  FloatLanes x[kBlockRows][kVectors];
  MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      x[r][v] = LoadLanes(block + r * stride + v * kLanes);
    }
  }
  const int64_t full = rows == kBlockRows ? first + 1 : 0;
  for (int64_t j = 0; j < full; ++j) {
    FloatLanes sum[kVectors];
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      sum[v] = LoadLanes(sums + j * stride + v * kLanes);
    }
    MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) sum[v] = hn::MulAdd(w, x[r][v], sum[v]);
    }
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      StoreLanes(sum[v], sums + j * stride + v * kLanes);
    }
  }
  if (full > 0) {
    // The triangle on the diagonal: key first + i is seen by queries i and later.
    MOE_UNROLL for (int64_t i = 1; i < kBlockRows; ++i) {
      const int64_t j = first + i;
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        float* const out = sums + j * stride + v * kLanes;
        auto sum = LoadLanes(out);
        MOE_UNROLL for (int64_t r = i; r < kBlockRows; ++r) {
          const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
          sum = hn::MulAdd(w, x[r][v], sum);
        }
        StoreLanes(sum, out);
      }
    }
    return;
  }
  // A last block with fewer rows.
  for (int64_t j = 0; j < first + rows; ++j) {
    for (int64_t r = std::max<int64_t>(0, j - first); r < rows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
      for (int64_t v = 0; v < kVectors; ++v) {
        float* const sum = sums + j * stride + v * kLanes;
        StoreLanes(hn::MulAdd(w, LoadLanes(block + r * stride + v * kLanes), LoadLanes(sum)), sum);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_BLOCKS_INL_H_
