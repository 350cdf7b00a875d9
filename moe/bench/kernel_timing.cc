#include "moe/bench/kernel_timing.h"

#include <algorithm>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe::bench {

void SpoilBytes(absl::Span<std::byte> result) {
  std::fill(result.begin(), result.end(), std::byte{0xFF});
}

absl::StatusOr<KernelTimes> TimeKernel(const TimedKernel& kernel,
                                       absl::FunctionRef<double(double work)> limit,
                                       const MeasureOptions& options) {
  int64_t call = 0;
  for (; call < options.warmup; ++call) {
    kernel.prepare(call);
    MOE_RETURN_IF_ERROR(kernel.run());
  }
  const bool check = options.check == Check::kYes && kernel.wrong != nullptr;
  KernelTimes times{.wrong = check ? 0 : -1};
  std::vector<double> us, limits, shares;
  double all_work = 0;
  const int64_t begin = MonotonicNs();
  int64_t next_look = options.iterations;
  for (;; ++call) {
    const double work = kernel.prepare(call);
    if (check && kernel.spoil != nullptr) kernel.spoil();
    const double most = limit(work);
    const int64_t start = MonotonicNs();
    MOE_RETURN_IF_ERROR(kernel.run());
    const auto ns = static_cast<double>(MonotonicNs() - start);
    if (check) times.wrong += kernel.wrong();
    us.push_back(ns * 1e-3);
    limits.push_back(most);
    shares.push_back(ns > 0 && most > 0 ? 100 * work / ns / most : 0);
    all_work += work;
    times.iterations = static_cast<int64_t>(us.size());
    if (times.iterations < options.iterations) continue;
    if (absl::Nanoseconds(MonotonicNs() - begin) >= options.budget) break;
    if (times.iterations < next_look) continue;
    if (Describe(us).cv_pct <= options.max_noise_pct) break;
    next_look = 2 * times.iterations;
  }
  times.time_us = Describe(us);
  times.mean_work = all_work / static_cast<double>(times.iterations);
  times.work_per_ns = times.time_us.p50 > 0 ? times.mean_work / times.time_us.p50 * 1e-3 : 0;
  times.limit_per_ns = Describe(limits).p50;
  times.limit_pct = Describe(shares).p50;
  return times;
}

}  // namespace moe::bench
