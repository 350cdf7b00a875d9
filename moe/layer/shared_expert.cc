#include "moe/layer/shared_expert.h"

#include <array>

#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/row_gate/row_gate.h"

namespace moe {

template <typename T>
absl::StatusOr<std::unique_ptr<SharedExpert<T>>> SharedExpert<T>::Create(
    const ExpertsConfig& config, Gated gated, const std::string& prefix, ParameterStore& store) {
  auto shared = std::unique_ptr<SharedExpert>(new SharedExpert);
  const std::string prefixes[] = {prefix + "shared_expert."};
  MOE_ASSIGN_OR_RETURN(shared->experts_,
                       Experts<T>::Create(config, prefixes, MeshGroup::kData, store));
  if (gated == Gated::kYes) {
    MOE_ASSIGN_OR_RETURN(shared->gate_, store.Add({.name = prefix + "shared_expert_gate.weight",
                                                   .rows = 1,
                                                   .cols = config.hidden_size,
                                                   .init_std = config.init_std,
                                                   .trainable = config.train}));
  }
  return shared;
}

template <typename T>
absl::Status SharedExpert<T>::Forward(const Pass& pass, const OwnRows& own, MatrixView<const T> x,
                                      MatrixView<T> y, SharedExpertSaved<T>& saved) const {
  const Context& context = pass.context;
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  const WorkspaceScope scope(workspace);
  saved.x = x;
  MOE_ASSIGN_OR_RETURN(const auto all, AllRows<T>(context, own, x, pass.site));
  MOE_RETURN_IF_ERROR(experts_->Prepare(all, pass.kept(), saved.experts));
  const std::array<int64_t, 2> offsets = {0, all.rows()};
  const LinearRows rows = {.offsets = offsets, .site = pass.site, .own = own.offsets};
  if (gate_ == nullptr) return experts_->Forward(context, rows, saved.experts, y);

  MOE_ASSIGN_OR_RETURN(saved.out, pass.kept().Matrix<T>(x.rows(), x.cols()));
  MOE_ASSIGN_OR_RETURN(saved.gate, pass.kept().Array<float>(x.rows()));
  MOE_ASSIGN_OR_RETURN(const auto logit, workspace.Array<float>(x.rows()));
  MOE_RETURN_IF_ERROR(experts_->Forward(context, rows, saved.experts, saved.out));
  MOE_RETURN_IF_ERROR(
      (Gemm<T, float>(x, gate_->view<T>(), MatrixView<float>(logit.data(), x.rows(), 1), workspace,
                      stream, context.gemm)));
  return RowGate<T>(saved.out, logit, saved.gate, y, stream);
}

// d_out = gate * dy; with d_l the gradient by the gate's logit: dx += d_l * w, d_w = sum_t d_l * x.
template <typename T>
absl::Status SharedExpert<T>::GateBackward(const Context& context, Gradients gradients,
                                           const SharedExpertSaved<T>& saved,
                                           MatrixView<T> d_out) const {
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  MOE_ASSIGN_OR_RETURN(const auto d_logit, workspace.Array<float>(gradients.dy.rows()));
  if (gradients.dy.rows() == 0) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(RowGateBackward<T>({.rows = saved.out,
                                          .gate = saved.gate,
                                          .weight = gate_->view<T>(),
                                          .dy = gradients.dy,
                                          .d_rows = d_out,
                                          .d_logit = d_logit,
                                          .dx = gradients.dx},
                                         stream));
  if (!gate_->spec().trainable) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const GradAccumulator d_gate, gate_->OpenGradient());
  for (size_t s = 0; s + 1 < gradients.segments.size(); ++s) {
    const int64_t begin = gradients.segments[s], end = gradients.segments[s + 1];
    if (begin == end) continue;
    MOE_RETURN_IF_ERROR(d_gate.Add(
        [&](absl::Span<float> sum, Write write) {
          return RowGateWeightGradient<T>(RowRange(saved.x, begin, end),
                                          d_logit.subspan(begin, end - begin), sum, write, stream);
        },
        workspace, stream));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status SharedExpert<T>::Backward(const Pass& pass, Gradients gradients,
                                       SharedExpertSaved<T>& saved, GradientReady ready) const {
  const Context& context = pass.context;
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace);
  const auto& [dy, dx, own, micro_batch_offsets, segments] = gradients;
  MatrixView<const T> d_expert = dy;
  if (own.all() > 0) {
    if (gate_ != nullptr) {
      MOE_ASSIGN_OR_RETURN(const auto d_out, workspace.Matrix<T>(dy.rows(), dy.cols()));
      MOE_RETURN_IF_ERROR(GateBackward(context, gradients, saved, d_out));
      d_expert = d_out;
    }
    MOE_ASSIGN_OR_RETURN(d_expert, AllRows<T>(context, own, d_expert, pass.site));
    MOE_RETURN_IF_ERROR(experts_->PrepareBackward(workspace, saved.experts));
    const std::array<int64_t, 2> offsets = {0, own.all()};
    MOE_ASSIGN_OR_RETURN(const auto d_rows, workspace.Matrix<T>(dy.rows(), dy.cols()));
    const LinearRows rows = {.offsets = offsets, .site = pass.site, .own = own.offsets};
    MOE_RETURN_IF_ERROR(experts_->InputGradient(context, rows, saved.experts, d_expert, d_rows));
    MOE_RETURN_IF_ERROR(AddRows<T>(dx, d_rows, dx, *context.compute));
    MOE_ASSIGN_OR_RETURN(saved.experts.rows, AllRows<T>(context, own, saved.x, pass.site));
  }
  MOE_RETURN_IF_ERROR(
      experts_->WeightGradient(context, micro_batch_offsets, saved.experts, d_expert, ready));
  return gate_ != nullptr && gate_->spec().trainable ? ready(*gate_) : absl::OkStatus();
}

template class SharedExpert<float>;
template class SharedExpert<BFloat16>;
template class SharedExpert<Float16>;

}  // namespace moe
