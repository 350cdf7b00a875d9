// Answers each line of its input with the speed of a loop of multiply-adds in registers, or for
// "bf16" of the instructions of bfloat16 products, over about 10 ms: shows whether other programs
// use the core, and the limit of products. Reports the rate by the wall clock, and by the CPU
// clock, which excludes time that the core is given to others.
#include "kernels/grouped_gemm/fma_peak.h"

#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <string>

#include <absl/status/status.h>

#include "kernels/grouped_gemm/simd_targets.h"

int main() {
  using Clock = std::chrono::steady_clock;
  if (const absl::Status status = moe::gemm::UseSimdTargetOfEnvironment(); !status.ok()) {
    std::fprintf(stderr, "fma_peak: %s\n", status.ToString().c_str());
    return 2;
  }
  moe::gemm::RunFma(400'000);  // the clock frequency may only rise now
  for (std::string line; std::getline(std::cin, line);) {
    const auto begin = Clock::now();
    const std::clock_t cpu_begin = std::clock();
    constexpr int64_t kSteps = 4'000'000;
    const double operations =
        line == "bf16" ? moe::gemm::RunBFloat16Peak(moe::gemm::FastestBFloat16Order(), kSteps)
                       : moe::gemm::RunFma(kSteps);
    const double cpu = static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
    const std::chrono::duration<double> wall = Clock::now() - begin;
    std::printf("{\"gflops_per_s\":%.2f,\"gflops_per_cpu_s\":%.2f}\n",
                operations / wall.count() / 1e9, operations / cpu / 1e9);
    std::fflush(stdout);
  }
  return 0;
}
