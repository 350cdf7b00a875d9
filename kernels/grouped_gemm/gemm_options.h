// What multiplies matrices on CUDA devices.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_

#include <cstdint>

namespace moe {

class Cublas;  // gemm_cublas.h

// --grouped-gemm
enum class GroupedGemmKernel : uint8_t {
  kAuto,    // as kMma, but one group of a 16-bit type by cuBLAS where GemmOptions has it
  kCublas,  // cuBLAS, one call a group
  kMma,     // this project's kernels: mma.sync for 16-bit types, chains of fmaf for float32
};

// Without cuBLAS the bits of a row depend on that row and its weight alone. With it they may depend
// on the number of rows, too, and the order of terms is the library's. A CPU has one kernel,
// whatever stands here.
struct GemmOptions {
  GroupedGemmKernel kernel = GroupedGemmKernel::kAuto;
  Cublas* cublas = nullptr;  // of the stream that is given with the options; kCublas needs it
};

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_
