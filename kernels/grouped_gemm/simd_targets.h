// Which SIMD instructions the products run on, for tests and benchmarks.
#ifndef MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_
#define MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_

#include <string>
#include <vector>

#include <absl/strings/string_view.h>

namespace moe::gemm {

// The targets with fused multiply-add that this CPU has, best first, and last "EMU128": no SIMD,
// where products run the plain loops of the specification. "AVX3" is AVX-512, "AVX3_BF16" the same
// with dot products of bfloat16.
std::vector<std::string> SimdTargets();

// Makes everything that dispatches at run time use `name`, one of SimdTargets(), from now on; ""
// gives the best back. Process-wide, and not while products run.
void UseSimdTarget(absl::string_view name);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_
