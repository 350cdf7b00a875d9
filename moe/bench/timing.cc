#include "moe/bench/timing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/base/status_macros.h"

namespace moe::bench {
namespace {

constexpr double kMicroseconds = 1e-3;  // of a nanosecond

}  // namespace

TimingSummary Summarise(absl::Span<const CallStamps> stamps, int ranks, ClocksShared clocks) {
  MOE_CHECK(ranks > 0 && stamps.size() % static_cast<size_t>(ranks) == 0);
  const auto calls = static_cast<int64_t>(stamps.size()) / ranks;
  TimingSummary summary{.calls = calls};
  if (calls == 0) return summary;
  const auto at = [&](int r, int64_t i) -> const CallStamps& {
    return stamps[r * calls + i];
  };
  // Integers until the end: sums of time stamps are large, their differences small.
  std::vector<int64_t> time(ranks, 0);      // sum over calls of t[r]
  std::vector<int64_t> lateness(ranks, 0);  // sum over calls of a[r] + b[r], from the first entry
  std::vector<double> samples;
  int64_t waited = 0;
  for (int64_t i = 0; i < calls; ++i) {
    int64_t first = at(0, i).enter_ns;
    int64_t last = first;
    int64_t longest = 0;
    for (int r = 0; r < ranks; ++r) {
      first = std::min(first, at(r, i).enter_ns);
      last = std::max(last, at(r, i).enter_ns);
      longest = std::max(longest, at(r, i).leave_ns - at(r, i).enter_ns);
    }
    for (int r = 0; r < ranks; ++r) {
      const CallStamps& call = at(r, i);
      time[r] += call.leave_ns - call.enter_ns;
      lateness[r] += (call.enter_ns - first) + (call.leave_ns - first);
      waited += std::min(last, call.leave_ns) - call.enter_ns;
    }
    samples.push_back(static_cast<double>(longest) * kMicroseconds);
  }
  int64_t total = 0;
  for (const int64_t t : time) total += t;
  const bool shared = clocks == ClocksShared::kYes;
  const std::vector<int64_t>& blame = shared ? lateness : time;
  summary.slow_rank =
      static_cast<int>(std::max_element(blame.begin(), blame.end()) - blame.begin());
  summary.time_us = static_cast<double>(*std::max_element(time.begin(), time.end())) /
                    static_cast<double>(calls) * kMicroseconds;
  summary.samples_us = Describe(samples);
  summary.wait_pct = total > 0 ? 100 * static_cast<double>(waited) / static_cast<double>(total) : 0;
  if (!shared) summary.wait_pct = std::numeric_limits<double>::quiet_NaN();
  return summary;
}

}  // namespace moe::bench
