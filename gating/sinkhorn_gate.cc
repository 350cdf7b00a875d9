// Sinkhorn (BASE-like) routing as in Megatron: in training the token group's exp(l) is scaled to a
// doubly stochastic matrix and the k largest of a row are chosen; in evaluation the k largest
// logits. Weights sigmoid(l) if k = 1, else softmax(l) at the chosen ones. No load-balance loss.
// Source: Clark et al., arXiv:2202.01169, section 3.2; megatron/core/transformer/moe/moe_utils.py.
#include <algorithm>
#include <cmath>

#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr double kTolerance = 1e-4;   // mean change of the column scales
constexpr int kMostIterations = 100;  // columns that underflow would never settle

// Scratch of all token groups, so that each may be scaled on a thread of its own.
struct Scratch {
  MatrixView<double> cost;    // [T, E]
  MatrixView<double> column;  // [groups, E]
  MatrixView<double> sum;     // [groups, E]
};

// value[t, e] = column_scale_e * exp(l_te - max_t) over the tokens [begin, end) of `group`. The
// rows' own scales are left out: they do not change the order within a row.
void ScaleGroup(MatrixView<const float> logits, int64_t group, int64_t begin, int64_t end,
                const Scratch& scratch, MatrixView<float> value) {
  const auto experts = static_cast<size_t>(logits.cols());
  const auto tokens = static_cast<size_t>(end - begin);
  const absl::Span<double> cost(scratch.cost.row(begin), tokens * experts);
  const absl::Span<double> column(scratch.column.row(group), experts);
  const absl::Span<double> sum(scratch.sum.row(group), experts);
  std::fill(column.begin(), column.end(), 1.0);
  for (size_t t = 0; t < tokens; ++t) {
    const float* const row = logits.row(begin + static_cast<int64_t>(t));
    double max = row[0];
    for (size_t e = 1; e < experts; ++e) max = std::max(max, static_cast<double>(row[e]));
    for (size_t e = 0; e < experts; ++e) {
      cost[t * experts + e] = std::exp(static_cast<double>(row[e]) - max);
    }
  }
  double change = 1;
  for (int i = 0; i < kMostIterations && change > kTolerance; ++i) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (size_t t = 0; t < tokens; ++t) {
      const double* const row = cost.data() + t * experts;
      double row_sum = 0;
      for (size_t e = 0; e < experts; ++e) row_sum += column[e] * row[e];
      const double row_scale = 1.0 / (static_cast<double>(tokens) * row_sum);
      for (size_t e = 0; e < experts; ++e) sum[e] += row_scale * row[e];
    }
    change = 0;
    for (size_t e = 0; e < experts; ++e) {
      const double next = 1.0 / (static_cast<double>(experts) * (sum[e] + 1e-8));
      change += std::fabs(next - column[e]) / static_cast<double>(experts);
      column[e] = next;
    }
  }
  for (size_t t = 0; t < tokens; ++t) {
    float* const out = value.row(begin + static_cast<int64_t>(t));
    for (size_t e = 0; e < experts; ++e) {
      out[e] = static_cast<float>(column[e] * cost[t * experts + e]);
    }
  }
}

class SinkhornGate final : public ScaledTokenChoiceGate {
 public:
  explicit SinkhornGate(int32_t top_k)
      : ScaledTokenChoiceGate(
            {.top_k = top_k,
             .score = top_k == 1 ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax},
            Weights::kScores) {}

  GateTraits traits() const override {
    GateTraits traits = ScaledTokenChoiceGate::traits();
    traits.balance_choices = 0;
    return traits;
  }

  bool RunsOn(DeviceKind device) const override { return device == DeviceKind::kCpu; }

  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override {
    if (input.batch.mode != Mode::kTraining) {
      return SelectByValue(input, input.logits, workspace, stream);
    }
    MOE_ASSIGN_OR_RETURN(const MatrixView<float> value,
                         workspace.Matrix<float>(input.logits.rows(), input.logits.cols()));
    MOE_RETURN_IF_ERROR(ScaleGroups(input, value, workspace, stream));
    return SelectByValue(input, value, workspace, stream);
  }

 private:
  // Returns when all is computed: its scratch, eight bytes a logit, is not kept until backward.
  static absl::Status ScaleGroups(const GateInput& input, MatrixView<float> value,
                                  Workspace& workspace, Stream& stream) {
    const auto groups = static_cast<int64_t>(input.groups.offsets.size()) - 1;
    const int64_t experts = input.logits.cols();
    const WorkspaceScope scope(workspace);
    Scratch scratch;
    MOE_ASSIGN_OR_RETURN(scratch.cost, workspace.Matrix<double>(input.logits.rows(), experts));
    MOE_ASSIGN_OR_RETURN(scratch.column, workspace.Matrix<double>(groups, experts));
    MOE_ASSIGN_OR_RETURN(scratch.sum, workspace.Matrix<double>(groups, experts));
    MOE_RETURN_IF_ERROR(stream.Enqueue([logits = input.logits, offsets = input.groups.offsets,
                                        groups, scratch, value, &threads = stream.threads()] {
      threads.For(groups, 1, [&](int64_t first, int64_t last) {
        for (int64_t g = first; g < last; ++g) {
          ScaleGroup(logits, g, offsets[g], offsets[g + 1], scratch, value);
        }
      });
      return absl::OkStatus();
    }));
    return stream.Synchronize();
  }
};

}  // namespace

GateDefinition SinkhornGateDefinition() {
  return {.name = "sinkhorn", .options = kGateZeroExperts, .make = [](const RouterConfig& config) {
            return std::make_unique<SinkhornGate>(config.top_k);
          }};
}

}  // namespace moe
