// What a gate needs of a GPU where nothing is trained: ids and weights, from logits in float32 or,
// as a router's product leaves them, in 16 bits; and the sort of the slots by expert. Straight to
// the launchers, since the operations above take float32 and write every score.
#include <functional>
#include <memory>
#include <optional>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/expert_sort/expert_sort_cuda.h"
#include "kernels/topk_gate/topk_gate_cuda.h"
#include "moe/cli/bench/gate_oracle.h"
#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

template <typename T>
class SelectKernels final : public KernelCases {
 public:
  SelectKernels(const KernelSpec& spec, Weighing weighing, KernelDevice& device)
      : spec_(spec), weighing_(weighing), device_(device) {
    Add(this, device, "forward", "select", &SelectKernels::SelectBytes, &SelectKernels::Select,
        &SelectKernels::WrongSelection, {}, std::bind_front(&SelectKernels::SpoilSelection, this));
    Add(this, device, "forward", "plan", &SelectKernels::PlanBytes, &SelectKernels::Plan,
        &SelectKernels::WrongPlan, {}, std::bind_front(&SelectKernels::SpoilPlan, this));
  }

 private:
  friend class KernelCases;

  int64_t E() const { return spec_.router.num_experts; }
  int64_t K() const { return spec_.router.top_k; }
  int64_t S() const { return tokens_ * K(); }

  // Logits of a record and what is expected of them; the sort starts from the expected ids.
  absl::Status Turn(int64_t record) {
    if (record == record_) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(GateLogits drawn, DrawGateLogits(spec_, record, E()));
    tokens_ = drawn.tokens;
    std::vector<T> logits;
    for (float& value : drawn.values) {
      logits.push_back(T(value));
      value = static_cast<float>(logits.back());
    }
    expected_.emplace(drawn.values, E(), spec_.router.top_k, weighing_);
    MOE_ASSIGN_OR_RETURN(logits_, Mirrored<T>::Of(logits, device_, "logits"));
    MOE_ASSIGN_OR_RETURN(slots_, Mirrored<int32_t>::Of(expected_->expert(), device_, "slots"));
    MOE_ASSIGN_OR_RETURN(expert_, Mirrored<int32_t>::Allocate(S(), device_, "experts"));
    MOE_ASSIGN_OR_RETURN(weight_, Mirrored<float>::Allocate(S(), device_, "weights"));
    MOE_ASSIGN_OR_RETURN(count_, Mirrored<int64_t>::Allocate(E(), device_, "counts"));
    MOE_ASSIGN_OR_RETURN(row_of_slot_, Mirrored<int32_t>::Allocate(S(), device_, "plan"));
    MOE_ASSIGN_OR_RETURN(slot_of_row_, Mirrored<int32_t>::Allocate(S(), device_, "plan"));
    const std::vector<int64_t> one_micro_batch = {0, 1}, all_slots = {0, S()};
    MOE_ASSIGN_OR_RETURN(micro_batches_, Mirrored<int64_t>::Of(one_micro_batch, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(slot_offset_, Mirrored<int64_t>::Of(all_slots, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(begin_, Mirrored<int64_t>::Allocate(E() + 1, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(segment_begin_, Mirrored<int64_t>::Allocate(E() + 1, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(sorted_count_, Mirrored<int32_t>::Allocate(E(), device_, "plan"));
    const int64_t scratch =
        expert_sort::ScratchElements({.slots = S(), .num_experts = spec_.router.num_experts});
    MOE_ASSIGN_OR_RETURN(scratch_, Mirrored<int32_t>::Allocate(scratch, device_, "plan"));
    record_ = record;
    return absl::OkStatus();
  }

  // Logits; ids and weights; counts.
  double SelectBytes() const {
    return static_cast<double>(tokens_ * E() * static_cast<int64_t>(sizeof(T)) + 8 * S() + 8 * E());
  }
  // Ids; both maps between slots and rows; first rows of experts and segments; counts.
  double PlanBytes() const { return static_cast<double>(12 * S() + 16 * (E() + 1) + 4 * E()); }

  absl::Status Select() {
    const GateRule rule = {.weights = weighing_ == Weighing::kPlain ? GateWeights::kScores
                                                                    : GateWeights::kNormalised};
    const topk_gate::CudaGate<T> gate = {
        .logits = MatrixView<const T>(logits_.device().data(), tokens_, E()),
        .rule = rule,
        .expert = MatrixView<int32_t>(expert_.device().data(), tokens_, K()),
        .weight = MatrixView<float>(weight_.device().data(), tokens_, K()),
        .count = count_.device().data()};
    return LaunchOn("select", device_.stream(),
                    [&](auto cuda) { return topk_gate::Run(gate, cuda); });
  }
  absl::Status Plan() {
    const expert_sort::CudaExpertSort sort = {.slots = S(),
                                              .expert = slots_.device().data(),
                                              .num_experts = spec_.router.num_experts,
                                              .micro_batch_offsets = micro_batches_.device().data(),
                                              .slot_offset = slot_offset_.device().data(),
                                              .most_rows = S(),
                                              .row_of_slot = row_of_slot_.device().data(),
                                              .slot_of_row = slot_of_row_.device().data(),
                                              .expert_begin = begin_.device().data(),
                                              .segment_begin = segment_begin_.device().data(),
                                              .count = sorted_count_.device().data(),
                                              .scratch = scratch_.device().data()};
    return LaunchOn("plan", device_.stream(),
                    [&](auto cuda) { return expert_sort::Run(sort, cuda); });
  }

  absl::Status SpoilSelection() {
    MOE_RETURN_IF_ERROR(device_.Spoil(expert_.bytes()));
    MOE_RETURN_IF_ERROR(device_.Spoil(weight_.bytes()));
    return device_.Spoil(count_.bytes());
  }
  absl::Status SpoilPlan() {
    MOE_RETURN_IF_ERROR(device_.Spoil(row_of_slot_.bytes()));
    MOE_RETURN_IF_ERROR(device_.Spoil(slot_of_row_.bytes()));
    MOE_RETURN_IF_ERROR(device_.Spoil(begin_.bytes()));
    return device_.Spoil(sorted_count_.bytes());
  }

  absl::StatusOr<int64_t> WrongSelection() {
    MOE_RETURN_IF_ERROR(expert_.Download());
    MOE_RETURN_IF_ERROR(weight_.Download());
    MOE_RETURN_IF_ERROR(count_.Download());
    return expected_->CountWrong(expert_.host(), weight_.host(), count_.host());
  }
  // Rows are the slots by expert, then by slot.
  absl::StatusOr<int64_t> WrongPlan() {
    MOE_RETURN_IF_ERROR(row_of_slot_.Download());
    MOE_RETURN_IF_ERROR(slot_of_row_.Download());
    MOE_RETURN_IF_ERROR(begin_.Download());
    MOE_RETURN_IF_ERROR(sorted_count_.Download());
    std::vector<int64_t> next(E() + 1, 0);
    for (int64_t e = 0; e < E(); ++e) next[e + 1] = next[e] + expected_->count()[e];
    int64_t wrong = 0;
    for (int64_t e = 0; e <= E(); ++e) wrong += begin_.host()[e] != next[e];
    for (int64_t e = 0; e < E(); ++e) wrong += sorted_count_.host()[e] != expected_->count()[e];
    for (int64_t s = 0; s < S(); ++s) {
      const int64_t row = next[expected_->expert()[s]]++;
      wrong += row_of_slot_.host()[s] != row;
      wrong += slot_of_row_.host()[row] != s;
    }
    return wrong;
  }

  const KernelSpec spec_;
  const Weighing weighing_;
  KernelDevice& device_;
  int64_t record_ = -1, tokens_ = 0;
  std::optional<ExpectedSelection> expected_;
  Mirrored<T> logits_;
  Mirrored<int32_t> slots_, expert_, row_of_slot_, slot_of_row_, sorted_count_, scratch_;
  Mirrored<float> weight_;
  // One micro-batch of one token.
  Mirrored<int64_t> count_, micro_batches_, slot_offset_, begin_, segment_begin_;
};

absl::Status CheckLimit(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("MakeSelectCases: ", name, " is ", value, ", expected 1 to ", most, " on CUDA"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeSelectCases(const KernelSpec& spec,
                                                             KernelDevice& device) {
  const std::optional<Weighing> weighing = WeighingOf(spec.router);
  if (!weighing.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("MakeSelectCases: gate ", spec.router.gate,
                                                   ", expected one that selects by logits"));
  }
  MOE_RETURN_IF_ERROR(CheckLimit("num_experts", spec.router.num_experts, topk_gate::kMaxExperts));
  MOE_RETURN_IF_ERROR(CheckLimit("top_k", spec.router.top_k, topk_gate::kMaxTopK));
  return WithStorageType(spec.dtype, [&]<typename T>(T) -> std::unique_ptr<KernelCases> {
    return std::make_unique<SelectKernels<T>>(spec, *weighing, device);
  });
}

}  // namespace moe::bench
