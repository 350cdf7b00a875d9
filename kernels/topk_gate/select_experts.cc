#include "kernels/topk_gate/select_experts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include <absl/container/fixed_array.h>
#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_rows.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe {
namespace {

constexpr char kSelectExperts[] = "SelectExperts";
constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Rows whose values are stored at a time: scratch that stays in the cache.
constexpr int64_t kValueRows = 16;

// Masks one token's values outside its group_top_k best groups; does nothing without groups.
class GroupMask {
 public:
  GroupMask(const GateRule& rule, int64_t experts)
      : rule_(rule),
        size_(rule.num_groups > 0 ? experts / rule.num_groups : 0),
        worth_(static_cast<size_t>(rule.num_groups)),
        sorted_(static_cast<size_t>(size_)) {}

  void Apply(float* value) {
    for (size_t g = 0; g < worth_.size(); ++g) worth_[g] = WorthOf(Group(value, g));
    for (size_t g = 0; g < worth_.size(); ++g) {
      if (GroupsBefore(g) < rule_.group_top_k) continue;
      std::fill_n(Group(value, g), size_, kMasked);
    }
  }

 private:
  float* Group(float* value, size_t g) const { return value + static_cast<int64_t>(g) * size_; }

  // The sum of the group_sum largest values, largest first; a NaN counts as -infinity.
  float WorthOf(const float* group) {
    std::transform(group, group + size_, sorted_.begin(),
                   [](float v) { return std::isnan(v) ? kMasked : v; });
    const auto most = std::min<int64_t>(rule_.group_sum, size_);
    std::partial_sort(sorted_.begin(), sorted_.begin() + most, sorted_.end(), std::greater<>());
    float sum = 0;
    for (int64_t i = 0; i < most; ++i) sum += sorted_[static_cast<size_t>(i)];
    return sum;
  }

  // Number of groups with a larger sum than g's, or an equal one and a lower id.
  int32_t GroupsBefore(size_t g) const {
    int32_t before = 0;
    for (size_t other = 0; other < worth_.size(); ++other) {
      if (worth_[other] > worth_[g] || (worth_[other] == worth_[g] && other < g)) ++before;
    }
    return before;
  }

  const GateRule rule_;
  const int64_t size_;
  absl::InlinedVector<float, kMostInlineExperts> worth_, sorted_;
};

// Selection for rows [begin, end) on the CPU.
class SelectRows {
 public:
  SelectRows(const GateRule& rule, const SelectExpertsInput& in, const SelectExpertsOutput& out,
             int64_t begin, int64_t end)
      : rule_(rule), in_(in), out_(out), begin_(begin), end_(end) {}

  void Run() const {
    const bool by_score =
        in_.value.data() == nullptr && (!in_.expert_bias.empty() || rule_.num_groups > 0);
    Score();  // a softmax also selects by logits and gathers weights
    if (by_score) {
      SelectByScore();
    } else if (in_.value.data() != nullptr) {
      TopKSelectCpu(in_.value, out_.expert, begin_, end_);
    } else if (rule_.score == ScoreFunction::kSigmoid) {
      TopKSelectCpu(in_.logits, out_.expert, begin_, end_);
    } else {
      return WeighRowsCpu(out_.weight, rule_, begin_, end_);
    }
    GatherScores();
    WeighRowsCpu(out_.weight, rule_, begin_, end_);
  }

 private:
  void Score() const {
    if (rule_.score == ScoreFunction::kSigmoid) {
      SigmoidScoresCpu(in_.logits, out_.score, out_.log_sum_exp, begin_, end_);
      return;
    }
    SoftmaxTopKCpu(in_.logits, out_, begin_, end_);
  }

  void SelectByScore() const {
    const int64_t experts = in_.logits.cols();
    absl::FixedArray<float, kValueRows * kMostInlineExperts> scratch(
        static_cast<size_t>(kValueRows * experts));
    const MatrixView<float> value(scratch.data(), kValueRows, experts);
    GroupMask mask(rule_, experts);
    for (int64_t first = begin_; first < end_; first += kValueRows) {
      const int64_t rows = std::min(kValueRows, end_ - first);
      for (int64_t r = 0; r < rows; ++r) {
        const float* const score = out_.score.row(first + r);
        for (int64_t e = 0; e < experts; ++e) {
          const float bias =
              in_.expert_bias.empty() ? 0.0f : in_.expert_bias[static_cast<size_t>(e)];
          value(r, e) = score[e] + bias;
        }
        mask.Apply(value.row(r));
      }
      TopKSelectCpu(value, RowRange(out_.expert, first, first + rows), 0, rows);
    }
  }

  // Gathers the scores of selected experts, where the softmax has not done it.
  void GatherScores() const {
    for (int64_t t = begin_; t < end_; ++t) {
      const float* const score = out_.score.row(t);
      for (int64_t j = 0; j < out_.expert.cols(); ++j) {
        out_.weight(t, j) = score[out_.expert(t, j)];
      }
    }
  }

  const GateRule& rule_;
  const SelectExpertsInput& in_;
  const SelectExpertsOutput& out_;
  const int64_t begin_, end_;
};

absl::Status CheckArguments(const GateRule& rule, const SelectExpertsInput& in,
                            const SelectExpertsOutput& out) {
  const int64_t tokens = in.logits.rows(), experts = in.logits.cols(), k = out.expert.cols();
  const auto check = [](absl::string_view name, size_t length, int64_t expected, bool optional) {
    return length == 0 && optional ? absl::OkStatus()
                                   : CheckLength(kSelectExperts, name, length, expected);
  };
  if (k < 1 || k > experts) {
    return absl::InvalidArgumentError(
        absl::StrCat(kSelectExperts, ": k is ", k, ", expected 1 .. ", experts, " (the experts)"));
  }
  if (constexpr int64_t kMost = int64_t{1} << kExpertIdBits; experts > kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat(kSelectExperts, ": ", experts, " experts, expected at most ", kMost));
  }
  MOE_RETURN_IF_ERROR(CheckShape(kSelectExperts, "logits", in.logits, tokens, experts));
  MOE_RETURN_IF_ERROR(CheckShape(kSelectExperts, "score", out.score, tokens, experts));
  MOE_RETURN_IF_ERROR(CheckShape(kSelectExperts, "expert", out.expert, tokens, k));
  MOE_RETURN_IF_ERROR(CheckShape(kSelectExperts, "weight", out.weight, tokens, k));
  if (in.value.data() != nullptr) {
    MOE_RETURN_IF_ERROR(CheckShape(kSelectExperts, "value", in.value, tokens, experts));
  }
  MOE_RETURN_IF_ERROR(check("expert_bias", in.expert_bias.size(), experts, true));
  MOE_RETURN_IF_ERROR(check("log_sum_exp", out.log_sum_exp.size(), tokens, true));
  MOE_RETURN_IF_ERROR(check("count", out.count.size(), experts, false));
  MOE_RETURN_IF_ERROR(check("slot_offset", out.slot_offset.size(), tokens + 1, true));
  if (rule.num_groups == 0) return absl::OkStatus();
  if (rule.num_groups > 0 && experts % rule.num_groups == 0 && rule.group_top_k >= 1 &&
      rule.group_sum >= 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(kSelectExperts, ": ", rule.num_groups, " groups of ", experts, " experts, ",
                   rule.group_top_k, " of them kept, worth their ", rule.group_sum,
                   " largest, expected a divisor of the experts, 1 or more, 1 or more"));
}

absl::Status LaunchSelect(const GateRule& rule, const SelectExpertsInput& in,
                          const SelectExpertsOutput& out, Stream& stream) {
  if (in.value.data() != nullptr) return CheckCpu("SelectExperts by given values", stream);
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(kSelectExperts, "E (experts)", in.logits.cols(), topk_gate::kMaxExperts));
  MOE_RETURN_IF_ERROR(CheckCudaLimit(kSelectExperts, "k", out.expert.cols(), topk_gate::kMaxTopK));
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(kSelectExperts, "num_groups", rule.num_groups, topk_gate::kMaxGroups));
  const auto pointer = [](auto span) {
    return span.empty() ? nullptr : span.data();
  };
  const topk_gate::CudaGate<float> gate = {.logits = in.logits,
                                           .rule = rule,
                                           .expert_bias = pointer(in.expert_bias),
                                           .score = out.score,
                                           .expert = out.expert,
                                           .weight = out.weight,
                                           .log_sum_exp = pointer(out.log_sum_exp),
                                           .count = out.count.data(),
                                           .slot_offset = pointer(out.slot_offset)};
  return LaunchOn(kSelectExperts, stream, [&](auto cuda) { return topk_gate::Run(gate, cuda); });
}

// count [E] = number of occurrences of each id in expert [T, K].
void CountSelected(MatrixView<const int32_t> expert, absl::Span<int64_t> count) {
  std::fill(count.begin(), count.end(), int64_t{0});
  int64_t* const counts = count.data();
  for (int64_t t = 0; t < expert.rows(); ++t) {
    const int32_t* const ids = expert.row(t);
    for (int64_t j = 0; j < expert.cols(); ++j) ++counts[ids[j]];
  }
}

}  // namespace

absl::Status SelectExperts(const GateRule& rule, const SelectExpertsInput& in,
                           const SelectExpertsOutput& out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckArguments(rule, in, out));
  if (IsCuda(stream)) return LaunchSelect(rule, in, out, stream);
  return stream.Enqueue([rule, in, out, &threads = stream.threads()] {
    const int64_t tokens = in.logits.rows(), k = out.expert.cols();
    threads.For(tokens, kGateRowsPerTask,
                [&](int64_t begin, int64_t end) { SelectRows(rule, in, out, begin, end).Run(); });
    CountSelected(out.expert, out.count);
    int64_t offset = 0;
    for (int64_t& begin : out.slot_offset) begin = std::exchange(offset, offset + k);
    return absl::OkStatus();
  });
}

}  // namespace moe
