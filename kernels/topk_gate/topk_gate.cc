#include "kernels/topk_gate/topk_gate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_launch_cuda.h"
#include "kernels/topk_gate/topk_gate_cpu.h"
#include "kernels/topk_gate/topk_select_cpu.h"
#include "kernels/topk_gate/weigh_rows_cpu.h"

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

}  // namespace moe
