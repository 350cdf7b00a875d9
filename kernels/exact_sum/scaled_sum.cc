#include "kernels/exact_sum/scaled_sum.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/exact_sum/exact_sum_op.h"

namespace moe {
namespace {

using exact_sum::kSquaresBlock;

constexpr int64_t kUnitsPerRange = 8;
constexpr int64_t kUnitsPerFork = 256;  // so that their sums fit on the stack

// Units of several rows have at most a block's number of elements; a unit of one row may have more.
double SquaresOfUnit(const ScaledSum& x, const SquaresUnit& unit) {
  float values[kSquaresBlock];
  if (unit.rows > 1) {
    x.ReadRows(unit.begin, unit.rows, unit.cols, unit.stride, values);
    return SumOfSquaresBlock(values, unit.rows * unit.cols);
  }
  double total = 0;
  for (int64_t begin = 0; begin < unit.cols; begin += kSquaresBlock) {
    const int64_t count = std::min(kSquaresBlock, unit.cols - begin);
    x.Read(unit.begin + begin, count, values);
    total += SumOfSquaresBlock(values, count);
  }
  return total;
}

void AddTerm(double term, int64_t* sum) {
  const SquareSumTerm digits = SquareSumTermOf(term);
  if (digits.first < 0) {
    ++sum[kSquareSumDigits];
    return;
  }
  for (int i = 0; i < 3; ++i) {
    if (digits.at[i] == 0) continue;  // also skips digits beyond the last one, which are 0
    sum[digits.first + i] += static_cast<int64_t>(digits.at[i]);
  }
}

}  // namespace

absl::Status ScaledSum::ToFloat(absl::Span<float> out, Stream& stream) const {
  if (is_exact_) return ExactToFloat(grid_, exact_, scale_, out, stream);
  return Scale(float_, static_cast<float>(scale_), out, Write::kOverwrite, stream);
}

void ScaledSum::ReadRows(int64_t begin, int64_t rows, int64_t cols, int64_t stride,
                         float* out) const {
  if (is_exact_) {
    return ExactToFloatRows(exact_.data() + begin, rows, cols, stride,
                            std::ldexp(scale_, grid_.unit_log2), out);
  }
  const auto factor = static_cast<float>(scale_);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[r * cols + c] = float_[begin + r * stride + c] * factor;
  }
}

absl::Status AddSquares(const ScaledSum& x, absl::Span<const SquaresUnit> units, int64_t* sum,
                        Stream& stream) {
  MOE_RETURN_IF_ERROR(x.Check("AddSquares"));
  const auto size = static_cast<int64_t>(units.size());
  if (IsCuda(stream)) {
    return LaunchOn("AddSquares", stream, [&](auto cuda) {
      return x.VisitView([&](auto view) {
        return exact_sum::Run(exact_sum::AddSquares<decltype(view)>{view, units.data(), sum, size},
                              cuda);
      });
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    for (int64_t first = 0; first < size; first += kUnitsPerFork) {
      double terms[kUnitsPerFork];
      const int64_t count = std::min(kUnitsPerFork, size - first);
      threads.For(count, kUnitsPerRange, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u) terms[u] = SquaresOfUnit(x, units[first + u]);
      });
      for (int64_t u = 0; u < count; ++u) {
        AddTerm(terms[u], sum + units[first + u].sum * kSquareSumSize);
      }
    }
    return absl::OkStatus();
  });
}

double SquareSumValue(const int64_t (&sum)[kSquareSumSize]) {
  uint64_t digit[kSquareSumDigits + 1] = {};  // in base 2^32, carried
  for (int i = 0; i < kSquareSumDigits; ++i) {
    const uint64_t carried = digit[i] + static_cast<uint64_t>(sum[i]);
    digit[i] = carried & 0xffffffffu;
    digit[i + 1] = carried >> 32;
  }
  int top = kSquareSumDigits;
  while (top > 2 && digit[top] == 0) --top;
  double value = 0;
  for (int i = top; i > top - 3; --i) {
    value += std::ldexp(static_cast<double>(digit[i]), 32 * i + kSquareSumUnitLog2);
  }
  return value;
}

}  // namespace moe
