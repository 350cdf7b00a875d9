#include "kernels/adamw/adamw.h"

#include <algorithm>
#include <cmath>

#include "kernels/adamw/adamw_op.h"
#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
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
          .learning_rate = o.learning_rate,
          .weight_decay = o.weight_decay};
}

}  // namespace

absl::Status AdamW(const AdamWOptions& options, const ScaledSum& gradient, absl::Span<float> weight,
                   absl::Span<float> m, absl::Span<float> v, Workspace& workspace, Stream& stream) {
  const int64_t n = gradient.size();
  MOE_RETURN_IF_ERROR(CheckLength("AdamW", "weight", weight.size(), n));
  MOE_RETURN_IF_ERROR(CheckLength("AdamW", "m", m.size(), n));
  MOE_RETURN_IF_ERROR(CheckLength("AdamW", "v", v.size(), n));
  MOE_RETURN_IF_ERROR(gradient.Check("AdamW"));
  if (options.step < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("AdamW: step is ", options.step, ", expected >= 1"));
  }
  const adamw::Step step = StepOf(options);
  if (IsCuda(stream)) {
    const WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const absl::Span<const float> values, gradient.ToFloat(workspace, stream));
    return LaunchOn("AdamW", stream, [&](auto cuda) {
      return adamw::Run({.step = step,
                         .gradient = values.data(),
                         .weight = weight.data(),
                         .m = m.data(),
                         .v = v.data(),
                         .n = n},
                        cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(n, kGrain, [&](int64_t begin, int64_t end) {
      float values[kBlock];
      for (int64_t i = begin; i < end; i += kBlock) {
        const int64_t count = std::min(kBlock, end - i);
        gradient.Read(i, count, values);
        adamw::Run({step, values, weight.data() + i, m.data() + i, v.data() + i, count});
      }
    });
    return absl::OkStatus();
  });
}

}  // namespace moe
