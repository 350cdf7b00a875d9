#include "moe/bench/kernel_timing.h"

#include <limits>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe::bench {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Of the timed calls, in order.
struct Samples {
  std::vector<double> time_us;
  std::vector<double> work;
  std::vector<double> limits, shares_pct;  // empty without a limit

  KernelTimes Summary(int64_t wrong) const {
    KernelTimes times{.iterations = static_cast<int64_t>(time_us.size()),
                      .time_us = Describe(time_us),
                      .mean_work = Describe(work).mean,
                      .limit_per_ns = limits.empty() ? kUnknown : Describe(limits).p50,
                      .limit_pct = limits.empty() ? kUnknown : Describe(shares_pct).p50,
                      .wrong = wrong};
    if (times.time_us.p50 > 0) times.work_per_ns = times.mean_work / times.time_us.p50 * 1e-3;
    return times;
  }
};

}  // namespace

absl::StatusOr<KernelTimes> TimeKernel(const TimedKernel& kernel, const KernelLimit& limit,
                                       const MeasureOptions& options, KernelDevice& device) {
  int64_t call = 0;
  for (; call < options.warmup; ++call) {
    MOE_RETURN_IF_ERROR(kernel.prepare(call).status());
    MOE_RETURN_IF_ERROR(kernel.run());
  }
  MOE_RETURN_IF_ERROR(device.stream().Synchronize());
  const bool check = options.check == Check::kYes && kernel.wrong != nullptr;
  int64_t wrong = check ? 0 : -1;
  Samples samples;
  const int64_t begin = MonotonicNs();
  int64_t next_look = options.iterations;
  for (;; ++call) {
    MOE_ASSIGN_OR_RETURN(const double work, kernel.prepare(call));
    if (check && kernel.spoil != nullptr) MOE_RETURN_IF_ERROR(kernel.spoil());
    double most = 0;
    if (limit != nullptr) {
      MOE_ASSIGN_OR_RETURN(most, limit(work));
    }
    MOE_ASSIGN_OR_RETURN(const double ns, device.Time(kernel.run));
    if (check) {
      MOE_ASSIGN_OR_RETURN(const int64_t now, kernel.wrong());
      wrong += now;
    }
    samples.time_us.push_back(ns * 1e-3);
    samples.work.push_back(work);
    if (limit != nullptr) {
      samples.limits.push_back(most);
      samples.shares_pct.push_back(ns > 0 && most > 0 ? 100 * work / ns / most : 0);
    }
    const auto iterations = static_cast<int64_t>(samples.time_us.size());
    if (iterations < options.iterations) continue;
    if (absl::Nanoseconds(MonotonicNs() - begin) >= options.budget) break;
    if (iterations < next_look) continue;
    if (Describe(samples.time_us).cv_pct <= options.max_noise_pct) break;
    next_look = 2 * iterations;
  }
  return samples.Summary(wrong);
}

}  // namespace moe::bench
