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

constexpr int64_t kBlocksPerRange = 8;
constexpr int64_t kBlocksPerFork = 256;  // so that their sums fit on the stack

double SquaresOfBlock(const ScaledSum& x, int64_t block) {
  float values[kSquaresBlock];
  const int64_t begin = block * kSquaresBlock, count = std::min(kSquaresBlock, x.size() - begin);
  x.Read(begin, count, values);
  return SumOfSquaresBlock(values, count);
}

}  // namespace

absl::Status ScaledSum::ToFloat(absl::Span<float> out, Stream& stream) const {
  if (is_exact_) return ExactToFloat(grid_, exact_, scale_, out, stream);
  return Scale(float_, static_cast<float>(scale_), out, Write::kOverwrite, stream);
}

absl::StatusOr<absl::Span<const float>> ScaledSum::ToFloat(Workspace& workspace,
                                                           Stream& stream) const {
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> out, workspace.Array<float>(size()));
  MOE_RETURN_IF_ERROR(ToFloat(out, stream));
  return out;
}

void ScaledSum::Read(int64_t begin, int64_t n, float* out) const {
  if (is_exact_) {
    return ExactToFloatRange(exact_.data() + begin, std::ldexp(scale_, grid_.unit_log2), out, n);
  }
  const auto factor = static_cast<float>(scale_);
  for (int64_t i = 0; i < n; ++i) out[i] = float_[begin + i] * factor;
}

absl::Status SumOfSquares(const ScaledSum& x, double* result, Workspace& workspace,
                          Stream& stream) {
  MOE_RETURN_IF_ERROR(x.Check("SumOfSquares"));
  const int64_t blocks = exact_sum::SquaresBlocks(x.size());
  if (IsCuda(stream)) {
    const WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const absl::Span<const float> values, x.ToFloat(workspace, stream));
    MOE_ASSIGN_OR_RETURN(const absl::Span<double> sums, workspace.Array<double>(blocks));
    return LaunchOn("SumOfSquares", stream, [&](auto cuda) {
      return exact_sum::Run(exact_sum::SumOfSquares{values.data(), sums.data(), result, x.size()},
                            cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    double total = 0;
    for (int64_t first = 0; first < blocks; first += kBlocksPerFork) {
      double sums[kBlocksPerFork];
      const int64_t count = std::min(kBlocksPerFork, blocks - first);
      threads.For(count, kBlocksPerRange, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) sums[b] = SquaresOfBlock(x, first + b);
      });
      for (int64_t b = 0; b < count; ++b) total += sums[b];
    }
    *result = total;
    return absl::OkStatus();
  });
}

}  // namespace moe
