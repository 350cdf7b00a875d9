// What multiplies matrices on CUDA devices, and in which order terms are added.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_

#include <cstdint>

#include "kernels/base/tree_cut.h"

namespace moe {

class Cublas;  // gemm_cublas.h

// --grouped-gemm
enum class GroupedGemmKernel : uint8_t {
  kAuto,    // as kMma, but one group of a 16-bit type by cuBLAS where GemmOptions has it
  kCublas,  // cuBLAS, one call a group
  kMma,     // this project's kernels: mma.sync or wgmma for 16-bit types, fmaf for float32
};

// Without cuBLAS the bits of a row depend on that row and its weight alone. With it they may depend
// on the number of rows, too, and the order of terms is the library's. A CPU has one kernel,
// whatever stands here.
struct GemmOptions {
  GroupedGemmKernel kernel = GroupedGemmKernel::kAuto;
  Cublas* cublas = nullptr;  // of the stream that is given with the options; kCublas needs it
};

// The order in which a product adds its terms. One leaf, as by default: one sum of chains over all
// of them. Several: the reduced index is `parts` parts of cut.extent values, one after the other
// (gate and up; q, k and v), each cut alike, and leaf s of a balanced binary tree is such a sum
// over the values of leaf s of part 0, then of part 1, and so on. Every value of part 0 may stand
// for `first_times` (heads of queries that share one of keys): that part is so many times as long.
// grouped_gemm.h has the rest.
struct GemmTree {
  static constexpr int kMaxParts = 3;

  TreeCut cut;
  int parts = 1;
  int64_t first_times = 1;

  constexpr int64_t Times(int part) const { return part == 0 ? first_times : 1; }
  // First value of a part, all of them for part = parts.
  constexpr int64_t Begin(int part) const {
    return part == 0 ? 0 : (first_times + part - 1) * cut.extent;
  }
};

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_
