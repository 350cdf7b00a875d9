#include "kernels/exact_sum/exact_sum.h"

#include <atomic>
#include <cmath>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/exact_sum/exact_sum_op.h"

namespace moe {
namespace exact_sum {

constexpr int64_t kGrain = int64_t{1} << 15;  // elements a range

void Run(const Accumulate& a, ThreadPool& threads) {
  const SumWrite write = a.write == Write::kAdd ? SumWrite::kAdd : SumWrite::kOverwrite;
  std::atomic<int64_t> count = 0;  // integers: the order does not matter
  threads.For(a.n, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t bad = ExactAccumulateRange(a.partial + begin, a.inverse_unit, a.limit, write,
                                             a.sum + begin, end - begin);
    if (bad > 0) count.fetch_add(bad, std::memory_order_relaxed);
  });
  *a.non_finite += count;
}

void Run(const ToFloat& t, ThreadPool& threads) {
  threads.For(t.n, kGrain, [&](int64_t begin, int64_t end) {
    ExactToFloatRange(t.sum + begin, t.factor, t.out + begin, end - begin);
  });
}

}  // namespace exact_sum

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
  return RunOp("ExactAccumulate",
               exact_sum::Accumulate{.partial = partial.data(),
                                     .inverse_unit = std::ldexp(1.0, -grid.unit_log2),
                                     .limit = grid.limit(),
                                     .sum = sum.data(),
                                     .write = write,
                                     .non_finite = non_finite,
                                     .n = n},
               stream);
}

absl::Status ExactToFloat(const ExactGrid& grid, absl::Span<const int64_t> sum, double scale,
                          absl::Span<float> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckGrid("ExactToFloat", grid));
  const auto n = static_cast<int64_t>(sum.size());
  MOE_RETURN_IF_ERROR(CheckLength("ExactToFloat", "out", out.size(), n));
  return RunOp("ExactToFloat",
               exact_sum::ToFloat{sum.data(), std::ldexp(scale, grid.unit_log2), out.data(), n},
               stream);
}

}  // namespace moe
