// Noisy top-k, Shazeer et al., arXiv:1701.06538, section 2.1 and appendix A. The router's weight
// has 2E rows: l = W_g x, then r = W_n x.
//   h = l + z * (softplus(r) + 0.01), z ~ N(0, 1) in training; h = l in evaluation
//   the k largest h; weights softmax over the selected h
// Losses per token group, with coefficient aux_loss_coeff: CV^2(importance) + CV^2(load), where
//   importance_i = sum_t w_ti (before any drop)
//   load_i = sum_t P(t, i), P the probability that i is chosen if its own noise is drawn again:
//            Phi((l_i - threshold_i) / s_i), threshold_i the k-th largest of the other h. Without
//            noise, or k = E: the count, which has no gradient.
// CV^2(v) = var(v) / (mean(v)^2 + 1e-10) with the unbiased variance. Gradients flow through
// weights, l, r and the thresholds, as in the authors' code.
#include <algorithm>
#include <cmath>

#include <absl/types/span.h>

#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kTokensPerTask = 128;
constexpr double kLeastNoise = 0.01;
constexpr double kCvEpsilon = 1e-10;

double Softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
}
double Sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}
double NormalDensity(double u) {
  return std::exp(-0.5 * u * u) / std::sqrt(2 * M_PI);
}
double NormalCdf(double u) {
  return 0.5 * std::erfc(-u / std::sqrt(2.0));
}

// CV^2 of v, and its gradient in place of v.
double SquaredVariation(absl::Span<double> v) {
  const auto n = static_cast<double>(v.size());
  if (v.size() < 2) {
    std::fill(v.begin(), v.end(), 0.0);
    return 0;
  }
  double mean = 0;
  for (const double x : v) mean += x / n;
  double variance = 0;
  for (const double x : v) variance += (x - mean) * (x - mean) / (n - 1);
  const double scale = mean * mean + kCvEpsilon;
  for (double& x : v) {
    x = 2 * (x - mean) / ((n - 1) * scale) - variance * 2 * mean / (n * scale * scale);
  }
  return variance / scale;
}

// Scratch of AddLosses, each [E].
struct LossScratch {
  absl::Span<double> importance, load;  // per token group
  absl::Span<double> dh, dl, ds;        // per token
};

// One token's row of logits and of the memo [h | z], by name.
struct NoisyRow {
  const float* l;
  const float* r;
  const float* h;
  const float* z;
  double width(int64_t e) const { return Softplus(static_cast<double>(r[e])) + kLeastNoise; }
};

class NoisyTopKGate final : public ScaledTokenChoiceGate {
 public:
  explicit NoisyTopKGate(const RouterConfig& config)
      : ScaledTokenChoiceGate({.top_k = config.top_k}, Weights::kScores),
        top_k_(config.top_k),
        coeff_(static_cast<double>(config.aux_loss_coeff)),
        seed_(config.seed),
        layer_(config.layer) {}

  GateTraits traits() const override { return {.logit_sets = 2}; }
  bool RunsOn(DeviceKind device) const override { return device == DeviceKind::kCpu; }
  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override;
  absl::Status AddLosses(const GateInput& input, const GateSelection& selection, double* loss,
                         MatrixView<float> d_logits, Workspace& workspace) const override;
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const override;

 private:
  static NoisyRow Row(MatrixView<const float> logits, MatrixView<const float> memo, int64_t t) {
    const int64_t experts = logits.cols() / 2;
    return {logits.row(t), logits.row(t) + experts, memo.row(t), memo.row(t) + experts};
  }
  absl::Status AddNoise(const GateInput& input, MatrixView<float> memo, Stream& stream) const;
  void AddGroupLoss(const GateInput& input, const GateSelection& selection, int64_t begin,
                    int64_t end, double scale, const LossScratch& scratch, double* loss,
                    MatrixView<float> d_logits) const;

  const int32_t top_k_;
  const double coeff_;
  const uint64_t seed_;
  const uint32_t layer_;
};

absl::Status NoisyTopKGate::AddNoise(const GateInput& input, MatrixView<float> memo,
                                     Stream& stream) const {
  return stream.Enqueue([this, logits = input.logits, mode = input.batch.mode,
                         step = input.batch.step, first_token = input.batch.first_global_token,
                         memo, &threads = stream.threads()] {
    const int64_t experts = logits.cols() / 2;
    threads.For(logits.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const NoisyRow row = Row(logits, memo, t);
        const RandomKey key = {.seed = seed_,
                               .purpose = RandomPurpose::kNoise,
                               .layer = layer_,
                               .step = static_cast<uint64_t>(step),
                               .item = static_cast<uint64_t>(first_token + t)};
        for (int64_t e = 0; e < experts; ++e) {
          const auto z = mode == Mode::kTraining
                             ? static_cast<float>(Normal(key, static_cast<uint32_t>(e)))
                             : 0.0f;
          memo(t, e) = static_cast<float>(static_cast<double>(row.l[e]) +
                                          static_cast<double>(z) * row.width(e));
          memo(t, experts + e) = z;
        }
      }
    });
    return absl::OkStatus();
  });
}

absl::StatusOr<GateSelection> NoisyTopKGate::Select(const GateInput& input, Workspace& workspace,
                                                    Stream& stream) const {
  const int64_t tokens = input.logits.rows();
  const int64_t experts = input.logits.cols() / 2;
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> memo, workspace.Matrix<float>(tokens, 2 * experts));
  MOE_RETURN_IF_ERROR(AddNoise(input, memo, stream));
  const GateInput of_experts = {.logits = ColumnRange(input.logits, 0, experts),
                                .batch = input.batch,
                                .groups = input.groups,
                                .expert_bias = {}};
  MOE_ASSIGN_OR_RETURN(
      GateSelection selection,
      SelectByValue(of_experts, ColumnRange(MatrixView<const float>(memo), 0, experts), workspace,
                    stream));
  MOE_RETURN_IF_ERROR(stream.Enqueue([this, memo, selection] {
    for (int64_t t = 0; t < memo.rows(); ++t) {
      const int32_t* const chosen = selection.expert.data() + t * top_k_;
      const auto power = [&](int64_t j) {  // the first is the largest
        return std::exp(static_cast<double>(memo(t, chosen[j])) -
                        static_cast<double>(memo(t, chosen[0])));
      };
      double sum = 0;
      for (int64_t j = 0; j < top_k_; ++j) sum += power(j);
      float* const w = selection.weight.data() + t * top_k_;
      for (int64_t j = 0; j < top_k_; ++j) w[j] = static_cast<float>(power(j) / sum);
    }
    return absl::OkStatus();
  }));
  selection.memo = memo;
  return selection;
}

absl::Status NoisyTopKGate::AddLosses(const GateInput& input, const GateSelection& selection,
                                      double* loss, MatrixView<float> d_logits,
                                      Workspace& workspace) const {
  if (coeff_ == 0) return absl::OkStatus();
  const WorkspaceScope scope(workspace);
  LossScratch scratch;
  for (absl::Span<double>* part :
       {&scratch.importance, &scratch.load, &scratch.dh, &scratch.dl, &scratch.ds}) {
    MOE_ASSIGN_OR_RETURN(*part, workspace.Array<double>(input.logits.cols() / 2));
  }
  const TokenGroups& groups = input.groups;
  for (size_t b = 0; b + 1 < groups.micro_batch.size(); ++b) {
    const int64_t first = groups.micro_batch[b];
    const int64_t last = groups.micro_batch[b + 1];
    double micro_batch_loss = 0;
    for (int64_t g = first; g < last; ++g) {
      AddGroupLoss(input, selection, groups.offsets[g], groups.offsets[g + 1],
                   coeff_ / static_cast<double>(last - first), scratch, &micro_batch_loss,
                   d_logits);
    }
    *loss += micro_batch_loss;
  }
  return absl::OkStatus();
}

// The two experts whose h bound the choice of a token: the last one in, the first one out.
struct Border {
  int32_t last_in = 0;
  int32_t first_out = 0;
};

Border BorderOf(const NoisyRow& row, int64_t experts, const int32_t* chosen, int32_t top_k) {
  Border border = {.last_in = chosen[top_k - 1], .first_out = -1};
  for (int32_t e = 0; e < experts; ++e) {
    if (std::find(chosen, chosen + top_k, e) != chosen + top_k) continue;
    if (border.first_out < 0 || row.h[e] > row.h[border.first_out]) border.first_out = e;
  }
  return border;
}

void NoisyTopKGate::AddGroupLoss(const GateInput& input, const GateSelection& selection,
                                 int64_t begin, int64_t end, double scale,
                                 const LossScratch& scratch, double* loss,
                                 MatrixView<float> d_logits) const {
  const int64_t experts = input.logits.cols() / 2;
  const bool smooth = input.batch.mode == Mode::kTraining && top_k_ < experts;
  const absl::Span<double> importance = scratch.importance, load = scratch.load;
  for (const absl::Span<double> v : {importance, load}) std::fill(v.begin(), v.end(), 0.0);
  const auto chosen = [&](int64_t t) {
    return selection.expert.data() + t * top_k_;
  };
  // Calls f(e, expert that holds the threshold, u) for every expert of token t.
  const auto for_each_probability = [&](int64_t t, auto f) {
    const NoisyRow row = Row(input.logits, selection.memo, t);
    const Border border = BorderOf(row, experts, chosen(t), top_k_);
    for (int32_t e = 0; e < experts; ++e) {
      const bool in = std::find(chosen(t), chosen(t) + top_k_, e) != chosen(t) + top_k_;
      const int32_t at = in ? border.first_out : border.last_in;
      f(e, at, (static_cast<double>(row.l[e]) - static_cast<double>(row.h[at])) / row.width(e));
    }
  };
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t j = 0; j < top_k_; ++j) {
      const auto e = static_cast<size_t>(chosen(t)[j]);
      importance[e] += static_cast<double>(selection.weight[t * top_k_ + j]);
      if (!smooth) load[e] += 1;
    }
    if (!smooth) continue;
    for_each_probability(t, [&](int32_t e, int32_t /*at*/, double u) { load[e] += NormalCdf(u); });
  }
  *loss += scale * (SquaredVariation(importance) + SquaredVariation(load));
  if (d_logits.data() == nullptr) return;

  const absl::Span<double> dh = scratch.dh, dl = scratch.dl, ds = scratch.ds;
  for (int64_t t = begin; t < end; ++t) {
    const NoisyRow row = Row(input.logits, selection.memo, t);
    for (const absl::Span<double> v : {dh, dl, ds}) std::fill(v.begin(), v.end(), 0.0);
    const float* const w = selection.weight.data() + t * top_k_;
    double mean = 0;
    for (int64_t j = 0; j < top_k_; ++j) {
      mean += static_cast<double>(w[j]) * importance[chosen(t)[j]];
    }
    for (int64_t j = 0; j < top_k_; ++j) {
      const auto e = static_cast<size_t>(chosen(t)[j]);
      dh[e] = static_cast<double>(w[j]) * (importance[e] - mean);
    }
    if (smooth) {
      for_each_probability(t, [&](int32_t e, int32_t at, double u) {
        const double du = load[e] * NormalDensity(u) / row.width(e);
        dl[e] += du;
        dh[at] -= du;
        ds[e] -= du * u;
      });
    }
    float* const d = d_logits.row(t);
    for (int64_t e = 0; e < experts; ++e) {
      const auto i = static_cast<size_t>(e);
      d[e] += static_cast<float>(scale * (dl[i] + dh[i]));
      d[experts + e] += static_cast<float>(scale * (ds[i] + dh[i] * static_cast<double>(row.z[e])) *
                                           Sigmoid(static_cast<double>(row.r[e])));
    }
  }
}

absl::Status NoisyTopKGate::Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                     Stream& stream) const {
  return stream.Enqueue([this, logits = input.logits, selection = input.selection,
                         dropped = input.dropped, d_weight = input.d_weight, d_logits,
                         &threads = stream.threads()] {
    const int64_t experts = logits.cols() / 2;
    threads.For(logits.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const NoisyRow row = Row(logits, selection.memo, t);
        float* const d = d_logits.row(t);
        std::fill_n(d, 2 * experts, 0.0f);
        // The weights before any drop: a dropped choice keeps its share of the softmax.
        double sum = 0;
        double mean = 0;
        const int32_t* const chosen = selection.expert.data() + t * top_k_;
        const auto power = [&](int64_t j) {
          return std::exp(static_cast<double>(row.h[chosen[j]]) -
                          static_cast<double>(row.h[chosen[0]]));
        };
        const auto by_weight = [&](int64_t j) {
          const auto s = static_cast<size_t>(t * top_k_ + j);
          return dropped[s] != 0 ? 0.0 : static_cast<double>(d_weight[s]);
        };
        for (int64_t j = 0; j < top_k_; ++j) sum += power(j);
        for (int64_t j = 0; j < top_k_; ++j) mean += power(j) / sum * by_weight(j);
        for (int64_t j = 0; j < top_k_; ++j) {
          const double dh = power(j) / sum * (by_weight(j) - mean);
          const int32_t e = chosen[j];
          d[e] = static_cast<float>(dh);
          d[experts + e] = static_cast<float>(dh * static_cast<double>(row.z[e]) *
                                              Sigmoid(static_cast<double>(row.r[e])));
        }
      }
    });
    return absl::OkStatus();
  });
}

}  // namespace

GateDefinition NoisyTopKGateDefinition() {
  return {.name = "noisy-topk", .make = [](const RouterConfig& config) {
            return std::make_unique<NoisyTopKGate>(config);
          }};
}

}  // namespace moe
