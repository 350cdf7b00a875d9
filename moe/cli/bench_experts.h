// moe bench gate, permute, combine, gemm and layer.
#ifndef MOE_MOE_CLI_BENCH_EXPERTS_H_
#define MOE_MOE_CLI_BENCH_EXPERTS_H_

#include <absl/status/status.h>

#include "moe/cli/bench_options.h"
#include "moe/cli/launch.h"

namespace moe::cli {

// Measure, print and judge. Wrong elements and --fail-if carry exit code 1.
absl::Status RunGemmBench(const BenchCall& call, const Launch& launch);
absl::Status RunKernelBench(const BenchCall& call, const Launch& launch);
absl::Status RunLayerBench(const BenchCall& call, const Launch& launch);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_EXPERTS_H_
