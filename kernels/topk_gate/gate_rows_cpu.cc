#include <algorithm>
#include <cstdint>

#include <absl/container/inlined_vector.h>

#include "kernels/base/highway_targets.h"
#include "kernels/topk_gate/gate_rows.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/gate_rows_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/topk_gate/gate_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE void DivideBy(float sum, int64_t padded, float* row) {
  const auto divisor = hn::Set(FloatTag(), sum);
  for (int64_t e = 0; e < padded; e += kLanes) {
    StoreLanes(hn::Div(LoadLanes(row + e), divisor), row + e);
  }
}

// The scratch of one task.
class Rows {
 public:
  Rows(MatrixView<const float> logits, const SelectExpertsOutput& out)
      : logits_(logits),
        out_(out),
        padded_(PaddedExperts(logits.cols())),
        row_(static_cast<size_t>(padded_)),
        ranking_(logits.cols()) {}

  // Rows [begin, end), at most kRankRows.
  HWY_INLINE void Run(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      ranking_.Add(t - begin, logits_.row(t));
      Score(t);
    }
    ranking_.TakeBest(RowRange(out_.expert, begin, end));
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < out_.expert.cols(); ++j) {
        out_.weight(t, j) = out_.score(t, out_.expert(t, j));
      }
    }
  }

 private:
  HWY_INLINE void Score(int64_t t) {
    const int64_t experts = logits_.cols();
    const bool whole = experts == padded_;
    const float* in = logits_.row(t);
    if (!whole) CopyPadded(in, experts, padded_, row_.data());
    float* const probs = whole ? out_.score.row(t) : row_.data();
    in = whole ? in : row_.data();
    const ExpSum sum = ExpAndSum(in, padded_, probs);
    DivideBy(sum.sum, padded_, probs);
    if (!whole) std::copy_n(probs, experts, out_.score.row(t));
    if (!out_.log_sum_exp.empty()) out_.log_sum_exp[static_cast<size_t>(t)] = LogSumExp(sum);
  }

  const MatrixView<const float> logits_;
  const SelectExpertsOutput& out_;
  const int64_t padded_;
  absl::InlinedVector<float, kMostInlineExperts> row_;  // of experts that do not fill whole vectors
  Ranking ranking_;
};

void SoftmaxRows(MatrixView<const float> logits, const SelectExpertsOutput& out, int64_t begin,
                 int64_t end) {
  Rows rows(logits, out);
  for (int64_t t = begin; t < end; t += kRankRows) rows.Run(t, std::min(end, t + kRankRows));
}

void SelectRows(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                int64_t end) {
  Ranking ranking(value.cols());
  for (int64_t first = begin; first < end; first += kRankRows) {
    const int64_t last = std::min(end, first + kRankRows);
    for (int64_t t = first; t < last; ++t) ranking.Add(t - first, value.row(t));
    ranking.TakeBest(RowRange(expert, first, last));
  }
}

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
  ForLanes(experts, [&](int64_t e, auto lanes) MOE_LANES {
    lanes.Store(AccurateSigmoid(lanes.Load(logits + e)), score + e);
  });
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

// Choices are few: a wider vector would seldom be full.
using ChoiceTag = hn::CappedTag<float, 4>;
constexpr int64_t kChoiceLanes = static_cast<int64_t>(hn::MaxLanes(ChoiceTag()));

HWY_INLINE float SumOf(const float* row, int64_t k) {
  float sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += row[j];
  return sum;
}

// row[j] = row[j] / sum * scale.
HWY_INLINE void DivideAndScale(float sum, float scale, int64_t k, float* row) {
  const ChoiceTag d;
  const auto divisor = hn::Set(d, sum), factor = hn::Set(d, scale);
  int64_t j = 0;
  for (; j + kChoiceLanes <= k; j += kChoiceLanes) {
    hn::StoreU(hn::Mul(hn::Div(hn::LoadU(d, row + j), divisor), factor), d, row + j);
  }
  for (; j < k; ++j) row[j] = row[j] / sum * scale;
}

void WeighRows(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end) {
  const int64_t k = weight.cols();
  for (int64_t t = begin; t < end; ++t) {
    float* const row = weight.row(t);
    const float sum =
        rule.weights == GateWeights::kNormalised ? SumOf(row, k) + rule.epsilon : 1.0f;
    DivideAndScale(sum == 0 ? 1.0f : sum, rule.scale, k, row);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

void SoftmaxTopKCpu(MatrixView<const float> logits, const SelectExpertsOutput& out, int64_t begin,
                    int64_t end) {
  MOE_SIMD(SoftmaxRows)(logits, out, begin, end);
}

void TopKSelectCpu(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                   int64_t end) {
  MOE_SIMD(SelectRows)(value, expert, begin, end);
}

void SigmoidScoresCpu(MatrixView<const float> logits, MatrixView<float> score,
                      absl::Span<float> log_sum_exp, int64_t begin, int64_t end) {
  MOE_SIMD(ScoreRows)(logits, score, log_sum_exp, begin, end);
}

void WeighRowsCpu(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end) {
  if (rule.weights == GateWeights::kScores && rule.scale == 1) return;
  MOE_SIMD(WeighRows)(weight, rule, begin, end);
}

}  // namespace moe
#endif  // HWY_ONCE
