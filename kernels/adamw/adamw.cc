#include "kernels/adamw/adamw.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/adamw/adamw_op.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/adamw/adamw.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

struct State {
  FloatLanes weight, m, v;
};

HWY_INLINE FloatLanes Constant(float x) {
  return hn::Set(FloatTag(), x);
}

HWY_INLINE State Update(const adamw::Step& s, float weight_decay, FloatLanes gradient, State x) {
  const auto g = hn::Mul(Constant(s.gradient_scale), gradient);
  const auto m = hn::Add(hn::Mul(Constant(s.beta1), x.m), hn::Mul(Constant(s.one_minus_beta1), g));
  const auto v =
      hn::Add(hn::Mul(Constant(s.beta2), x.v), hn::Mul(Constant(s.one_minus_beta2), hn::Mul(g, g)));
  const auto root = hn::Sqrt(hn::Div(v, Constant(s.correction2)));
  const auto direction =
      hn::Div(hn::Div(m, Constant(s.correction1)), hn::Add(root, Constant(s.epsilon)));
  const auto change = hn::Mul(Constant(s.learning_rate),
                              hn::Add(direction, hn::Mul(Constant(weight_decay), x.weight)));
  return {hn::Sub(x.weight, change), m, v};
}

// Updates the elements of `s`, whose gradients are at `gradient`, in the order of operations of
// AdamW's header. Without fused multiply-add, so that the bits are the same on every SIMD target.
// The arguments are passed by value, so that no store can change what is read next. Returns whether
// all new values are finite: 0 times a value that is not finite is NaN. Only w and v are tested: an
// m that is not finite makes its weight non-finite.
bool Compute(adamw::Step step, const float* gradient, AdamWSlice s) {
  FloatLanes check = Constant(0);
  ForLanes(s.size, [&](int64_t i, auto lanes) MOE_LANES {
    const State x = Update(step, s.weight_decay, lanes.Load(gradient + i),
                           {lanes.Load(s.weight + i), lanes.Load(s.m + i), lanes.Load(s.v + i)});
    lanes.Store(x.weight, s.weight + i);
    lanes.Store(x.m, s.m + i);
    lanes.Store(x.v, s.v + i);
    check = hn::MulAdd(lanes.ZeroBeyond(x.weight), Constant(0), check);
    check = hn::MulAdd(lanes.ZeroBeyond(x.v), Constant(0), check);
  });
  return FoldLanes(FloatTag(), check) == 0;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
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

void AddNonFinite(const AdamWSlice& s, int64_t* non_finite) {
  if (non_finite == nullptr) return;
  int64_t count = 0;
  for (int64_t i = 0; i < s.size; ++i) {
    count += std::isfinite(s.weight[i]) && std::isfinite(s.v[i]) ? 0 : 1;
  }
  std::atomic_ref<int64_t>(*non_finite).fetch_add(count, std::memory_order_relaxed);
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
                                         .end = slices.back().first + slices.back().size,
                                         .non_finite = options.non_finite},
            cuda);
      });
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads, non_finite = options.non_finite] {
    for (const AdamWSlice& slice : slices) {
      threads.For(slice.size, kGrain, [&](int64_t begin, int64_t end) {
        float values[kBlock];
        for (int64_t i = begin; i < end; i += kBlock) {
          const int64_t count = std::min(kBlock, end - i);
          gradients.Read(slice.first + i, count, values);
          const AdamWSlice part = {.first = 0,
                                   .size = count,
                                   .weight = slice.weight + i,
                                   .m = slice.m + i,
                                   .v = slice.v + i,
                                   .weight_decay = slice.weight_decay};
          if (!MOE_SIMD(Compute)(step, values, part)) AddNonFinite(part, non_finite);
        }
      });
    }
    return absl::OkStatus();
  });
}

}  // namespace moe
#endif  // HWY_ONCE
