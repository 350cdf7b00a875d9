// Times a kernel against what the machine can do at that moment.
#ifndef MOE_MOE_BENCH_KERNEL_TIMING_H_
#define MOE_MOE_BENCH_KERNEL_TIMING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/bench/collectives.h"
#include "moe/bench/statistics.h"

namespace moe::bench {

// `call` counts from 0, those before the timed ones included; prepare comes before every run. Around
// a timed run that is checked, spoil comes between prepare and run, and wrong after it.
struct TimedKernel {
  std::function<double(int64_t call)> prepare;  // returns the work: operations or bytes
  std::function<absl::Status()> run;            // what is timed; done when it returns
  std::function<int64_t()> wrong;               // elements of the result; empty: nothing is known
  // Makes the whole result wrong, so that what a run leaves out is not right from the run before.
  std::function<void()> spoil = nullptr;
};

// One kernel with its data.
struct KernelCase {
  std::string pass, kernel;
  TimedKernel timed;
  absl::Span<std::byte> result;  // what run writes last; tests plant faults here
};

// The kernels of a benchmark, and the data that they share.
class KernelCases {
 public:
  virtual ~KernelCases() = default;
  const std::vector<KernelCase>& cases() const { return cases_; }

 protected:
  std::vector<KernelCase> cases_;
};

// All bits 1: NaN in float32 and bf16, -1 in whole numbers.
void SpoilBytes(absl::Span<std::byte> result);

struct KernelTimes {
  int64_t iterations = 0;
  Statistics time_us;
  double mean_work = 0;     // of a call
  double work_per_ns = 0;   // mean work / median time: GFLOP/s or GB/s
  double limit_per_ns = 0;  // median over calls
  double limit_pct = 0;     // median over calls of the ratio to the limit measured just before
  int64_t wrong = -1;       // over timed calls; -1: not checked
};

// `limit(work)` measures, before every call, how much of such work a ns has room for, so that both
// see the same clock and the same neighbours. Calls go on as MeasureOptions says.
absl::StatusOr<KernelTimes> TimeKernel(const TimedKernel& kernel,
                                       absl::FunctionRef<double(double work)> limit,
                                       const MeasureOptions& options);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_KERNEL_TIMING_H_
