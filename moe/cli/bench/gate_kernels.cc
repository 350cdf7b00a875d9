// A gate alone: from logits to slots and weights, and back.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/gate.h"
#include "gating/token_groups.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/workspace.h"
#include "moe/cli/bench/gate_oracle.h"
#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

class GateKernels final : public KernelCases {
 public:
  GateKernels(const KernelSpec& spec, KernelDevice& device)
      : spec_(spec), device_(device), saved_(device.memory()) {}

  absl::Status Setup() {
    RouterConfig router = spec_.router;
    router.hidden_size = 1;
    router.seed = spec_.seed;
    MOE_RETURN_IF_ERROR(ValidateRouterConfig(router));
    gate_ = FindGate(router.gate)->make(router);
    if (!gate_->RunsOn(device_.stream().device().kind)) {
      return absl::UnimplementedError(
          absl::StrCat("gate ", router.gate, " runs on the CPU alone, in layers too"));
    }
    traits_ = gate_->traits();
    weighing_ = WeighingOf(router);
    const std::vector<float> bias(traits_.expert_bias ? router.num_outputs() : 0, 0.0f);
    MOE_ASSIGN_OR_RETURN(expert_bias_, Mirrored<float>::Of(bias, device_, "expert bias"));
    int64_t most_tokens = 0;
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const TokenSlots slots, KernelSlots(spec_, call));
      most_tokens = std::max(most_tokens, slots.tokens());
    }
    MOE_ASSIGN_OR_RETURN(d_logits_,
                         Mirrored<float>::Allocate(most_tokens * columns(), device_, "d_logits"));
    Add(this, device_, "forward", "gate", &GateKernels::ForwardBytes, &GateKernels::Forward,
        &GateKernels::WrongForward, {}, std::bind_front(&GateKernels::SpoilSelection, this));
    Add(this, device_, "backward", "gate", &GateKernels::BackwardBytes, &GateKernels::Backward,
        &GateKernels::WrongBackward, d_logits_.bytes());
    for (KernelCase& one : cases_) {
      if (!weighing_.has_value()) one.timed.wrong = nullptr;
    }
    return absl::OkStatus();
  }
  void Append(std::unique_ptr<KernelCases> more) {
    cases_.insert(cases_.end(), more->cases().begin(), more->cases().end());
    more_ = std::move(more);
  }

 private:
  friend class KernelCases;

  // Logits of a record, and the selection that backward starts from.
  absl::Status Turn(int64_t record) {
    if (record == record_) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(const GateLogits drawn, DrawGateLogits(spec_, record, columns()));
    tokens_ = drawn.tokens;
    MOE_ASSIGN_OR_RETURN(logits_, Mirrored<float>::Of(drawn.values, device_, "logits"));
    expected_.reset();
    saved_.Release({});
    host_.Release({});
    MOE_ASSIGN_OR_RETURN(batch_, CopyBatch({}, tokens_, host_));
    MOE_ASSIGN_OR_RETURN(groups_, MakeTokenGroups({}, batch_, host_));
    MOE_RETURN_IF_ERROR(Select());
    MOE_RETURN_IF_ERROR(device_.stream().Synchronize());
    kept_ = std::exchange(selection_, {});
    const auto slots = static_cast<int64_t>(kept_.expert.size());
    MOE_ASSIGN_OR_RETURN(dropped_, Mirrored<uint8_t>::Allocate(slots, device_, "dropped"));
    std::vector<float> d_weight;
    for (int64_t s = 0; s < slots; ++s) {
      d_weight.push_back(static_cast<float>(Uniform(KeyOf(s), 0)));
    }
    MOE_ASSIGN_OR_RETURN(d_weight_, Mirrored<float>::Of(d_weight, device_, "d_weight"));
    forward_mark_ = saved_.mark();
    record_ = record;
    return absl::OkStatus();
  }
  RandomKey KeyOf(int64_t item) const {
    return {.seed = spec_.seed,
            .purpose = RandomPurpose::kData,
            .layer = 4,
            .item = static_cast<uint64_t>(item)};
  }

  int64_t columns() const { return int64_t{traits_.logit_sets} * spec_.router.num_outputs(); }
  MatrixView<const float> Logits() const { return {logits_.device().data(), tokens_, columns()}; }

  absl::Status Select() {
    MOE_ASSIGN_OR_RETURN(selection_, gate_->Select({.logits = Logits(),
                                                    .batch = batch_,
                                                    .groups = groups_,
                                                    .expert_bias = expert_bias_.device()},
                                                   saved_, device_.stream()));
    return absl::OkStatus();
  }
  absl::Status Forward() {
    saved_.Release(forward_mark_);
    return Select();
  }
  absl::Status Backward() {
    return gate_->Backward({.logits = Logits(),
                            .batch = batch_,
                            .selection = kept_,
                            .dropped = dropped_.device(),
                            .d_weight = d_weight_.device()},
                           MatrixView<float>(d_logits_.device().data(), tokens_, columns()),
                           device_.stream());
  }

  // What the last forward of this record wrote, and the next one writes again: memory that this
  // class owns and a gate lends as const.
  template <typename U>
  absl::Status Spoil(absl::Span<const U> values) {
    return device_.Spoil(
        {reinterpret_cast<std::byte*>(const_cast<U*>(values.data())), values.size() * sizeof(U)});
  }
  absl::Status SpoilSelection() {
    MOE_RETURN_IF_ERROR(Spoil<int64_t>(selection_.slot_offset));
    MOE_RETURN_IF_ERROR(Spoil<int32_t>(selection_.expert));
    MOE_RETURN_IF_ERROR(Spoil<float>(selection_.weight));
    return Spoil<int64_t>(selection_.count);
  }

  double Bytes(int64_t each_slot, int64_t others) const {
    const auto slots = static_cast<int64_t>(kept_.expert.size());
    const int64_t scores = tokens_ * spec_.router.num_outputs();
    return static_cast<double>(4 * tokens_ * columns() + 4 * scores + each_slot * slots +
                               8 * (tokens_ + 1) + others);
  }
  double ForwardBytes() const { return Bytes(8, 4 * tokens_ + 8 * spec_.router.num_outputs()); }
  double BackwardBytes() const { return Bytes(9, 0); }

  absl::Span<const float> HostLogits() const { return logits_.host(); }
  absl::StatusOr<int64_t> WrongForward() {
    if (!expected_.has_value()) {
      expected_.emplace(HostLogits(), columns(), spec_.router.top_k, *weighing_);
    }
    MOE_ASSIGN_OR_RETURN(const auto offset, Fetch(device_, selection_.slot_offset));
    MOE_ASSIGN_OR_RETURN(const auto expert, Fetch(device_, selection_.expert));
    MOE_ASSIGN_OR_RETURN(const auto weight, Fetch<float>(device_, selection_.weight));
    MOE_ASSIGN_OR_RETURN(const auto count, Fetch(device_, selection_.count));
    int64_t wrong = expected_->CountWrong(expert, weight, count);
    for (int64_t t = 0; t < tokens_; ++t) wrong += offset[t + 1] != (t + 1) * spec_.router.top_k;
    return wrong;
  }
  absl::StatusOr<int64_t> WrongBackward() {
    // A row of logits is brought back and one computed again; the latter takes far longer.
    const RowStretch range = CheckedRows(device_, checks_++, tokens_, kCostOfLogit * 4 * columns());
    MOE_RETURN_IF_ERROR(d_logits_.Download(range.begin * columns(), range.end * columns()));
    int64_t wrong = 0;
    for (int64_t t = range.begin; t < range.end; ++t) wrong += WrongGradients(t);
    return wrong;
  }
  // Plain:       d_l_e = p_e ([e chosen] dw_e - sum_j p_j dw_j)
  // over chosen: d_l_e = w_e (dw_e - sum_j w_j dw_j), 0 for the others
  // Each weight is off by the token's tolerance, relative; terms have two of them, and their sum
  // has fewer roundings than a third allows for. Over the chosen, the gradient goes back through
  // the division and through a softmax over all: twice as many, and what should cancel for the
  // others leaves as much of p_e. What an expert below the chosen ones adds is the rounding of its
  // own argument of exp.
  int64_t WrongGradients(int64_t t) const {
    const int64_t k = spec_.router.top_k;
    const absl::Span<const float> logits = HostLogits().subspan(t * columns(), columns());
    const ExpectedToken token = ExpectToken(logits, spec_.router.top_k, *weighing_);
    std::vector<double> want(columns()), tolerance(columns());
    double mean = 0;
    double mean_size = 0;  // of the terms' magnitudes
    for (int64_t j = 0; j < k; ++j) {
      const auto d_weight = static_cast<double>(d_weight_.host()[t * k + j]);
      mean += token.weight[j] * d_weight;
      mean_size += token.weight[j] * std::abs(d_weight);
    }
    const bool plain = *weighing_ == Weighing::kPlain;
    const double terms = plain ? 3 : 6;
    const auto largest = static_cast<double>(logits[token.expert[0]]);
    for (int64_t e = 0; e < columns(); ++e) {
      want[e] = plain ? -token.probability[e] * mean : 0;
      const double depth = largest - static_cast<double>(logits[e]);
      tolerance[e] = (terms * token.tolerance + 0x1p-22 * depth) * token.probability[e] * mean_size;
    }
    for (int64_t j = 0; j < k; ++j) {
      const auto d_weight = static_cast<double>(d_weight_.host()[t * k + j]);
      want[token.expert[j]] = token.weight[j] * (d_weight - mean);
      tolerance[token.expert[j]] =
          terms * token.tolerance * token.weight[j] * (std::abs(d_weight) + mean_size);
    }
    int64_t wrong = 0;
    for (int64_t e = 0; e < columns(); ++e) {
      wrong += IsOff(d_logits_.host()[t * columns() + e], want[e], tolerance[e] + kUnderflow);
    }
    return wrong;
  }

  static constexpr int64_t kCostOfLogit = 16;  // a softmax again, of an element moved
  const KernelSpec spec_;
  KernelDevice& device_;
  std::unique_ptr<const Gate> gate_;
  GateTraits traits_;
  std::optional<Weighing> weighing_;
  int64_t tokens_ = 0;
  int64_t record_ = -1, checks_ = 0;
  Mirrored<float> expert_bias_, logits_, d_logits_, d_weight_;
  Mirrored<uint8_t> dropped_;
  std::optional<ExpectedSelection> expected_;  // of record_, once it was asked for
  Workspace host_;                             // batch and groups
  Workspace saved_;                            // the selection for backward; then that of forward
  Workspace::Mark forward_mark_;
  Batch batch_;
  TokenGroups groups_;
  GateSelection kept_, selection_;
  std::unique_ptr<KernelCases> more_;  // what appended cases call
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeGateCases(const KernelSpec& spec,
                                                           KernelDevice& device) {
  const bool is_cpu = device.is_cpu();
  const bool narrow = Is16BitFloat(spec.dtype);
  if (spec.dtype != DType::kFloat32 && (is_cpu || !narrow)) {
    return absl::InvalidArgumentError(absl::StrCat("MakeGateCases: type ", moe::NameOf(spec.dtype),
                                                   ", expected f32",
                                                   is_cpu ? "" : ", bf16 or f16"));
  }
  if (narrow) return MakeSelectCases(spec, device);
  auto kernels = std::make_unique<GateKernels>(spec, device);
  MOE_RETURN_IF_ERROR(kernels->Setup());
  if (!is_cpu && WeighingOf(spec.router).has_value()) {
    MOE_ASSIGN_OR_RETURN(auto select, MakeSelectCases(spec, device));
    kernels->Append(std::move(select));
  }
  return std::unique_ptr<KernelCases>(std::move(kernels));
}

}  // namespace moe::bench
