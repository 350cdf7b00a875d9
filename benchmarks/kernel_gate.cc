// A gate alone: from logits to slots and weights, and backward.
#include <algorithm>
#include <memory>

#include <absl/strings/str_cat.h>

#include "benchmarks/kernel_group.h"
#include "gating/gate.h"
#include "gating/token_groups.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/workspace.h"

namespace moe::measure {
namespace {

class GateKernels final : public KernelGroup {
 public:
  GateKernels(const KernelShape& shape, KernelDevice& device)
      : shape_(shape), device_(device), copy_(device), saved_(device.memory()) {}

  absl::Status SetUp() {
    RouterConfig router = shape_.router;
    router.hidden_size = 1;
    router.seed = shape_.seed;
    MOE_RETURN_IF_ERROR(ValidateRouterConfig(router));
    gate_ = FindGate(router.gate)->make(router);
    if (!gate_->RunsOn(device_.stream().device().kind)) {
      return absl::UnimplementedError(
          absl::StrCat("gate ", router.gate, " runs on the CPU alone, in layers too"));
    }
    MOE_RETURN_IF_ERROR(MakeInputs());
    MOE_RETURN_IF_ERROR(AddKernels());
    if (device_.is_cpu() || !SelectsByLogits(router)) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(select_, MakeSelectKernels(shape_, device_));
    kernels_.insert(kernels_.end(), select_->kernels().begin(), select_->kernels().end());
    return absl::OkStatus();
  }

 private:
  int64_t columns() const {
    return int64_t{gate_->traits().logit_sets} * shape_.router.num_outputs();
  }

  // Draws logits whose first E columns prefer experts according to the routing, and makes the
  // selection that backward starts from.
  absl::Status MakeInputs() {
    const int64_t experts = shape_.router.num_experts;
    const std::vector<float> preference = DrawPreferences(shape_.routing, shape_.slots());
    std::vector<float> logits(shape_.tokens * columns(), 0.0f);
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      std::copy_n(preference.begin() + t * experts, experts, logits.begin() + t * columns());
    }
    MOE_ASSIGN_OR_RETURN(logits_, Array<float>::Of(logits, device_, "logits"));
    MOE_ASSIGN_OR_RETURN(d_logits_,
                         Array<float>::Allocate(shape_.tokens * columns(), device_, "d_logits"));
    const int64_t biased = gate_->traits().expert_bias ? shape_.router.num_outputs() : 0;
    MOE_ASSIGN_OR_RETURN(expert_bias_, Array<float>::Allocate(biased, device_, "expert bias"));
    MOE_ASSIGN_OR_RETURN(batch_, CopyBatch({}, shape_.tokens, host_));
    MOE_ASSIGN_OR_RETURN(groups_, MakeTokenGroups({}, batch_, host_));
    MOE_ASSIGN_OR_RETURN(kept_, Select());
    forward_mark_ = saved_.mark();
    const auto slots = static_cast<int64_t>(kept_.expert.size());
    MOE_ASSIGN_OR_RETURN(dropped_, Array<uint8_t>::Allocate(slots, device_, "dropped"));
    MOE_ASSIGN_OR_RETURN(d_weight_,
                         UniformValues<float>(slots, shape_.seed, 4, device_, "d_weight"));
    return absl::OkStatus();
  }

  absl::Status AddKernels() {
    const int64_t T = shape_.tokens;
    const int64_t E = shape_.router.num_outputs();
    const auto S = static_cast<int64_t>(kept_.expert.size());
    const auto both = static_cast<double>(4 * T * columns() + 4 * T * E + 8 * (T + 1));
    const double forward = both + static_cast<double>(8 * S + 4 * T + 8 * E);
    const double backward = both + static_cast<double>(9 * S);
    MOE_RETURN_IF_ERROR(copy_.Reserve(std::max(forward, backward)));
    kernels_.push_back(
        {"forward", std::bind_front(&GateKernels::Forward, this), {copy_.Of(forward)}});
    kernels_.push_back(
        {"backward", std::bind_front(&GateKernels::Backward, this), {copy_.Of(backward)}});
    return absl::OkStatus();
  }

  MatrixView<const float> Logits() const { return {logits_.data(), shape_.tokens, columns()}; }

  absl::StatusOr<GateSelection> Select() {
    return gate_->Select({.logits = Logits(),
                          .batch = batch_,
                          .groups = groups_,
                          .expert_bias = expert_bias_.span()},
                         saved_, device_.stream());
  }
  absl::Status Forward() {
    saved_.Release(forward_mark_);
    return Select().status();
  }
  absl::Status Backward() {
    return gate_->Backward({.logits = Logits(),
                            .batch = batch_,
                            .selection = kept_,
                            .dropped = dropped_.span(),
                            .d_weight = d_weight_.span()},
                           MatrixView<float>(d_logits_.data(), shape_.tokens, columns()),
                           device_.stream());
  }

  const KernelShape shape_;
  KernelDevice& device_;
  CopyLimit copy_;
  std::unique_ptr<const Gate> gate_;
  Array<float> expert_bias_, logits_, d_logits_, d_weight_;
  Array<uint8_t> dropped_;
  Workspace host_;   // batch and groups
  Workspace saved_;  // the selection for backward, and that of the last forward
  Workspace::Mark forward_mark_;
  Batch batch_;
  TokenGroups groups_;
  GateSelection kept_;
  std::unique_ptr<KernelGroup> select_;  // kernels for a GPU alone, and their data
};

}  // namespace

MadeKernels MakeGateKernels(const KernelShape& shape, KernelDevice& device) {
  if (shape.dtype != DType::kFloat32) return MakeSelectKernels(shape, device);
  auto kernels = std::make_unique<GateKernels>(shape, device);
  MOE_RETURN_IF_ERROR(kernels->SetUp());
  return kernels;
}

}  // namespace moe::measure
