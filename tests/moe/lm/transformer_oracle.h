// The reference model as plain float64 loops on one rank. Routing comes from moe verify's
// reference; shares no code with the product.
#ifndef MOE_TESTS_MOE_LM_TRANSFORMER_ORACLE_H_
#define MOE_TESTS_MOE_LM_TRANSFORMER_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/cli/verify/problem.h"
#include "moe/cli/verify/reference_parts.h"
#include "moe/lm/transformer_config.h"
#include "tests/moe/lm/transformer_harness.h"

namespace moe::testing {

// One micro-batch.
struct OracleBatch {
  std::vector<int32_t> tokens, targets;
  std::vector<int64_t> sequence_offsets;
};

struct OracleLoss {
  std::vector<double> rows;
  double aux_loss = 0, z_loss = 0;
  double margin = 1e300;  // distance of the nearest routing decision to a tie

  // The loss that gradients are of.
  double total() const {
    return std::accumulate(rows.begin(), rows.end(), 0.0) / static_cast<double>(rows.size()) +
           aux_loss + z_loss;
  }
};

// Relative size of the error that storing a value makes, for finding out what rounding does to a
// result: every stored value is multiplied by 1 + unit * u, u uniform in [-1, 1].
struct OracleNoise {
  double narrow = 0;  // values of the model's storage type: activations
  double wide = 0;    // values the model keeps in float32: logits, router scores, sums
  uint64_t seed = 0;
};

class TransformerOracle {
 public:
  TransformerOracle(const lm::TransformerConfig& config,
                    const std::map<std::string, NamedTensor>& weights)
      : config_(config) {
    for (const auto& [name, tensor] : weights) {
      weights_[name] = {tensor.rows, tensor.cols, {tensor.values.begin(), tensor.values.end()}};
    }
  }

  OracleLoss Loss(const OracleBatch& batch, const OracleNoise& noise = {}) const {
    return Pass(*this, batch, noise).Run();
  }

  // The derivative of total() by one weight, by central differences.
  double Derivative(const OracleBatch& batch, const std::string& name, int64_t element) {
    // float64 losses near 1 carry errors near 1e-16: over 2e-5 that is 1e-11; the third derivative
    // contributes step^2, 1e-10.
    constexpr double kStep = 1e-5;
    double& weight = weights_.at(name).values[element];
    const double kept = weight;
    weight = kept + kStep;
    const double above = Loss(batch).total();
    weight = kept - kStep;
    const double below = Loss(batch).total();
    weight = kept;
    return (above - below) / (2 * kStep);
  }

  // Most that any row's loss moved in `draws` runs with noise.
  double LossDeviation(const OracleBatch& batch, OracleNoise noise, int draws) const {
    const OracleLoss exact = Loss(batch);
    double most = 0;
    for (int draw = 0; draw < draws; ++draw) {
      ++noise.seed;
      const OracleLoss noisy = Loss(batch, noise);
      for (size_t t = 0; t < exact.rows.size(); ++t) {
        most = std::max(most, std::abs(noisy.rows[t] - exact.rows[t]));
      }
    }
    return most;
  }

 private:
  using Matrix = std::vector<std::vector<double>>;
  struct Weight {
    int64_t rows = 0, cols = 0;
    std::vector<double> values;
  };

  // One forward pass.
  class Pass {
   public:
    Pass(const TransformerOracle& model, const OracleBatch& batch, const OracleNoise& noise)
        : config_(model.config_),
          weights_(model.weights_),
          batch_(batch),
          noise_(noise),
          random_(noise.seed) {}

    OracleLoss Run() {
      const Weight& table = At("model.embed_tokens.weight");
      Matrix x;
      for (const int32_t token : batch_.tokens) {
        const auto row = table.values.begin() + token * table.cols;
        x.emplace_back(row, row + table.cols);
      }
      for (int l = 0; l < config_.num_layers; ++l) {
        const std::string prefix = absl::StrCat("model.layers.", l, ".");
        Add(x, Attention(Normalised(x, prefix + "input_layernorm.weight"), prefix + "self_attn."));
        const Matrix normed = Normalised(x, prefix + "post_attention_layernorm.weight");
        const bool mixture = l % config_.moe_layer_freq == config_.moe_layer_freq - 1;
        Add(x, mixture ? Mixture(normed, prefix + "mlp.") : Network(normed, prefix + "mlp."));
      }
      const Matrix logits =
          Times(Normalised(x, "model.norm.weight"),
                config_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
      for (size_t t = 0; t < logits.size(); ++t) {
        double sum = 0;
        for (const double v : logits[t]) sum += std::exp(Wide(v));
        loss_.rows.push_back(Wide(std::log(Wide(sum))) - Wide(logits[t][batch_.targets[t]]));
      }
      return loss_;
    }

   private:
    double Noisy(double value, double unit) {
      if (unit == 0) return value;
      return value * (1 + unit * std::uniform_real_distribution<double>(-1, 1)(random_));
    }
    double Narrow(double value) { return Noisy(value, noise_.narrow); }
    double Wide(double value) { return Noisy(value, noise_.wide); }

    const Weight& At(const std::string& name) const { return weights_.at(name); }

    // x W^T without the rounding of its result.
    Matrix Times(const Matrix& x, const std::string& name) const {
      const Weight& w = At(name);
      Matrix y(x.size(), std::vector<double>(w.rows, 0.0));
      for (size_t t = 0; t < x.size(); ++t) {
        for (int64_t o = 0; o < w.rows; ++o) {
          for (int64_t k = 0; k < w.cols; ++k) y[t][o] += x[t][k] * w.values[o * w.cols + k];
        }
      }
      return y;
    }

    Matrix Stored(Matrix x) {
      for (auto& row : x) {
        for (double& v : row) v = Narrow(v);
      }
      return x;
    }

    Matrix Normalised(const Matrix& x, const std::string& name) {
      Matrix y = x;
      for (auto& row : y) Normalise(row, 0, At(name));
      return y;
    }

    // The columns from `first` on that `w` has weights for.
    void Normalise(std::vector<double>& row, size_t first, const Weight& w) {
      double squares = 0;
      for (size_t h = 0; h < w.values.size(); ++h) squares += row[first + h] * row[first + h];
      const double mean = squares / static_cast<double>(w.values.size());
      const double rstd = 1 / std::sqrt(Wide(mean) + config_.norm_epsilon);
      for (size_t h = 0; h < w.values.size(); ++h) {
        row[first + h] = Narrow(row[first + h] * rstd * w.values[h]);
      }
    }

    // Turns q and k of [q | k | v] by position.
    void Rotate(Matrix& x) {
      const int64_t width = config_.head_dim();
      for (size_t s = 0; s + 1 < batch_.sequence_offsets.size(); ++s) {
        for (int64_t t = batch_.sequence_offsets[s]; t < batch_.sequence_offsets[s + 1]; ++t) {
          const auto position = static_cast<double>(t - batch_.sequence_offsets[s]);
          const int64_t heads = config_.num_attention_heads + config_.key_value_heads();
          for (int64_t head = 0; head < heads; ++head) {
            for (int64_t d = 0; d < width / 2; ++d) {
              const double angle =
                  position * std::pow(static_cast<double>(config_.rotary_base),
                                      -2.0 * static_cast<double>(d) / static_cast<double>(width));
              double& a = x[t][head * width + d];
              double& b = x[t][head * width + d + width / 2];
              const double turned = a * std::cos(angle) - b * std::sin(angle);
              b = Narrow(b * std::cos(angle) + a * std::sin(angle));
              a = Narrow(turned);
            }
          }
        }
      }
    }

    Matrix Attention(const Matrix& x, const std::string& prefix) {
      const int64_t width = config_.head_dim(), q_cols = config_.num_attention_heads * width;
      const int64_t kv_cols = config_.key_value_heads() * width;
      const int64_t group = config_.num_attention_heads / config_.key_value_heads();
      Matrix qkv = Stored(Times(x, prefix + "qkv_proj.weight"));
      if (config_.qkv_bias) Add(qkv, Matrix(x.size(), At(prefix + "qkv_proj.bias").values));
      if (config_.qk_norm != lm::QkNorm::kNone) {
        const Weight &q_norm = At(prefix + "q_norm.weight"), &k_norm = At(prefix + "k_norm.weight");
        for (auto& row : qkv) {
          for (int64_t c = 0; c < q_cols; c += q_norm.cols) Normalise(row, c, q_norm);
          for (int64_t c = 0; c < kv_cols; c += k_norm.cols) Normalise(row, q_cols + c, k_norm);
        }
      }
      Rotate(qkv);
      Matrix out(x.size(), std::vector<double>(q_cols, 0.0));
      for (size_t s = 0; s + 1 < batch_.sequence_offsets.size(); ++s) {
        const int64_t begin = batch_.sequence_offsets[s];
        for (int64_t t = begin; t < batch_.sequence_offsets[s + 1]; ++t) {
          for (int64_t head = 0; head < config_.num_attention_heads; ++head) {
            std::vector<double> score;
            for (int64_t u = begin; u <= t; ++u) {
              double dot = 0;
              for (int64_t d = 0; d < width; ++d) {
                dot += qkv[t][head * width + d] * qkv[u][q_cols + head / group * width + d];
              }
              score.push_back(std::exp(Wide(dot / std::sqrt(static_cast<double>(width)))));
            }
            const double sum = Wide(std::accumulate(score.begin(), score.end(), 0.0));
            for (int64_t d = 0; d < width; ++d) {
              double& value = out[t][head * width + d];
              for (int64_t u = begin; u <= t; ++u) {
                value +=
                    score[u - begin] / sum * qkv[u][q_cols + kv_cols + head / group * width + d];
              }
              value = Narrow(value);
            }
          }
        }
      }
      return Stored(Times(out, prefix + "o_proj.weight"));
    }

    // SwiGLU: silu(gate) * up.
    Matrix Network(const Matrix& x, const std::string& prefix) {
      const Matrix both = Stored(Times(x, prefix + "gate_up_proj.weight"));
      const int64_t width = At(prefix + "gate_up_proj.weight").rows / 2;
      Matrix hidden(x.size(), std::vector<double>(width));
      for (size_t t = 0; t < x.size(); ++t) {
        for (int64_t f = 0; f < width; ++f) {
          const double gate = both[t][f];
          hidden[t][f] = Narrow(gate / (1 + std::exp(-gate)) * both[t][width + f]);
        }
      }
      return Stored(Times(hidden, prefix + "down_proj.weight"));
    }

    Matrix Mixture(const Matrix& x, const std::string& prefix) {
      const RouterConfig& router = config_.moe.router;
      const verify::ReferenceConfig gate =
          verify::ReferenceConfigOf({.layer = config_.moe}).value();
      // Routes the logits: the matrix of the reference's router is the identity.
      const auto tokens = static_cast<int64_t>(x.size()), experts = int64_t{router.num_experts};
      verify::LayerWeights<double> identity = {.router = {experts, experts}};
      for (int64_t e = 0; e < experts; ++e) identity.router(e, e) = 1;
      verify::Grid<double> logits(tokens, experts);
      const Matrix product = Times(x, prefix + "gate.weight");
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t e = 0; e < experts; ++e) logits(t, e) = Wide(product[t][e]);
        std::vector<double> sorted(&logits(t, 0), &logits(t, 0) + experts);
        std::sort(sorted.rbegin(), sorted.rend());
        for (int64_t j = 0; j < std::min<int64_t>(router.top_k, experts - 1); ++j) {
          loss_.margin = std::min(loss_.margin, sorted[j] - sorted[j + 1]);
        }
      }
      const verify::ReferenceBatch batch = {.micro_batch_offsets = {0, tokens},
                                            .sequence_offsets = batch_.sequence_offsets};
      const verify::ReferenceState no_state;
      const verify::ReferenceInput in = {gate, identity, no_state, batch};
      const std::vector<verify::ReferenceToken> routing =
          verify::RouteReference(in, logits, undecided_);
      verify::Grid<verify::Sum> d_logits(tokens, experts);
      const verify::ReferenceLoss losses =
          verify::AddLossGradients(in, {0, tokens}, routing, d_logits);
      loss_.aux_loss += losses.aux.value;
      loss_.z_loss += losses.z.value;
      std::vector<Matrix> of_expert;
      for (int e = 0; e < router.num_experts; ++e) {
        of_expert.push_back(Network(x, absl::StrCat(prefix, "experts.", e, ".")));
      }
      Matrix y(x.size(), std::vector<double>(config_.hidden_size, 0.0));
      for (size_t t = 0; t < x.size(); ++t) {
        for (const verify::ReferenceSlot& slot : routing[t].slots) {
          for (int64_t h = 0; h < config_.hidden_size; ++h) {
            y[t][h] += Wide(slot.weight.value) * of_expert[slot.expert][t][h];
          }
        }
      }
      y = Stored(std::move(y));
      if (config_.moe.shared_expert_ffn_hidden_size > 0)
        Add(y, Network(x, prefix + "shared_expert."));
      return y;
    }

    void Add(Matrix& x, const Matrix& y) {
      for (size_t t = 0; t < x.size(); ++t) {
        for (size_t h = 0; h < x[t].size(); ++h) x[t][h] = Narrow(x[t][h] + y[t][h]);
      }
    }

    const lm::TransformerConfig& config_;
    const std::map<std::string, Weight>& weights_;
    const OracleBatch& batch_;
    const OracleNoise noise_;
    std::mt19937_64 random_;
    std::string undecided_;  // not read: margins are recorded instead
    OracleLoss loss_;
  };

  lm::TransformerConfig config_;
  std::map<std::string, Weight> weights_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LM_TRANSFORMER_ORACLE_H_
