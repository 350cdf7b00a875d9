#include "kernels/exact_sum/exact_sum.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/exact_sum/exact_sum_cuda.h"

namespace moe {
namespace {

constexpr int64_t kGrain = int64_t{1} << 15;  // elements a range

}  // namespace

absl::Status CheckGrid(absl::string_view function, const ExactGrid& grid) {
  if (grid.max_terms < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": max_terms is ", grid.max_terms, ", expected >= 1"));
  }
  // Beyond this neither the unit nor its inverse is a normal float64.
  if (grid.unit_log2 < -1000 || grid.unit_log2 > 1000) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": unit_log2 is ", grid.unit_log2, ", expected -1000 to 1000"));
  }
  return absl::OkStatus();
}

absl::Status ExactAccumulate(const ExactGrid& grid, absl::Span<const float> partial,
                             absl::Span<int64_t> sum, Write write, int64_t* non_finite,
                             Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckGrid("ExactAccumulate", grid));
  const auto n = static_cast<int64_t>(partial.size());
  MOE_RETURN_IF_ERROR(CheckLength("ExactAccumulate", "sum", sum.size(), n));
  const double inverse_unit = std::ldexp(1.0, -grid.unit_log2);
  if (IsCuda(stream)) {
    return LaunchOn("ExactAccumulate", stream, [&](auto cuda) {
      return exact_sum::Run(exact_sum::CudaAccumulate{.partial = partial.data(),
                                                      .inverse_unit = inverse_unit,
                                                      .limit = grid.limit(),
                                                      .sum = sum.data(),
                                                      .write = write,
                                                      .non_finite = non_finite,
                                                      .n = n},
                            cuda);
    });
  }
  const SumWrite sum_write = write == Write::kAdd ? SumWrite::kAdd : SumWrite::kOverwrite;
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    std::atomic<int64_t> count = 0;  // integers: the order does not matter
    threads.For(n, kGrain, [&](int64_t begin, int64_t end) {
      const int64_t bad = ExactAccumulateRange(partial.data() + begin, inverse_unit, grid.limit(),
                                               sum_write, sum.data() + begin, end - begin);
      if (bad > 0) count.fetch_add(bad, std::memory_order_relaxed);
    });
    *non_finite += count;
    return absl::OkStatus();
  });
}

absl::Status ExactToFloat(const ExactGrid& grid, absl::Span<const int64_t> sum, double scale,
                          absl::Span<float> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckGrid("ExactToFloat", grid));
  const auto n = static_cast<int64_t>(sum.size());
  MOE_RETURN_IF_ERROR(CheckLength("ExactToFloat", "out", out.size(), n));
  const double factor = std::ldexp(scale, grid.unit_log2);
  if (IsCuda(stream)) {
    return LaunchOn("ExactToFloat", stream, [&](auto cuda) {
      return exact_sum::Run(exact_sum::CudaToFloat{sum.data(), factor, out.data(), n}, cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(n, kGrain, [&](int64_t begin, int64_t end) {
      ExactToFloatRange(sum.data() + begin, factor, out.data() + begin, end - begin);
    });
    return absl::OkStatus();
  });
}

}  // namespace moe
