#include "benchmarks/kernel_group.h"

#include <algorithm>
#include <cstring>

#include "comm/copy.h"
#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace moe::measure {

absl::Status CopyLimit::Reserve(double bytes) {
  const auto half = static_cast<int64_t>(bytes / 2) + 1;
  MOE_ASSIGN_OR_RETURN(from_, Buffer::Allocate(half, device_.memory(), "the copy's source"));
  MOE_ASSIGN_OR_RETURN(to_, Buffer::Allocate(half, device_.memory(), "the copy"));
  // Pages that were never written map to one page of zeros, which is cheaper to read.
  if (device_.is_cpu()) std::memset(from_.data(), 1, half);
  return absl::OkStatus();
}

KernelLimit CopyLimit::Of(double bytes) {
  return {.name = "copy", .unit = "gbytes_per_s", .work = bytes, .measure = [this, bytes] {
            return Measure(static_cast<int64_t>(bytes / 2));
          }};
}

absl::StatusOr<double> CopyLimit::Measure(int64_t bytes) {
  ThreadPool& pool = device_.threads();
  const int64_t grain = std::max<int64_t>(1, (bytes + pool.threads() - 1) / pool.threads());
  double fastest = 0;
  for (const CopyHint hint : {CopyHint::kCached, CopyHint::kStreamed}) {
    const auto copy = [&]() -> absl::Status {
      if (!device_.is_cpu()) return device_.stream().CopyBytes(from_.data(), to_.data(), bytes);
      pool.For(bytes, grain, [&](int64_t begin, int64_t end) {
        CopyBytes(to_.data() + begin, from_.data() + begin, end - begin, hint);
      });
      return absl::OkStatus();
    };
    MOE_ASSIGN_OR_RETURN(const double ns, device_.Time(copy));
    fastest = std::max(fastest, 2 * static_cast<double>(bytes) / ns);
    if (!device_.is_cpu()) break;  // a GPU's copies have no cache hints
  }
  return fastest;
}

}  // namespace moe::measure
