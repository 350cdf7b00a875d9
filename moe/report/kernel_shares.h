// What kernels reach of their machine's limit, from the rows of moe bench gate, permute, combine
// and gemm.
#ifndef MOE_MOE_REPORT_KERNEL_SHARES_H_
#define MOE_MOE_REPORT_KERNEL_SHARES_H_

#include <string>

#include <absl/types/span.h>

#include "moe/report/rows.h"

namespace moe::report {

// A bar per kernel, of its largest size: percent of a copy's bandwidth, or of the rate of
// multiply-adds. Empty without such rows.
std::string KernelShares(absl::Span<const Run> runs);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_KERNEL_SHARES_H_
