// SIMD version of the softmax gate.
#include "kernels/topk_gate/topk_gate_cpu.h"

#include <algorithm>
#include <cstdint>

#include <absl/container/inlined_vector.h>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/topk_gate_cpu.cc"
#include <hwy/foreach_target.h>  // compiles this file once per SIMD target
// After foreach_target.h.
#include "kernels/topk_gate/gate_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::HWY_NAMESPACE {  // NOLINT(readability-identifier-naming): Highway's own name
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
  Rows(MatrixView<const float> logits, const TopKGateOutput& out)
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
        out_.value(t, j) = out_.probs(t, out_.expert(t, j));
      }
    }
  }

 private:
  HWY_INLINE void Score(int64_t t) {
    const int64_t experts = logits_.cols();
    const bool whole = experts == padded_;
    const float* in = logits_.row(t);
    if (!whole) CopyPadded(in, experts, padded_, row_.data());
    float* const probs = whole ? out_.probs.row(t) : row_.data();
    in = whole ? in : row_.data();
    const ExpSum sum = ExpAndSum(in, padded_, probs);
    DivideBy(sum.sum, padded_, probs);
    if (!whole) std::copy_n(probs, experts, out_.probs.row(t));
    if (!out_.log_sum_exp.empty()) out_.log_sum_exp[static_cast<size_t>(t)] = LogSumExp(sum);
  }

  const MatrixView<const float> logits_;
  const TopKGateOutput& out_;
  const int64_t padded_;
  absl::InlinedVector<float, kMostInlineExperts> row_;  // of experts that do not fill whole vectors
  Ranking ranking_;
};

void GateRows(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
              int64_t end) {
  Rows rows(logits, out);
  for (int64_t t = begin; t < end; t += kRankRows) rows.Run(t, std::min(end, t + kRankRows));
}

}  // namespace
}  // namespace moe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(GateRows);

void TopKGateCpu(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                 int64_t end) {
  HWY_DYNAMIC_DISPATCH(GateRows)(logits, out, begin, end);
}

}  // namespace moe
#endif  // HWY_ONCE
