#include "kernels/topk_gate/sigmoid_scores_cpu.h"

#include <cstdint>

#include <absl/container/inlined_vector.h>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/sigmoid_scores_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/topk_gate/gate_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

// n / d with e = exp(-|x|), d = 1 + e and n = e below 0, otherwise 1: nothing overflows, and small
// scores keep their digits. The plain quotient q is off by up to 2.3 ulp: 1 ulp of e may be 2 of q,
// and the rounding of d adds up to 1. What d lost is exactly e - (d - 1); it moves the quotient by
// -q lost / d, in which 1 - q (below 0) or q is 1 / d.
HWY_INLINE FloatLanes AccurateSigmoid(FloatLanes x) {
  const auto zero = hn::Zero(FloatTag()), one = hn::Set(FloatTag(), 1.0f);
  const auto e = ExpLanes(hn::Neg(hn::Abs(x)));
  const auto d = hn::Add(one, e);
  const auto lost = hn::Sub(e, hn::Sub(d, one));
  const auto below = hn::Lt(x, zero);
  const auto q = hn::Div(hn::IfThenElse(below, e, one), d);
  const auto reciprocal = hn::IfThenElse(below, hn::Sub(one, q), q);
  return hn::NegMulAdd(hn::Mul(q, lost), reciprocal, q);
}

HWY_INLINE void ScoreRow(const float* logits, int64_t experts, float* score) {
  int64_t e = 0;
  for (; e + kLanes <= experts; e += kLanes) {
    StoreLanes(AccurateSigmoid(LoadLanes(logits + e)), score + e);
  }
  if (e == experts) return;
  StoreFirst(AccurateSigmoid(LoadFirst(logits + e, experts - e)), score + e, experts - e);
}

void ScoreRows(MatrixView<const float> logits, MatrixView<float> score,
               absl::Span<float> log_sum_exp, int64_t begin, int64_t end) {
  const int64_t experts = logits.cols();
  for (int64_t t = begin; t < end; ++t) ScoreRow(logits.row(t), experts, score.row(t));
  if (log_sum_exp.empty()) return;
  const int64_t padded = PaddedExperts(experts);
  absl::InlinedVector<float, kMostInlineExperts> row(static_cast<size_t>(padded));
  for (int64_t t = begin; t < end; ++t) {
    CopyPadded(logits.row(t), experts, padded, row.data());
    log_sum_exp[static_cast<size_t>(t)] = LogSumExp(ExpAndSum(row.data(), padded, row.data()));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(ScoreRows);

void SigmoidScoresCpu(MatrixView<const float> logits, MatrixView<float> score,
                      absl::Span<float> log_sum_exp, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(ScoreRows)(logits, score, log_sum_exp, begin, end);
}

}  // namespace moe
#endif  // HWY_ONCE
