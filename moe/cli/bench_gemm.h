// moe bench gemm.
#ifndef MOE_MOE_CLI_BENCH_GEMM_H_
#define MOE_MOE_CLI_BENCH_GEMM_H_

#include <absl/status/status.h>

#include "moe/cli/bench_options.h"
#include "moe/cli/launch.h"

namespace moe::cli {

// Measures, prints and judges. Wrong elements and --fail-if carry exit code 1.
absl::Status RunGemmBench(const BenchCall& call, const Launch& launch);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_GEMM_H_
