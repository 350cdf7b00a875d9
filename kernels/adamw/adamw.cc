#include "kernels/adamw/adamw.h"

#include <algorithm>
#include <cmath>

#include "kernels/adamw/adamw_op.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kGrain = int64_t{1} << 14;  // elements a range
constexpr int64_t kBlock = 4096;              // gradients that are in cache at a time

adamw::Step StepOf(const AdamWOptions& o) {
  const auto step = static_cast<double>(o.step);
  return {.gradient_scale = o.gradient_scale,
          .beta1 = o.beta1,
          .one_minus_beta1 = 1.0f - o.beta1,
          .beta2 = o.beta2,
          .one_minus_beta2 = 1.0f - o.beta2,
          .correction1 = static_cast<float>(1.0 - std::pow(static_cast<double>(o.beta1), step)),
          .correction2 = static_cast<float>(1.0 - std::pow(static_cast<double>(o.beta2), step)),
          .epsilon = o.epsilon,
          .learning_rate = o.learning_rate};
}

absl::Status CheckSlices(absl::Span<const AdamWSlice> slices, int64_t gradients) {
  int64_t end = 0;
  for (const AdamWSlice& slice : slices) {
    if (slice.first < end || slice.size < 0 || slice.first + slice.size > gradients) {
      return absl::InvalidArgumentError(
          absl::StrCat("AdamW: a slice of gradients [", slice.first, ", ", slice.first + slice.size,
                       "), expected one in [", end, ", ", gradients, ")"));
    }
    end = slice.first + slice.size;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AdamW(const AdamWOptions& options, const ScaledSum& gradients,
                   absl::Span<const AdamWSlice> slices, Workspace& workspace, Stream& stream) {
  MOE_RETURN_IF_ERROR(gradients.Check("AdamW"));
  MOE_RETURN_IF_ERROR(CheckSlices(slices, gradients.size()));
  if (options.step < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("AdamW: step is ", options.step, ", expected >= 1"));
  }
  if (slices.empty()) return absl::OkStatus();
  const adamw::Step step = StepOf(options);
  if (IsCuda(stream)) {
    const WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const auto table, UploadArray(slices, workspace, stream));
    return LaunchOn("AdamW", stream, [&](auto cuda) {
      return gradients.VisitView([&](auto view) {
        return adamw::Run(
            adamw::AdamW<decltype(view)>{.step = step,
                                         .gradients = view,
                                         .slices = table.data(),
                                         .count = std::ssize(table),
                                         .first = slices.front().first,
                                         .end = slices.back().first + slices.back().size},
            cuda);
      });
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    for (const AdamWSlice& slice : slices) {
      threads.For(slice.size, kGrain, [&](int64_t begin, int64_t end) {
        float values[kBlock];
        for (int64_t i = begin; i < end; i += kBlock) {
          const int64_t count = std::min(kBlock, end - i);
          gradients.Read(slice.first + i, count, values);
          adamw::Run(step, values,
                     {.first = 0,
                      .size = count,
                      .weight = slice.weight + i,
                      .m = slice.m + i,
                      .v = slice.v + i,
                      .weight_decay = slice.weight_decay});
        }
      });
    }
    return absl::OkStatus();
  });
}

}  // namespace moe
