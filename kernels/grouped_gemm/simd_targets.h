// Choice of the SIMD instructions of the products.
#ifndef MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_
#define MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "kernels/grouped_gemm/gemm_options.h"

namespace moe::gemm {

// The targets with fused multiply-add that may be used on this CPU, best first, and last "EMU128":
// no SIMD, where products run the plain loops of the specification. "AVX3" is AVX-512, "AVX3_BF16"
// is AVX-512 with dot products of bfloat16, before it only where they are measured to be faster
// than multiply-adds. "AVX3_AMX" has tiles, and dot products where they are. All but "EMU128" have
// the same bits.
std::vector<std::string> SimdTargets();

// The order of bfloat16 products that is fastest on this CPU: tiles where it has AMX, and neither
// the kernel nor MOE_SIMD forbids it.
BFloat16Order FastestBFloat16Order();

// Makes everything that dispatches at run time use `name`, one of SimdTargets(), from now on; ""
// restores the best. Process-wide; not while products run.
void UseSimdTarget(absl::string_view name);

// UseSimdTarget of the environment variable MOE_SIMD, if it is set: emulates an older CPU. Programs
// call it when they start. Errors: InvalidArgument, with the names that this CPU supports.
absl::Status UseSimdTargetOfEnvironment();
inline constexpr char kSimdVariable[] = "MOE_SIMD";

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_SIMD_TARGETS_H_
