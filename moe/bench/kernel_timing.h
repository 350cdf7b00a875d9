// Times a kernel against what the machine can do at that moment.
#ifndef MOE_MOE_BENCH_KERNEL_TIMING_H_
#define MOE_MOE_BENCH_KERNEL_TIMING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/bench/collectives.h"
#include "moe/bench/kernel_device.h"
#include "moe/bench/statistics.h"

namespace moe::bench {

// `call` counts from 0, those before the timed ones included; prepare comes before every run.
// Around a timed run that is checked, spoil comes between prepare and run, and wrong after it.
struct TimedKernel {
  // Returns the work: operations or bytes.
  std::function<absl::StatusOr<double>(int64_t call)> prepare;
  std::function<absl::Status()> run;  // what is timed; enqueues
  // Elements of the result; empty: nothing is known.
  std::function<absl::StatusOr<int64_t>()> wrong;
  // Makes the whole result wrong, so that what a run leaves out is not right from the run before.
  std::function<absl::Status()> spoil = nullptr;
};

// One kernel with its data.
struct KernelCase {
  std::string pass, kernel;
  TimedKernel timed;
  absl::Span<std::byte> result;  // what run writes last, on the device; tests plant faults here
};

// The kernels of a benchmark, and the data that they share.
class KernelCases {
 public:
  virtual ~KernelCases() = default;
  const std::vector<KernelCase>& cases() const { return cases_; }

 protected:
  std::vector<KernelCase> cases_;
};

// Cases<T>, set up, with T the spec's type. Errors: kInvalidArgument in the name of `function` for
// types other than float32, bfloat16 and float16; what Cases<T>::Setup says.
template <template <typename> class Cases, typename Spec>
absl::StatusOr<std::unique_ptr<KernelCases>> MakeCases(absl::string_view function, const Spec& spec,
                                                       KernelDevice& device) {
  if (!IsStorageType(spec.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": type ", moe::NameOf(spec.dtype), ", expected f32, bf16 or f16"));
  }
  return WithStorageType(spec.dtype,
                         [&]<typename T>(T) -> absl::StatusOr<std::unique_ptr<KernelCases>> {
                           auto cases = std::make_unique<Cases<T>>(spec, device);
                           MOE_RETURN_IF_ERROR(cases->Setup());
                           return cases;
                         });
}

struct KernelTimes {
  int64_t iterations = 0;
  Statistics time_us;
  double mean_work = 0;     // of a call
  double work_per_ns = 0;   // mean work / median time: GFLOP/s or GB/s
  double limit_per_ns = 0;  // median over calls; NaN: unknown
  double limit_pct = 0;     // median over calls of the ratio to the limit measured just before
  int64_t wrong = -1;       // over timed calls; -1: not checked
};

// How much of such work a ns has room for. Empty: nobody knows.
using KernelLimit = std::function<absl::StatusOr<double>(double work)>;

// The limit is measured before every call, so that both see the same clock and the same neighbours.
// Calls go on as MeasureOptions says.
absl::StatusOr<KernelTimes> TimeKernel(const TimedKernel& kernel, const KernelLimit& limit,
                                       const MeasureOptions& options, KernelDevice& device);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_KERNEL_TIMING_H_
