// Which SIMD instructions the products run on.
#ifndef MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_
#define MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

namespace moe::gemm {

// The targets with fused multiply-add that may be used on this CPU, best first, and last "EMU128":
// no SIMD, where products run the plain loops of the specification. "AVX3" is AVX-512, "AVX3_BF16"
// the same with dot products of bfloat16. All but "EMU128" have the same bits.
std::vector<std::string> SimdTargets();

// Makes everything that dispatches at run time use `name`, one of SimdTargets(), from now on; ""
// gives the best back. Process-wide, and not while products run.
void UseSimdTarget(absl::string_view name);

// UseSimdTarget of what the environment variable MOE_SIMD names, if it is set: shows what an older
// CPU would do. Programs call it when they start. Errors: InvalidArgument, with the names that this
// CPU has.
absl::Status UseSimdTargetOfEnvironment();
inline constexpr char kSimdVariable[] = "MOE_SIMD";

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_
