// The parts of a gate that inference on a GPU needs: ids and weights, from logits in float32 or, as
// a router's product leaves them, in 16 bits; and the sort of the slots by expert. Calls the
// launchers directly, since the operations above them take float32 and write every score.
#include <algorithm>
#include <memory>
#include <optional>

#include <absl/strings/str_cat.h>

#include "benchmarks/kernel_group.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/expert_sort/expert_sort_cuda.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe::measure {
namespace {

// Weights of gates that choose the K largest logits; nullopt for gates with another rule.
std::optional<GateWeights> WeightsOf(const RouterConfig& router) {
  const auto with = [&](bool over_chosen) {
    return router.norm_topk_prob.value_or(over_chosen) ? GateWeights::kNormalised
                                                       : GateWeights::kScores;
  };
  if (router.num_zero_experts > 0) return std::nullopt;
  if (router.gate == "mixtral" || router.gate == "gpt-oss") return GateWeights::kNormalised;
  if (router.gate == "switch") return GateWeights::kScores;
  if (router.gate == "qwen3") return with(true);
  if (router.gate == "qwen2" || router.gate == "olmoe") return with(false);
  return std::nullopt;
}

template <typename T>
class SelectKernels final : public KernelGroup {
 public:
  SelectKernels(const KernelShape& shape, GateWeights weights, KernelDevice& device)
      : shape_(shape), weights_(weights), device_(device), copy_(device) {}

  absl::Status SetUp() {
    // Slots are the K largest logits, whose order is not the even distribution's.
    RoutingSpec drawn = shape_.routing;
    if (drawn.kind == RoutingSpec::kUniform) drawn.kind = RoutingSpec::kZipf;
    const std::vector<float> preference = DrawPreferences(drawn, shape_.slots());
    const std::vector<T> logits(preference.begin(), preference.end());
    MOE_ASSIGN_OR_RETURN(logits_, Array<T>::Of(logits, device_, "logits"));
    MOE_ASSIGN_OR_RETURN(
        slots_, Array<int32_t>::Of(DrawSlots(drawn, shape_.slots()).expert, device_, "slots"));
    MOE_ASSIGN_OR_RETURN(expert_, Array<int32_t>::Allocate(S(), device_, "experts"));
    MOE_ASSIGN_OR_RETURN(weight_, Array<float>::Allocate(S(), device_, "weights"));
    MOE_ASSIGN_OR_RETURN(count_, Array<int64_t>::Allocate(E(), device_, "counts"));
    MOE_ASSIGN_OR_RETURN(row_of_slot_, Array<int32_t>::Allocate(S(), device_, "plan"));
    MOE_ASSIGN_OR_RETURN(slot_of_row_, Array<int32_t>::Allocate(S(), device_, "plan"));
    MOE_ASSIGN_OR_RETURN(micro_batches_, Array<int64_t>::Of({0, 1}, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(slot_offset_, Array<int64_t>::Of({0, S()}, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(begin_, Array<int64_t>::Allocate(E() + 1, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(segment_begin_, Array<int64_t>::Allocate(E() + 1, device_, "plan"));
    MOE_ASSIGN_OR_RETURN(sorted_count_, Array<int32_t>::Allocate(E(), device_, "plan"));
    const int64_t scratch =
        expert_sort::ScratchElements({.slots = S(), .num_experts = shape_.router.num_experts});
    MOE_ASSIGN_OR_RETURN(scratch_, Array<int32_t>::Allocate(scratch, device_, "plan"));

    const int64_t logit_bytes = shape_.tokens * E() * static_cast<int64_t>(sizeof(T));
    const auto select = static_cast<double>(logit_bytes + 8 * S() + 8 * E());
    const auto plan = static_cast<double>(12 * S() + 16 * (E() + 1) + 4 * E());
    MOE_RETURN_IF_ERROR(copy_.Reserve(std::max(select, plan)));
    kernels_.push_back(
        {"select", std::bind_front(&SelectKernels::Select, this), {copy_.Of(select)}});
    kernels_.push_back({"plan", std::bind_front(&SelectKernels::Plan, this), {copy_.Of(plan)}});
    return absl::OkStatus();
  }

 private:
  int64_t E() const { return shape_.router.num_experts; }
  int64_t K() const { return shape_.router.top_k; }
  int64_t S() const { return shape_.tokens * K(); }

  absl::Status Select() {
    const topk_gate::CudaGate<T> gate = {
        .logits = MatrixView<const T>(logits_.data(), shape_.tokens, E()),
        .rule = {.weights = weights_},
        .expert = MatrixView<int32_t>(expert_.data(), shape_.tokens, K()),
        .weight = MatrixView<float>(weight_.data(), shape_.tokens, K()),
        .count = count_.data()};
    return LaunchOn("select", device_.stream(),
                    [&](auto cuda) { return topk_gate::Run(gate, cuda); });
  }
  absl::Status Plan() {
    const expert_sort::CudaExpertSort sort = {.slots = S(),
                                              .expert = slots_.data(),
                                              .num_experts = shape_.router.num_experts,
                                              .micro_batch_offsets = micro_batches_.data(),
                                              .slot_offset = slot_offset_.data(),
                                              .most_rows = S(),
                                              .row_of_slot = row_of_slot_.data(),
                                              .slot_of_row = slot_of_row_.data(),
                                              .expert_begin = begin_.data(),
                                              .segment_begin = segment_begin_.data(),
                                              .count = sorted_count_.data(),
                                              .scratch = scratch_.data()};
    return LaunchOn("plan", device_.stream(),
                    [&](auto cuda) { return expert_sort::Run(sort, cuda); });
  }

  const KernelShape shape_;
  const GateWeights weights_;
  KernelDevice& device_;
  CopyLimit copy_;
  Array<T> logits_;
  Array<int32_t> slots_, expert_, row_of_slot_, slot_of_row_, sorted_count_, scratch_;
  Array<float> weight_;
  Array<int64_t> count_, begin_, segment_begin_;
  Array<int64_t> micro_batches_, slot_offset_;  // one micro-batch of one token, which has all slots
};

absl::Status CheckLimit(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("select: ", name, " is ", value, ", expected 1 to ", most, " on CUDA"));
}

}  // namespace

bool SelectsByLogits(const RouterConfig& router) {
  return WeightsOf(router).has_value();
}

MadeKernels MakeSelectKernels(const KernelShape& shape, KernelDevice& device) {
  const std::optional<GateWeights> weights = WeightsOf(shape.router);
  if (device.is_cpu() || !weights.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("select: gate ", shape.router.gate, " of ", moe::NameOf(shape.dtype),
                     ", expected f32, or on a GPU a gate that selects by logits"));
  }
  MOE_RETURN_IF_ERROR(CheckLimit("num_experts", shape.router.num_experts, topk_gate::kMaxExperts));
  MOE_RETURN_IF_ERROR(CheckLimit("top_k", shape.router.top_k, topk_gate::kMaxTopK));
  return WithStorageType(shape.dtype, [&]<typename T>(T) -> MadeKernels {
    auto kernels = std::make_unique<SelectKernels<T>>(shape, *weights, device);
    MOE_RETURN_IF_ERROR(kernels->SetUp());
    return kernels;
  });
}

}  // namespace moe::measure
