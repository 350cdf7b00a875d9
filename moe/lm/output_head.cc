#include "moe/lm/output_head.h"

#include <type_traits>
#include <utility>

#include "comm/column_exchange.h"
#include "kernels/base/workspace.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "moe/state/weight_lease.h"

namespace moe::lm {
namespace {

// Memory for the gradient by the logits: the logits' own where the types agree.
template <typename T>
absl::StatusOr<MatrixView<T>> LogitGradientMemory(MatrixView<float> logits, Workspace& workspace) {
  if constexpr (std::is_same_v<T, float>) {
    return logits;
  } else {
    return workspace.Matrix<T>(logits.rows(), logits.cols());
  }
}

}  // namespace

template <typename T>
absl::StatusOr<OutputHead<T>> OutputHead<T>::Create(const TransformerConfig& config,
                                                    Parameter* tied, const TensorShare& share,
                                                    ParameterStore& store) {
  const size_t before = store.parameters().size();
  MOE_ASSIGN_OR_RETURN(const Norm<T> norm, Norm<T>::Create("model.norm.weight", config.hidden_size,
                                                           config.norm_epsilon, store));
  const ParameterSpec weight = CutAlong(TensorAxis::kRows, {.name = "lm_head.weight",
                                                            .rows = config.vocab_size,
                                                            .cols = config.hidden_size,
                                                            .init_std = config.init_std});
  const bool pack = config.moe.pack_weights;
  MOE_ASSIGN_OR_RETURN(
      Linear<T> lm_head,
      tied != nullptr
          ? Linear<T>::Tied(*tied, weight.parts.front(), pack)
          : Linear<T>::Create({.weights = {weight}, .pack = pack, .share = share}, store));
  std::vector<Parameter*> parameters = store.AddedSince(before);
  if (tied != nullptr) parameters.push_back(tied);
  std::vector<int64_t> vocabulary = {0};
  const TreeCut tokens = {share.leaves, config.vocab_size, kCutItem};
  for (int r = 0; r < share.ranks; ++r) {
    vocabulary.push_back(tokens.Begin(LeavesOf(r, share.ranks, share.leaves).last));
  }
  return OutputHead(norm, std::move(lm_head), tied != nullptr ? TensorShare() : share,
                    std::move(vocabulary), std::move(parameters));
}

template <typename T>
absl::Status OutputHead<T>::RowLosses(const Pass& pass, MatrixView<float> logits, float scale,
                                      const TokenBatch& batch, MatrixView<T> d_logits) const {
  const Context& context = pass.context;
  Stream& stream = *context.compute;
  if (!share_.cut()) {
    return CrossEntropy<T>(logits, batch.targets, scale, batch.row_loss, d_logits, stream);
  }
  Workspace& workspace = *context.workspace;
  const RankCounts rows = share_.RowsOf(logits.rows());
  const int64_t first = rows[share_.index], own = rows[share_.index + 1] - first;
  const auto mine = [&](auto span) {
    return span.subspan(first, own);
  };
  const bool backward = d_logits.rows() > 0;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto whole, workspace.Matrix<float>(own, vocabulary_.back()));
  MOE_RETURN_IF_ERROR(
      TensorExchange(context, pass.site.Named("logits"), [&](Communicator& group, const Site& at) {
        return ColumnsToRows<float>({rows, vocabulary_, logits, whole}, group, workspace, stream,
                                    at);
      }));
  MatrixView<T> d_whole;
  if (backward) {
    MOE_ASSIGN_OR_RETURN(d_whole, LogitGradientMemory<T>(whole, workspace));
  }
  MOE_RETURN_IF_ERROR(
      CrossEntropy<T>(whole, mine(batch.targets), scale, mine(batch.row_loss), d_whole, stream));
  if (backward) {
    MOE_RETURN_IF_ERROR(TensorExchange(context, pass.site.Named("gradient of the logits"),
                                       [&](Communicator& group, const Site& at) {
                                         return RowsToColumns<T>(
                                             {rows, vocabulary_, d_logits, d_whole}, group,
                                             workspace, stream, at);
                                       }));
  }
  const MatrixView<float> losses(batch.row_loss.data(), logits.rows(), 1);
  return TensorExchange(context, pass.site.Named("losses"),
                        [&](Communicator& group, const Site& at) {
                          return AllGatherRows(losses, rows, group, stream, at);
                        });
}

template <typename T>
absl::StatusOr<MatrixView<float>> OutputHead<T>::Logits(const Pass& pass, MatrixView<const T> x,
                                                        NormSaved<T>& saved) const {
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  MOE_RETURN_IF_ERROR(norm_.Forward(pass.WithoutStash(), x, saved));
  MOE_ASSIGN_OR_RETURN(const auto logits,
                       pass.context.workspace->Matrix<float>(x.rows(), lm_head_.out_features()));
  MOE_RETURN_IF_ERROR(lm_head_.Forward(pass.context, {}, saved.y, logits));
  return logits;
}

template <typename T>
absl::Status OutputHead<T>::Loss(const Pass& pass, MatrixView<const T> x,
                                 const TokenBatch& batch) const {
  const WorkspaceScope scope(*pass.context.workspace);
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  if (x.rows() == 0) return absl::OkStatus();
  NormSaved<T> saved;
  MOE_ASSIGN_OR_RETURN(const auto logits, Logits(pass, x, saved));
  return RowLosses(pass, logits, /*scale=*/0, batch, {});
}

template <typename T>
absl::Status OutputHead<T>::LossAndGradient(const Pass& pass, MatrixView<const T> x,
                                            const TokenBatch& batch, MatrixView<T> dx,
                                            GradientReady ready) const {
  // The gradient by logits is as large as they are: nothing of it is kept for later.
  Context context = pass.context;
  context.later = nullptr;
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  NormSaved<T> saved;
  if (x.rows() == 0) {
    MOE_RETURN_IF_ERROR(lm_head_.WeightGradient(context, {}, {}, {}, ready));
    return norm_.Backward(pass, saved, dx, dx, Write::kOverwrite, ready);
  }
  MOE_ASSIGN_OR_RETURN(const auto logits, Logits(pass, x, saved));
  MOE_ASSIGN_OR_RETURN(const auto d_logits, LogitGradientMemory<T>(logits, workspace));
  const float scale = pass.d_loss / static_cast<float>(x.rows());
  MOE_RETURN_IF_ERROR(RowLosses(pass, logits, scale, batch, d_logits));
  MOE_RETURN_IF_ERROR(lm_head_.WeightGradient(context, {}, d_logits, saved.y, ready));
  MOE_ASSIGN_OR_RETURN(const auto d_normed, workspace.Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(lm_head_.InputGradient(context, {.site = pass.site}, d_logits, d_normed));
  return norm_.Backward(pass, saved, d_normed, dx, Write::kOverwrite, ready);
}

template class OutputHead<float>;
template class OutputHead<BFloat16>;
template class OutputHead<Float16>;

}  // namespace moe::lm
