#include "kernels/topk_gate/topk_gate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_row.h"
#include "kernels/topk_gate/gate_rows.h"

namespace moe {
namespace {

absl::Status CheckArguments(const MatrixView<const float>& logits, const TopKGateOutput& out) {
  const auto shape = [](const auto& m) {
    return absl::StrCat("[", m.rows(), ", ", m.cols(), "]");
  };
  const int64_t rows = logits.rows();
  const int64_t experts = logits.cols();
  const int64_t k = out.expert.cols();
  if (experts < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("TopKGate: logits are ", shape(logits), ", expected at least one expert"));
  }
  MOE_RETURN_IF_ERROR(CheckSelection("TopKGate", k, experts));
  if (out.probs.rows() != rows || out.probs.cols() != experts || out.expert.rows() != rows ||
      out.value.rows() != rows || out.value.cols() != k) {
    return absl::InvalidArgumentError(absl::StrCat(
        "TopKGate: probs ", shape(out.probs), ", expert ", shape(out.expert), ", value ",
        shape(out.value), ", expected [T, E], [T, K], [T, K] with logits ", shape(logits)));
  }
  if (!out.log_sum_exp.empty() && out.log_sum_exp.size() != static_cast<size_t>(rows)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "TopKGate: log_sum_exp holds ", out.log_sum_exp.size(), ", expected 0 or ", rows));
  }
  if (out.count.size() != static_cast<size_t>(experts)) {
    return absl::InvalidArgumentError(
        absl::StrCat("TopKGate: count holds ", out.count.size(), ", expected ", experts));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSelection(absl::string_view function, int64_t k, int64_t experts) {
  if (k < 1 || k > experts) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": k is ", k, ", expected 1 .. ", experts, " (the experts)"));
  }
  constexpr int64_t kMost = int64_t{1} << kExpertIdBits;
  if (experts <= kMost) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": ", experts, " experts, expected at most ", kMost));
}

ExpSum ExpSumReference(const float* row, int64_t experts) {
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < experts; ++e) max = row[e] > max ? row[e] : max;
  std::array<float, 16> partial{};
  for (int64_t e = 0; e < experts; ++e) {
    partial[static_cast<size_t>(e % 16)] += std::exp(row[e] - max);
  }
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) partial[j] += partial[j + half];
  }
  return {.max = max, .sum = partial[0]};
}

void TopKSelectReference(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                         int64_t end) {
  const auto experts = static_cast<int32_t>(value.cols());
  for (int64_t t = begin; t < end; ++t) {
    const float* const row = value.row(t);
    int32_t* const taken = expert.row(t);
    for (int64_t j = 0; j < expert.cols(); ++j) {
      int32_t best = -1;
      for (int32_t e = 0; e < experts; ++e) {
        if (std::find(taken, taken + j, e) != taken + j) continue;
        if (best < 0 || RanksBefore(row[e], e, row[best], best)) best = e;
      }
      taken[j] = best;
    }
  }
}

void TopKGateReference(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                       int64_t end) {
  TopKSelectReference(logits, out.expert, begin, end);
  for (int64_t t = begin; t < end; ++t) {
    const ExpSum sum = ExpSumReference(logits.row(t), logits.cols());
    if (!out.log_sum_exp.empty()) out.log_sum_exp[static_cast<size_t>(t)] = LogSumExp(sum);
    for (int64_t e = 0; e < logits.cols(); ++e) {
      out.probs(t, e) = std::exp(logits(t, e) - sum.max) / sum.sum;
    }
    for (int64_t j = 0; j < out.expert.cols(); ++j) {
      out.value(t, j) = out.probs(t, out.expert(t, j));
    }
  }
}

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

absl::Status LaunchGate(absl::string_view function, const topk_gate::CudaGate<float>& gate,
                        Stream& stream) {
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(function, "E (experts)", gate.logits.cols(), topk_gate::kMaxExperts));
  MOE_RETURN_IF_ERROR(CheckCudaLimit(function, "k", gate.expert.cols(), topk_gate::kMaxTopK));
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(function, "num_groups", gate.rule.num_groups, topk_gate::kMaxGroups));
  return LaunchOn(function, stream, [&](auto cuda) { return topk_gate::Run(gate, cuda); });
}

absl::Status TopKGate(MatrixView<const float> logits, const TopKGateOutput& out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckArguments(logits, out));
  if (IsCuda(stream)) {
    return LaunchGate("TopKGate",
                      {.logits = logits,
                       .score = out.probs,
                       .expert = out.expert,
                       .weight = out.value,
                       .log_sum_exp = out.log_sum_exp.empty() ? nullptr : out.log_sum_exp.data(),
                       .count = out.count.data()},
                      stream);
  }
  return stream.Enqueue([logits, out, &threads = stream.threads()] {
    threads.For(logits.rows(), kGateRowsPerTask,
                [&](int64_t begin, int64_t end) { TopKGateCpu(logits, out, begin, end); });
    CountSelected(out.expert, out.count);
    return absl::OkStatus();
  });
}

absl::Status TopKSelect(MatrixView<const float> value, MatrixView<int32_t> expert, Stream& stream) {
  constexpr const char* kFunction = "TopKSelect";
  const int64_t experts = value.cols();
  const int64_t k = expert.cols();
  MOE_RETURN_IF_ERROR(CheckSelection(kFunction, k, experts));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "value", value, value.rows(), experts));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "expert", expert, value.rows(), k));
  if (IsCuda(stream)) {
    return LaunchGate(kFunction, {.logits = value, .expert = expert}, stream);
  }
  return stream.Enqueue([value, expert, &threads = stream.threads()] {
    threads.For(value.rows(), kGateRowsPerTask,
                [&](int64_t begin, int64_t end) { TopKSelectCpu(value, expert, begin, end); });
    return absl::OkStatus();
  });
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
