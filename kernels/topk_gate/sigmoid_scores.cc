#include "kernels/topk_gate/sigmoid_scores.h"

#include <cmath>
#include <cstdint>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_launch_cuda.h"
#include "kernels/topk_gate/sigmoid_scores_cpu.h"
#include "kernels/topk_gate/topk_gate_cpu.h"

namespace moe {

void SigmoidScoresReference(MatrixView<const float> logits, MatrixView<float> score,
                            absl::Span<float> log_sum_exp, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t e = 0; e < logits.cols(); ++e) {
      // The exponential of a float may overflow to infinity, whose reciprocal is 0 as it should be.
      score(t, e) = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logits(t, e)))));
    }
    if (log_sum_exp.empty()) continue;
    log_sum_exp[static_cast<size_t>(t)] = LogSumExp(ExpSumReference(logits.row(t), logits.cols()));
  }
}

absl::Status SigmoidScores(MatrixView<const float> logits, MatrixView<float> score,
                           absl::Span<float> log_sum_exp, Stream& stream) {
  constexpr const char* kFunction = "SigmoidScores";
  if (logits.cols() < 1) {
    return absl::InvalidArgumentError(absl::StrCat(kFunction, ": logits are [", logits.rows(), ", ",
                                                   logits.cols(),
                                                   "], expected at least one expert"));
  }
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "logits", logits, logits.rows(), logits.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "score", score, logits.rows(), logits.cols()));
  if (!log_sum_exp.empty()) {
    MOE_RETURN_IF_ERROR(CheckLength(kFunction, "log_sum_exp", log_sum_exp.size(), logits.rows()));
  }
  if (IsCuda(stream)) {
    return LaunchGate(kFunction,
                      {.logits = logits,
                       .rule = {.score = ScoreFunction::kSigmoid},
                       .score = score,
                       .log_sum_exp = log_sum_exp.empty() ? nullptr : log_sum_exp.data()},
                      stream);
  }
  return stream.Enqueue([=, &threads = stream.threads()] {
    threads.For(logits.rows(), kGateRowsPerTask, [&](int64_t begin, int64_t end) {
      SigmoidScoresCpu(logits, score, log_sum_exp, begin, end);
    });
    return absl::OkStatus();
  });
}

}  // namespace moe
