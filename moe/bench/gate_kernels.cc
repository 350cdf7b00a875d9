// A gate alone: from logits to slots and weights, and back.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/gate.h"
#include "gating/token_groups.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"
#include "moe/bench/kernel_bench.h"

namespace moe::bench {
namespace {

// Gates that choose the k largest logits and weigh them by a softmax over all experts (kPlain), or
// over the chosen ones (kOverChosen).
enum class Weighing : uint8_t { kPlain, kOverChosen };
std::optional<Weighing> WeighingOf(const RouterConfig& router) {
  const auto with = [&](bool over_chosen) {
    return router.norm_topk_prob.value_or(over_chosen) ? Weighing::kOverChosen : Weighing::kPlain;
  };
  if (router.num_zero_experts > 0) return std::nullopt;
  if (router.gate == "mixtral" || router.gate == "gpt-oss") return Weighing::kOverChosen;
  if (router.gate == "switch") return Weighing::kPlain;
  if (router.gate == "qwen3") return with(true);
  if (router.gate == "qwen2" || router.gate == "olmoe") return with(false);
  return std::nullopt;
}

// What of a weight is lost below the normal float32 numbers.
constexpr double kUnderflow = 0x1p-126;

// What the gate should say of one token, in float64.
struct ExpectedToken {
  std::vector<int32_t> expert;      // [K]
  std::vector<double> probability;  // [E]
  std::vector<double> weight;       // [K]
  // Of a float32 softmax, relative: exp sees a rounded argument (|l - m| ulps of 1) and is right to
  // a few ulps; the sum has E / 16 + 4 roundings. Weights over the chosen divide two such numbers.
  double tolerance = 0;
};

ExpectedToken Expect(absl::Span<const float> logits, int k, Weighing weighing) {
  ExpectedToken token;
  const auto experts = static_cast<int>(logits.size());
  std::vector<int32_t> ids(experts);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  token.expert.assign(ids.begin(), ids.begin() + k);
  const double largest = static_cast<double>(logits[ids[0]]);
  double sum = 0;
  for (const float logit : logits) {
    token.probability.push_back(std::exp(static_cast<double>(logit) - largest));
    sum += token.probability.back();
  }
  for (double& p : token.probability) p /= sum;
  double chosen = 0;
  for (const int32_t e : token.expert) chosen += token.probability[e];
  for (const int32_t e : token.expert) {
    token.weight.push_back(token.probability[e] / (weighing == Weighing::kPlain ? 1 : chosen));
  }
  const double depth = largest - static_cast<double>(logits[token.expert.back()]);
  token.tolerance = 2 * 0x1p-23 * (depth + experts / 16.0 + k + 16);
  return token;
}

class GateKernels final : public KernelCases {
 public:
  GateKernels(const KernelSpec& spec, Stream& stream) : spec_(spec), stream_(stream) {}

  absl::Status Setup() {
    RouterConfig router = spec_.router;
    router.hidden_size = 1;
    router.seed = spec_.seed;
    MOE_RETURN_IF_ERROR(ValidateRouterConfig(router));
    gate_ = FindGate(router.gate)->make(router);
    traits_ = gate_->traits();
    weighing_ = WeighingOf(router);
    expert_bias_.assign(traits_.expert_bias ? router.num_outputs() : 0, 0.0f);
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const TokenSlots slots, KernelSlots(spec_, call));
      most_tokens_ = std::max(most_tokens_, slots.tokens());
    }
    logits_.resize(most_tokens_ * columns());
    d_logits_.resize(logits_.size());
    Add("forward", &GateKernels::ForwardBytes, &GateKernels::Forward, &GateKernels::WrongForward);
    Add("backward", &GateKernels::BackwardBytes, &GateKernels::Backward,
        &GateKernels::WrongBackward);
    cases_[0].timed.spoil = [this] {
      SpoilSelection();
    };
    const absl::Span<std::byte> gradient = BytesOf<float>(d_logits_);
    cases_[1].timed.spoil = [gradient] {
      SpoilBytes(gradient);
    };
    cases_[1].result = gradient;
    return absl::OkStatus();
  }

 private:
  void Add(const char* pass, double (GateKernels::*bytes)() const,
           absl::Status (GateKernels::*run)(), int64_t (GateKernels::*wrong)() const) {
    TimedKernel timed{.prepare =
                          [this, bytes](int64_t call) {
                            Turn(call % CallsOf(spec_.routing));
                            return (this->*bytes)();
                          },
                      .run = [this, run] { return (this->*run)(); },
                      .wrong = nullptr};
    if (weighing_.has_value()) {
      timed.wrong = [this, wrong] {
        return (this->*wrong)();
      };
    }
    cases_.push_back({.pass = pass, .kernel = "gate", .timed = std::move(timed)});
  }

  // Logits of a record, and the selection that backward starts from.
  void Turn(int64_t record) {
    if (record == record_) return;
    record_ = record;
    MakeLogits();
    saved_.Release({});
    const Batch batch = CopyBatch({}, tokens_, saved_).value();
    batch_ = batch;
    groups_ = MakeTokenGroups({}, batch_, saved_).value();
    MOE_CHECK(Select(saved_).ok());
    kept_ = std::exchange(selection_, {});
    const auto slots = static_cast<int64_t>(kept_.expert.size());
    dropped_.assign(slots, 0);
    d_weight_.clear();
    for (int64_t s = 0; s < slots; ++s) {
      d_weight_.push_back(static_cast<float>(Uniform(KeyOf(s), 0)));
    }
    forward_mark_ = saved_.mark();
  }
  RandomKey KeyOf(int64_t item) const {
    return {.seed = spec_.seed,
            .purpose = RandomPurpose::kData,
            .layer = 4,
            .item = static_cast<uint64_t>(item)};
  }

  void MakeLogits() {
    const int experts = spec_.router.num_experts;
    SlotOptions options{.tokens = spec_.tokens,
                        .top_k = spec_.router.top_k,
                        .num_experts = experts,
                        .seed = spec_.seed};
    std::optional<TokenSlots> given;
    RoutingSpec drawn = spec_.routing;
    if (drawn.kind == RoutingSpec::kTrace) {
      given = KernelSlots(spec_, record_).value();
      options.tokens = given->tokens();
      drawn = {};
    }
    tokens_ = options.tokens;
    std::fill(logits_.begin(), logits_.end(), 0.0f);
    const std::vector<float> preference = DrawPreferences(drawn, options);
    for (int64_t t = 0; t < tokens_; ++t) {
      std::copy_n(preference.begin() + t * experts, experts, logits_.begin() + t * columns());
      if (!given.has_value()) continue;
      // Above the noise, which ends at 22.2.
      for (int64_t s = given->slot_offset[t]; s < given->slot_offset[t + 1]; ++s) {
        logits_[t * columns() + given->expert[s]] += 32;
      }
    }
  }

  int64_t columns() const { return int64_t{traits_.logit_sets} * spec_.router.num_outputs(); }
  MatrixView<const float> Logits() const { return {logits_.data(), tokens_, columns()}; }

  absl::Status Select(Workspace& workspace) {
    MOE_ASSIGN_OR_RETURN(
        selection_,
        gate_->Select(
            {.logits = Logits(), .batch = batch_, .groups = groups_, .expert_bias = expert_bias_},
            workspace, stream_));
    return stream_.Synchronize();
  }
  absl::Status Forward() {
    saved_.Release(forward_mark_);
    return Select(saved_);
  }
  absl::Status Backward() {
    MOE_RETURN_IF_ERROR(gate_->Backward({.logits = Logits(),
                                         .batch = batch_,
                                         .selection = kept_,
                                         .dropped = dropped_,
                                         .d_weight = d_weight_},
                                        MatrixView<float>(d_logits_.data(), tokens_, columns()),
                                        stream_));
    return stream_.Synchronize();
  }

  // Of memory that this class owns and a gate lends as const.
  template <typename U>
  static absl::Span<std::byte> BytesOf(absl::Span<const U> values) {
    return {reinterpret_cast<std::byte*>(const_cast<U*>(values.data())), values.size() * sizeof(U)};
  }
  // What the last forward of this record wrote, and the next one writes again.
  void SpoilSelection() {
    SpoilBytes(BytesOf<int64_t>(selection_.slot_offset));
    SpoilBytes(BytesOf<int32_t>(selection_.expert));
    SpoilBytes(BytesOf<float>(selection_.weight));
    SpoilBytes(BytesOf<int64_t>(selection_.count));
  }

  double Bytes(int64_t each_slot, int64_t others) const {
    const auto slots = static_cast<int64_t>(kept_.expert.size());
    const int64_t scores = tokens_ * spec_.router.num_outputs();
    return static_cast<double>(4 * tokens_ * columns() + 4 * scores + each_slot * slots +
                               8 * (tokens_ + 1) + others);
  }
  double ForwardBytes() const { return Bytes(8, 4 * tokens_ + 8 * spec_.router.num_outputs()); }
  double BackwardBytes() const { return Bytes(9, 0); }

  ExpectedToken ExpectedOf(int64_t t) const {
    return Expect({logits_.data() + t * columns(), static_cast<size_t>(columns())},
                  spec_.router.top_k, *weighing_);
  }
  static bool Off(float is, double want, double tolerance) {
    return !(std::abs(static_cast<double>(is) - want) <= tolerance);
  }
  int64_t WrongForward() const {
    const int64_t k = spec_.router.top_k;
    int64_t wrong = 0;
    std::vector<int64_t> count(selection_.count.size(), 0);
    for (int64_t t = 0; t < tokens_; ++t) {
      const ExpectedToken token = ExpectedOf(t);
      wrong += selection_.slot_offset[t + 1] != (t + 1) * k;
      for (int64_t j = 0; j < k; ++j) {
        ++count[token.expert[j]];
        wrong += selection_.expert[t * k + j] != token.expert[j];
        wrong += Off(selection_.weight[t * k + j], token.weight[j],
                     token.tolerance * token.weight[j] + kUnderflow);
      }
    }
    for (size_t e = 0; e < count.size(); ++e) wrong += selection_.count[e] != count[e];
    return wrong;
  }
  // Plain:       d_l_e = p_e ([e chosen] dw_e - sum_j p_j dw_j)
  // over chosen: d_l_e = w_e (dw_e - sum_j w_j dw_j), 0 for the others
  // Each weight is off by the token's tolerance, relative; terms have two of them, and their sum has
  // fewer roundings than a third allows for. Over the chosen, the gradient goes back through the
  // division and through a softmax over all: twice as many, and what should cancel for the others
  // leaves as much of p_e. What an expert below the chosen ones adds is the rounding of its own
  // argument of exp.
  int64_t WrongBackward() const {
    const int64_t k = spec_.router.top_k;
    int64_t wrong = 0;
    std::vector<double> want(columns()), tolerance(columns());
    for (int64_t t = 0; t < tokens_; ++t) {
      const ExpectedToken token = ExpectedOf(t);
      double mean = 0;
      double mean_size = 0;  // of the terms' magnitudes
      for (int64_t j = 0; j < k; ++j) {
        const auto d_weight = static_cast<double>(d_weight_[t * k + j]);
        mean += token.weight[j] * d_weight;
        mean_size += token.weight[j] * std::abs(d_weight);
      }
      const bool plain = *weighing_ == Weighing::kPlain;
      const double terms = plain ? 3 : 6;
      const float* const logits = logits_.data() + t * columns();
      const auto largest = static_cast<double>(logits[token.expert[0]]);
      for (int64_t e = 0; e < columns(); ++e) {
        want[e] = plain ? -token.probability[e] * mean : 0;
        const double depth = largest - static_cast<double>(logits[e]);
        tolerance[e] =
            (terms * token.tolerance + 0x1p-22 * depth) * token.probability[e] * mean_size;
      }
      for (int64_t j = 0; j < k; ++j) {
        const auto d_weight = static_cast<double>(d_weight_[t * k + j]);
        want[token.expert[j]] = token.weight[j] * (d_weight - mean);
        tolerance[token.expert[j]] =
            terms * token.tolerance * token.weight[j] * (std::abs(d_weight) + mean_size);
      }
      for (int64_t e = 0; e < columns(); ++e) {
        wrong += Off(d_logits_[t * columns() + e], want[e], tolerance[e] + kUnderflow);
      }
    }
    return wrong;
  }

  const KernelSpec spec_;
  Stream& stream_;
  std::unique_ptr<const Gate> gate_;
  GateTraits traits_;
  std::optional<Weighing> weighing_;
  int64_t most_tokens_ = 0, tokens_ = 0;
  int64_t record_ = -1;
  std::vector<float> expert_bias_, logits_, d_logits_, d_weight_;
  std::vector<uint8_t> dropped_;
  Workspace saved_;  // batch, groups and the selection for backward; then that of forward
  Workspace::Mark forward_mark_;
  Batch batch_;
  TokenGroups groups_;
  GateSelection kept_, selection_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeGateCases(const KernelSpec& spec, Stream& stream) {
  if (spec.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(
        absl::StrCat("MakeGateCases: type ", moe::NameOf(spec.dtype), ", expected f32"));
  }
  auto kernels = std::make_unique<GateKernels>(spec, stream);
  MOE_RETURN_IF_ERROR(kernels->Setup());
  return std::unique_ptr<KernelCases>(std::move(kernels));
}

}  // namespace moe::bench
