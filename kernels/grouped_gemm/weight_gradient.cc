#include "kernels/grouped_gemm/weight_gradient.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <type_traits>
#include <vector>

#include <absl/strings/str_cat.h>

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/gemm_task.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe {
namespace {

constexpr char kName[] = "AddWeightGradients";

// Sums larger than any core's share of a third-level cache.
constexpr int64_t kStreamedBytes = int64_t{8} << 20;

absl::Status Check(int64_t rows, int64_t elements, const GroupOffsets& segments,
                   absl::Span<const GradAccumulator> grads) {
  const auto count = static_cast<int64_t>(segments.size()) - 1;
  const auto groups = static_cast<int64_t>(grads.size());
  const auto fits = [rows](absl::Span<const int64_t> host) {
    return host.empty() ||
           (host.front() >= 0 && host.back() <= rows && std::is_sorted(host.begin(), host.end()));
  };
  if (count < groups || groups == 0 || count % groups != 0 || !fits(segments.host())) {
    return absl::InvalidArgumentError(absl::StrCat(
        kName, ": ", segments.size(), " segment offsets for ", groups, " weights and ", rows,
        " rows, expected a multiple of the weights and 1, ascending from 0 or more to ", rows,
        " or less"));
  }
  for (const GradAccumulator& grad : grads) {
    MOE_RETURN_IF_ERROR(CheckLength(kName, "grad", static_cast<size_t>(grad.size()), elements));
    if (grad.exact()) MOE_RETURN_IF_ERROR(CheckGrid(kName, grad.grid()));
  }
  return absl::OkStatus();
}

// How the first partial of a sum is written: bypassing the cache if nothing adds to it before the
// sums of all weights, which do not fit there, have been written.
SumWrite FirstWrite(const GradAccumulator& grad, size_t partials, int64_t bytes_of_all) {
  if (grad.NextWrite() == Write::kAdd) return SumWrite::kAdd;
  return partials == 1 && bytes_of_all >= kStreamedBytes ? SumWrite::kStreamed
                                                         : SumWrite::kOverwrite;
}

// The product for one weight, over its rows [segments.front(), segments.back()). Its own offsets
// are in `workspace`.
template <typename T>
absl::StatusOr<gemm::Problem<T, float>> ProblemOf(MatrixView<const T> dy, MatrixView<const T> x,
                                                  absl::Span<const int64_t> segments,
                                                  const GradAccumulator& grad, int64_t bytes_of_all,
                                                  BFloat16Order order, Workspace& workspace) {
  gemm::Problem<T, float> problem = {.a = RowRange(dy, segments.front(), segments.back()),
                                     .b = RowRange(x, segments.front(), segments.back()),
                                     .c = {nullptr, dy.cols(), x.cols()},
                                     .a_layout = gemm::Layout::kTransposed,
                                     .order = order};
  if (!grad.exact()) {
    problem.c = {grad.float_sum().data(), dy.cols(), x.cols()};
    problem.write = grad.NextWrite();
    return problem;
  }
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> cuts,
                       workspace.Array<int64_t>(static_cast<int64_t>(segments.size())));
  size_t count = 0;
  cuts[count++] = 0;
  for (const int64_t row : segments.subspan(1)) {
    const int64_t step = row - segments.front();
    if (step > cuts[count - 1]) cuts[count++] = step;  // empty ones are skipped
  }
  problem.exact = {.sum = {grad.exact_sum().data(), dy.cols(), x.cols()},
                   .write = FirstWrite(grad, count - 1, bytes_of_all),
                   .segments = cuts.subspan(0, count),
                   .inverse_unit = std::ldexp(1.0, -grad.grid().unit_log2),
                   .limit = grad.grid().limit(),
                   .tally = grad.tally()};
  return problem;
}

template <typename T>
absl::Status RunOnCpu(MatrixView<const T> dy, MatrixView<const T> x,
                      absl::Span<const int64_t> segments, absl::Span<const GradAccumulator> grads,
                      BFloat16Order order, Workspace& workspace, Stream& stream) {
  const Workspace::Mark mark = workspace.mark();
  MOE_ASSIGN_OR_RETURN(
      const auto problems,
      (workspace.Array<gemm::Problem<T, float>>(static_cast<int64_t>(grads.size()))));
  const size_t each = (segments.size() - 1) / grads.size();
  const int64_t bytes = dy.cols() * x.cols() * std::ssize(grads) * int64_t{sizeof(int64_t)};
  size_t count = 0;
  for (size_t g = 0; g < grads.size(); ++g) {
    const auto mine = segments.subspan(g * each, each + 1);
    if (mine.front() == mine.back()) continue;
    MOE_ASSIGN_OR_RETURN(problems[count++],
                         ProblemOf(dy, x, mine, grads[g], bytes, order, workspace));
  }
  return gemm::Run<T, float>(problems.subspan(0, count), mark, workspace, stream);
}

// Runs one product after the other; exact sums via a float32 partial.
template <typename T>
absl::Status RunOnCublas(MatrixView<const T> dy, MatrixView<const T> x,
                         absl::Span<const int64_t> segments,
                         absl::Span<const GradAccumulator> grads, Workspace& workspace,
                         Stream& stream, Cublas& cublas) {
  const size_t each = (segments.size() - 1) / grads.size();
  for (size_t g = 0; g < grads.size(); ++g) {
    const size_t partials = grads[g].exact() ? each : 1, step = each / partials;
    for (size_t s = 0; s < partials; ++s) {
      const int64_t begin = segments[g * each + s * step],
                    end = segments[g * each + (s + 1) * step];
      if (begin == end) continue;
      MOE_RETURN_IF_ERROR(grads[g].Add(
          [&](absl::Span<float> out, Write write) {
            const gemm::Problem<T, float> problem = {.a = RowRange(dy, begin, end),
                                                     .b = RowRange(x, begin, end),
                                                     .c = {out.data(), dy.cols(), x.cols()},
                                                     .a_layout = gemm::Layout::kTransposed,
                                                     .write = write};
            return cublas.Multiply(kName, problem, stream);
          },
          workspace, stream));
    }
  }
  return absl::OkStatus();
}

gemm::GradientSum<float> SumOf(const GradAccumulator& grad, int64_t first_segment, float) {
  return {grad.float_sum().data(), grad.NextWrite(), first_segment};
}
gemm::GradientSum<int64_t> SumOf(const GradAccumulator& grad, int64_t first_segment, int64_t) {
  return {grad.exact_sum().data(), grad.NextWrite(),
          first_segment,           std::ldexp(1.0, -grad.grid().unit_log2),
          grad.grid().limit(),     grad.tally()};
}

// One launch for all weights: the device knows which have rows.
template <typename T, typename TSum>
absl::Status RunOnDevice(MatrixView<const T> dy, MatrixView<const T> x,
                         const GroupOffsets& segments, absl::Span<const GradAccumulator> grads,
                         Workspace& workspace, Stream& stream, int spare) {
  const WorkspaceScope scope(workspace);
  const int64_t each = (static_cast<int64_t>(segments.size()) - 1) / std::ssize(grads);
  std::vector<gemm::GradientSum<TSum>> sums;
  for (const GradAccumulator& grad : grads) {
    sums.push_back(SumOf(grad, std::ssize(sums) * each, TSum()));
  }
  absl::Span<const int64_t> cuts = segments.device();
  if (cuts.empty()) {
    MOE_ASSIGN_OR_RETURN(cuts, UploadArray(segments.host(), workspace, stream));
  }
  MOE_ASSIGN_OR_RETURN(const auto to, UploadArray(absl::MakeConstSpan(sums), workspace, stream));
  const gemm::CudaWeightGradients<T, TSum> gradients = {
      dy, x, cuts.data(), each, to.data(), std::ssize(sums), spare};
  return LaunchOn(kName, stream, [&](auto cuda) {
    if constexpr (std::is_same_v<T, float>) {
      return gemm::RunFma(gradients, cuda);
    } else {
      if (gemm::TakesWgmma(gradients)) return gemm::RunWgmma(gradients, cuda);
      return gemm::RunMma(gradients, cuda);
    }
  });
}

}  // namespace

template <typename T>
absl::Status AddWeightGradients(MatrixView<const T> dy, MatrixView<const T> x,
                                const GroupOffsets& segments,
                                absl::Span<const GradAccumulator> grads, Workspace& workspace,
                                Stream& stream, GemmOptions options) {
  MOE_RETURN_IF_ERROR(CheckShape(kName, "x", x, dy.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(Check(dy.rows(), dy.cols() * x.cols(), segments, grads));
  if (!IsCuda(stream)) {
    return RunOnCpu(dy, x, segments.host(), grads, options.bfloat16_order, workspace, stream);
  }
  MOE_ASSIGN_OR_RETURN(const bool takes_cublas, TakesCublas<T>(kName, options, 1, dy.rows()));
  if (takes_cublas) {
    if (!segments.known_to_host()) {
      return absl::InvalidArgumentError(
          absl::StrCat(kName, ": cuBLAS multiplies, expected offsets that the host knows"));
    }
    return RunOnCublas(dy, x, segments.host(), grads, workspace, stream, *options.cublas);
  }
  const int spare = options.spare_multiprocessors();
  return grads.front().exact()
             ? RunOnDevice<T, int64_t>(dy, x, segments, grads, workspace, stream, spare)
             : RunOnDevice<T, float>(dy, x, segments, grads, workspace, stream, spare);
}

MOE_INSTANTIATE_FOR_STORAGE(AddWeightGradients)

}  // namespace moe
