#include "kernels/cross_entropy/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/cross_entropy/cross_entropy_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cross_entropy/cross_entropy.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::cross_entropy {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// The largest element. It may ignore NaNs: the sum of exponentials exposes them.
HWY_INLINE float MaxOf(const float* x, int64_t n) {
  const FloatTag d;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  auto max = hn::Set(d, kLowest);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) max = hn::Max(max, LoadLanes(x + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, max));
  for (; i < n; ++i) result = std::max(result, x[i]);
  return result;
}

// sum_i exp(x[i] - max) in the order of FixedSum.
HWY_INLINE float SumOfExp(const float* x, int64_t n, float max) {
  const auto offset = hn::Set(FloatTag(), max);
  return FixedSumOf(n, [&](int64_t i, auto lanes, FloatLanes sum) MOE_LANES {
    return hn::Add(sum, lanes.ZeroBeyond(ExpLanes(hn::Sub(lanes.Load(x + i), offset))));
  });
}

// Computes gradients unless they are null; they may share the logits' memory. Returns the loss.
template <typename T>
float Row(const float* logits, int64_t n, int64_t target, float scale, T* d_logits) {
  const float max = MaxOf(logits, n);
  const float sum = SumOfExp(logits, n, max);
  const float to_target = logits[target] - max;
  const float loss = std::log(sum) - to_target;
  if (d_logits == nullptr) return loss;
  const auto offset = hn::Set(FloatTag(), max);
  const auto factor = hn::Set(FloatTag(), scale / sum);
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    const auto e = ExpLanes(hn::Sub(lanes.Load(logits + i), offset));
    lanes.Store(hn::Mul(e, factor), d_logits + i);
  });
  // The target's own element, rounded once: scale * (p - 1).
  d_logits[target] = T(scale * (std::exp(to_target) / sum - 1.0f));
  return loss;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::cross_entropy
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::cross_entropy {

template <typename T>
void Run(const CrossEntropy<T>& c, ThreadPool& threads) {
  const int64_t vocabulary = c.logits.cols();
  threads.For(c.logits.rows(), RowGrain(vocabulary), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* const d_logits = c.d_logits.data() == nullptr ? nullptr : c.d_logits.row(t);
      c.loss[t] = MOE_SIMD(Row<T>)(c.logits.row(t), vocabulary, c.target[t], c.scale, d_logits);
    }
  });
}

}  // namespace moe::cross_entropy

namespace moe {
namespace {

constexpr const char* kFunction = "CrossEntropy";

absl::Status CheckTargets(absl::Span<const int32_t> target, int64_t vocabulary) {
  for (size_t t = 0; t < target.size(); ++t) {
    if (target[t] >= 0 && target[t] < vocabulary) continue;
    return absl::InvalidArgumentError(absl::StrCat(kFunction, ": target[", t, "] is ", target[t],
                                                   ", expected 0 to ", vocabulary - 1));
  }
  return absl::OkStatus();
}

}  // namespace

template <typename T>
absl::Status CrossEntropy(MatrixView<const float> logits, absl::Span<const int32_t> target,
                          float scale, absl::Span<float> loss, MatrixView<T> d_logits,
                          Stream& stream) {
  const int64_t tokens = logits.rows();
  const int64_t vocabulary = logits.cols();
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "logits", logits, tokens, vocabulary));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "target", target.size(), tokens));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "loss", loss.size(), tokens));
  const bool loss_only = d_logits.data() == nullptr && d_logits.rows() == 0;
  if (!loss_only) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_logits", d_logits, tokens, vocabulary));
  }
  if (!IsCuda(stream)) MOE_RETURN_IF_ERROR(CheckTargets(target, vocabulary));
  return RunOp(kFunction,
               cross_entropy::CrossEntropy<T>{logits, target.data(), scale, loss.data(), d_logits},
               stream);
}

MOE_INSTANTIATE_FOR_STORAGE(CrossEntropy)

}  // namespace moe
#endif  // HWY_ONCE
