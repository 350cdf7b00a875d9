// From the ranks' time stamps to the time of a collective, and to who kept whom waiting.
#ifndef MOE_MOE_BENCH_TIMING_H_
#define MOE_MOE_BENCH_TIMING_H_

#include <cstdint>

#include <absl/types/span.h>

#include "moe/bench/statistics.h"

namespace moe::bench {

// One call on one rank, by MonotonicNs (kernels/base/trace.h), which all ranks of a host share.
struct CallStamps {
  int64_t enter_ns = 0;
  int64_t leave_ns = 0;
};

// What R ranks' stamps of n calls say. In call i rank r enters at a[r] and leaves at b[r]; the last
// one enters at A = max a. No collective can end before A, so a rank that entered earlier has
// waited for it; what remains is transfer, with the waits inside of the algorithm:
//   time of r     t[r] = b[r] - a[r]
//   wait of r     w[r] = min(A, b[r]) - a[r]       (min: a sender may leave before a peer enters)
//   time_us       max over r of the mean over i of t[r]
//   samples       per call, max over r of t[r]: what min, median, p99 and cv are of
//   wait_pct      100 * sum w / sum t over all ranks and calls
//   slow_rank     argmax over r of the mean over i of (a[r] + b[r]): the rank that enters and
//                 leaves the latest, together; ties: the lowest
// A barrier stands before every call, so entries differ by what the barrier and the scheduler
// leave.
struct TimingSummary {
  int64_t calls = 0;
  double time_us = 0;
  Statistics samples_us;
  double wait_pct = 0;
  int slow_rank = 0;
};

// stamps [R][n], rank by rank. Where the clocks are of several hosts, enter and leave of different
// ranks do not compare: pass clocks_shared = kNo, which leaves wait_pct NaN and names the rank with
// the longest mean time as the slow one.
enum class ClocksShared : uint8_t { kNo, kYes };
TimingSummary Summarise(absl::Span<const CallStamps> stamps, int ranks,
                        ClocksShared clocks = ClocksShared::kYes);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_TIMING_H_
