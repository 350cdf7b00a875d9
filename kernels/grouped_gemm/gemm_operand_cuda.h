// Operands of float32 products on CUDA devices: how tiles come to shared memory, and from there to
// the threads that multiply.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_OPERAND_CUDA_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_OPERAND_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"

namespace moe::gemm::fma {

constexpr int kOwned = 8;  // rows and columns of the output that a thread owns
constexpr int kTileDepth = 16;
constexpr int kChunk = 4;  // elements of a copy, and steps of depth that are read at once

using Vector = cuda::Elements<float, kChunk>;

// An operand's tiles: kOuter rows or columns of the output, whose depth runs along the operand's
// rows (kDepthAlongRows) or down its columns. In shared memory they have the operand's layout.
// Copied by kCopiers threads, read by warps of which kLanes lanes own different elements. Depth:
// WholeDepth, or LeafParts, whose terms are looked up for each chunk.
template <bool kDepthAlongRows, int kOuter, int kCopiers, int kLanes, class Depth>
class Operand {
 public:
  static constexpr int kTileChunks = kOuter * kTileDepth / kChunk;

  // Begins with the tile at step `depth`.
  __device__ Operand(MatrixView<const float> m, int64_t outer, int64_t depth, int copier,
                     const Depth& depths)
      : row_(copier / kRowChunks),
        chunk_(copier % kRowChunks),
        row_step_(kRowStep * m.stride()),
        depths_(depths),
        step_(depth) {
    if (Depth::kHasParts) depth = kDepthAlongRows ? -chunk_ * kChunk : -row_;
    const int64_t row = (kDepthAlongRows ? outer : depth) + row_;
    const int64_t column = (kDepthAlongRows ? depth : outer) + chunk_ * kChunk;
    from_ = m.data() + row * m.stride() + column;
    aligned_ = cuda::RowsAlignedTo(m, cuda::kVectorBytes);
    const int64_t beyond = kDepthAlongRows ? m.rows() - row : m.cols() - column;
    constexpr int kMost = kDepthAlongRows ? kOwnChunks * kRowStep : kChunk;
    left_ = beyond < 0 ? 0 : static_cast<int>(cuda::Min(beyond, int64_t{kMost}));
  }

  // Begins to fetch the next tile, of which the chain has the first `steps` steps, if any. What is
  // beyond the matrix or the chain keeps its value.
  __device__ void Fetch(int steps, Vector* tile, cuda::AsyncCopies& copies) {
    Vector* const to = tile + row_ * kRowChunks + (chunk_ ^ (kDepthAlongRows ? Mix(row_) : 0));
    const bool whole = aligned_ && steps >= kTileDepth && (kDepthAlongRows || left_ % kChunk == 0);
    if constexpr (Depth::kHasParts) {
      FetchTerms(steps, to, copies);
    } else if (whole) {
      MOE_UNROLL
      for (int i = 0; i < kOwnChunks; ++i) {
        if (kDepthAlongRows ? i * kRowStep >= left_ : left_ == 0) continue;
        copies.Copy(reinterpret_cast<cuda::Chunk*>(to + i * kRowStep * kRowChunks),
                    from_ + i * row_step_, cuda::kVectorBytes);
      }
    } else if (steps > 0) {
      FetchPart(steps, to, copies);
    }
    Skip(kTileDepth);
  }
  // Goes on to another chain.
  __device__ void Skip(int steps) {
    if constexpr (Depth::kHasParts) {
      step_ += steps;
      return;
    }
    from_ += kDepthAlongRows ? int64_t{steps} : steps / kRowStep * row_step_;
  }

  // Element i of a lane, among kOuter.
  __device__ static int Outer(int first, int lane, int i) {
    return kDepthAlongRows ? first + i * kLanes + lane
                           : first + (i / kChunk * kLanes + lane) * kChunk + i % kChunk;
  }

  // Reads kChunk steps of depth of a lane's elements.
  __device__ static void Read(const Vector* tile, int first, int lane, int step,
                              float (&to)[kChunk][kOwned]) {
    if constexpr (kDepthAlongRows) {
      const Vector* const row = tile + (first + lane) * kRowChunks;
      MOE_UNROLL
      for (int i = 0; i < kOwned; ++i) {
        // what depends on the lane is the same for all tiles
        const int chunk = (step / kChunk ^ Mix(i * kLanes)) ^ Mix(lane);
        const Vector read = cuda::Load<kChunk>(row[i * kLanes * kRowChunks + chunk].at);
        MOE_UNROLL
        for (int s = 0; s < kChunk; ++s) to[s][i] = read.at[s];
      }
    } else {
      const Vector* const from = tile + step * kRowChunks + first / kChunk + lane;
      MOE_UNROLL
      for (int s = 0; s < kChunk; ++s) {
        MOE_UNROLL
        for (int i = 0; i < kOwned; i += kChunk) {
          const Vector read = cuda::Load<kChunk>(from[s * kRowChunks + i / kChunk * kLanes].at);
          MOE_UNROLL
          for (int j = 0; j < kChunk; ++j) to[s][i + j] = read.at[j];
        }
      }
    }
  }

 private:
  static constexpr int kRowChunks = (kDepthAlongRows ? kTileDepth : kOuter) / kChunk;
  static constexpr int kOwnChunks = kTileChunks / kCopiers;
  static constexpr int kRowStep = kCopiers / kRowChunks;  // between chunks of a thread
  // Chunk c of a row is stored as c ^ Mix(row) if the depth runs along rows: the same chunk of
  // neighbouring rows is in different banks.
  __device__ static constexpr int Mix(int row) { return row / 2 % 4; }
  static_assert(!kDepthAlongRows || (kRowChunks == 4 && Mix(kRowStep) == 0));
  static_assert(kDepthAlongRows || kOwnChunks * kRowStep == kTileDepth);

  __device__ void FetchPart(int steps, Vector* to, cuda::AsyncCopies& copies) const {
    MOE_NO_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      const bool there = kDepthAlongRows ? i * kRowStep < left_ : row_ + i * kRowStep < steps;
      const int elements = cuda::Min(kDepthAlongRows ? steps - chunk_ * kChunk : left_, kChunk);
      if (!there || elements <= 0) continue;
      Vector& vector = to[i * kRowStep * kRowChunks];
      const float* const from = from_ + i * row_step_;
      if (aligned_) {
        copies.Copy(reinterpret_cast<cuda::Chunk*>(&vector), from, elements * int{sizeof(float)});
        continue;
      }
      Vector single = {};
      MOE_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        if (j < elements) single.at[j] = from[j];
      }
      cuda::StoreShared(single, vector.at);
    }
  }

  // Fetch, of the terms of a leaf: `from_` is at the first of all terms.
  __device__ void FetchTerms(int steps, Vector* to, cuda::AsyncCopies& copies) const {
    MOE_NO_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      const int step = kDepthAlongRows ? chunk_ * kChunk : row_ + i * kRowStep;
      const bool there = step < steps && (!kDepthAlongRows || i * kRowStep < left_);
      const int elements = kDepthAlongRows ? cuda::Min(steps - step, kChunk) : left_;
      if (!there || elements <= 0) continue;
      Vector& vector = to[i * kRowStep * kRowChunks];
      const int64_t term = step_ + step, at = depths_.At(term);
      const float* const from =
          kDepthAlongRows ? from_ + i * row_step_ : from_ + at * (row_step_ / kRowStep);
      const auto element = [&](int j) {
        return kDepthAlongRows ? from + depths_.At(term + j) : from + j;
      };
      const bool together =
          !kDepthAlongRows ||
          (at % kChunk == 0 && depths_.At(term + elements - 1) == at + elements - 1);
      if (aligned_ && together) {
        copies.Copy(reinterpret_cast<cuda::Chunk*>(&vector), element(0),
                    elements * int{sizeof(float)});
        continue;
      }
      Vector single = {};
      MOE_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        if (j < elements) single.at[j] = *element(j);
      }
      cuda::StoreShared(single, vector.at);
    }
  }

  int row_, chunk_;  // in the tile, of the first chunk that this thread copies
  const float* from_;
  int64_t row_step_;
  Depth depths_;
  int64_t step_;  // of a leaf: the term at which the next tile begins
  bool aligned_;
  int left_;  // rows from there on if the depth runs along rows, else columns: at most a chunk's
};

}  // namespace moe::gemm::fma

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_OPERAND_CUDA_H_
