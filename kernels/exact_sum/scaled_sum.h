// A sum of gradients and the factor that converts it to a gradient.
#ifndef MOE_KERNELS_EXACT_SUM_SCALED_SUM_H_
#define MOE_KERNELS_EXACT_SUM_SCALED_SUM_H_

#include <cmath>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/exact_sum/exact_sum.h"
#include "kernels/exact_sum/square_sum.h"
#include "kernels/exact_sum/sum_view.h"

namespace moe {

// A view: element i is sum[i] * scale, computed as by Scale or ExactToFloat. Operations convert the
// elements as they read them.
class ScaledSum {
 public:
  ScaledSum(absl::Span<const float> sum, double scale) : float_(sum), scale_(scale) {}
  ScaledSum(absl::Span<const int64_t> sum, const ExactGrid& grid, double scale)
      : exact_(sum), grid_(grid), scale_(scale), is_exact_(true) {}

  int64_t size() const { return static_cast<int64_t>(is_exact_ ? exact_.size() : float_.size()); }

  // Errors: kInvalidArgument, as for its grid.
  absl::Status Check(absl::string_view function) const {
    return is_exact_ ? CheckGrid(function, grid_) : absl::OkStatus();
  }

  // `size` elements from `begin` on.
  ScaledSum Part(int64_t begin, int64_t size) const {
    ScaledSum part = *this;
    const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(size);
    if (is_exact_) part.exact_ = exact_.subspan(first, count);
    if (!is_exact_) part.float_ = float_.subspan(first, count);
    return part;
  }
  // visit(SumView), after Check.
  template <typename Visit>
  auto VisitView(Visit visit) const {
    if (!is_exact_) return visit(SumView<float>{float_.data(), static_cast<float>(scale_)});
    return visit(SumView<int64_t>{exact_.data(), std::ldexp(scale_, grid_.unit_log2)});
  }

  // Writes all elements to memory of the stream's device.
  // Errors: kInvalidArgument unless `out` has the same length, and those of the grid.
  absl::Status ToFloat(absl::Span<float> out, Stream& stream) const;

  // Elements [begin, begin + n) of sums in host memory, read immediately. Requires Check.
  void Read(int64_t begin, int64_t n, float* out) const { ReadRows(begin, 1, n, n, out); }
  // The same for rows of `cols` elements, `stride` apart in the sum, dense in `out`.
  void ReadRows(int64_t begin, int64_t rows, int64_t cols, int64_t stride, float* out) const;

 private:
  absl::Span<const float> float_;
  absl::Span<const int64_t> exact_;
  ExactGrid grid_;
  double scale_;
  bool is_exact_ = false;
};

// Adds one term for each unit to its sum, sum[unit.sum][kSquareSumSize]. A term is the sum of the
// squares of the unit's elements in float64, row by row in blocks of 4096 elements, each summed in
// ascending order over 16 interleaved partials folded pairwise, blocks added in ascending order.
// Terms are added exactly: units may be distributed over calls, threads and ranks. On CUDA one
// launch. `units` and `sum` are in memory of the stream's device. Errors: those of the grid.
absl::Status AddSquares(const ScaledSum& x, absl::Span<const SquaresUnit> units, int64_t* sum,
                        Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_SCALED_SUM_H_
